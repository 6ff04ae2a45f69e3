"""Tests of `_torch.tensors`: cut once, join once, keep formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch.tensors import as_contiguous, cut, join, memory_format
from reference import assert_same_as_plain

INPUTS = {
    "contiguous": lambda: torch.arange(12.0).view(6, 2),
    "transposed": lambda: torch.arange(12.0).view(2, 6).T,
    "expanded": lambda: torch.arange(2.0).expand(6, 2),
    "strided": lambda: torch.arange(24.0).view(12, 2)[::2],
    "offset": lambda: torch.arange(16.0)[2:14].view(6, 2),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_chunks_are_views(name: str, size: int) -> None:
    whole = INPUTS[name]()
    pieces = cut(whole, size, 0)
    assert torch.equal(torch.cat(pieces), whole)
    for piece in pieces:
        assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def nodes(tensor: Tensor) -> list[str]:
    """Return the names of all nodes in the graph of `tensor`."""
    found: dict[object, str] = {}
    todo = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            todo += [parent for parent, _ in node.next_functions]
    return list(found.values())


def test_each_leaf_is_split_once_and_joined_once() -> None:
    x = torch.randn(32, 2, requires_grad=True)
    names = nodes(chunk_and_checkpoint(torch.sin, x, chunk_size=1))
    assert names.count("SplitBackward0") == 1
    assert names.count("CatBackward0") == 1
    assert not [name for name in names if "Slice" in name or "Narrow" in name]


def test_a_joined_tensor_is_fresh() -> None:
    x = torch.ones(3)
    assert join([x], 0).data_ptr() != x.data_ptr()


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
