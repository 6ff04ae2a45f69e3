"""Tests of `_torch.tensors`: formats are kept, stubs take no memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chunkcheck._torch.tensors import as_contiguous, memory_format, new_like, stub
from reference import assert_same_as_plain


def test_a_stub_takes_no_memory() -> None:
    whole = torch.ones(100, 100, dtype=torch.bfloat16)
    got = stub(whole)
    assert (got.shape, got.dtype) == (whole.shape, whole.dtype)
    assert got.untyped_storage().nbytes() == whole.element_size()


def test_new_like_keeps_the_format() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got = new_like(image, (7, 3, 4, 5))
    assert got.shape == (7, 3, 4, 5)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert new_like(torch.ones(2, 3).T, (4, 2)).is_contiguous()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 3), torch.contiguous_format),
        (torch.ones(2, 3).T, None),
        (torch.ones(1, 3).expand(2, 3), None),
        (
            torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.channels_last,
        ),
        (
            torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
            torch.channels_last_3d,
        ),
    ],
    ids=["contiguous", "transposed", "expanded", "channels_last", "channels_last_3d"],
)
def test_memory_format(tensor: Tensor, expected: torch.memory_format | None) -> None:
    assert memory_format(tensor) == expected


def test_as_contiguous_copies_only_what_has_gaps() -> None:
    whole = torch.ones(4, 4)
    assert as_contiguous(whole, torch.contiguous_format) is whole
    assert as_contiguous(whole.T, None).data_ptr() == whole.data_ptr()
    piece = whole[:, :2]
    assert as_contiguous(piece, torch.contiguous_format).is_contiguous()
    assert as_contiguous(piece, None) is piece


@pytest.mark.parametrize("strategy", ["non_reentrant", "reentrant", "none"])
def test_a_copied_chunk_has_its_gradient(strategy: str) -> None:
    x = torch.randn(3, 7, 2, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return x.view(-1).sin().view(x.shape)

    assert_same_as_plain(
        f,
        (x,),
        chunk_size=3,
        batch_dim=1,
        strategy=strategy,  # type: ignore[arg-type]
    )
