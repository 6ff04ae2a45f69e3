"""Tests of `_torch.gradients`: the chunks' gradients put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chunkcheck._torch.gradients import Gradient, Rows, Sum, sum_dtype
from reference import rows


def of_rows(count: int = 5, dim: int = 0, size: int = 2) -> Rows:
    shape = [3, 3]
    shape[dim] = count
    return Rows(shape, torch.empty(shape).stride(), dim, size)


def filled(gradient: Gradient, *parts: Tensor | None) -> Tensor:
    for chunk, part in enumerate(parts):
        if part is not None:
            gradient.add(chunk, part)
    total = gradient.total()
    assert total is not None
    return total


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_come_in_any_order(dim: int) -> None:
    whole = rows(5, 5, grad=False)
    found = Rows(whole.shape, whole.stride(), dim, 2)
    parts = whole.split(2, dim)
    for chunk in (1, 2, 0):
        found.add(chunk, parts[chunk])
    total = found.total()
    assert total is not None
    assert torch.equal(total, whole)
    assert total.is_contiguous()


def test_rows_have_the_strides_they_are_given() -> None:
    image = rows(3, 2, 4, 5, grad=False).to(memory_format=torch.channels_last)
    total = filled(
        Rows(image.shape, image.stride(), 0, 2), *image.contiguous().split(2)
    )
    assert torch.equal(total, image)
    assert total.stride() == image.stride()


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "in_a_graph"])
def test_rows_of_a_missing_chunk_are_zero(missing: int, *, grad: bool) -> None:
    whole = rows(5, 3, grad=grad)
    expected = whole.detach().clone()
    expected.split(2)[missing].zero_()
    parts = [p if i != missing else None for i, p in enumerate(whole.split(2))]
    got = filled(of_rows(), *parts)
    assert torch.equal(got, expected)
    assert got.requires_grad == grad
    if grad:
        (back,) = torch.autograd.grad(got.sum(), whole)
        assert torch.equal(back, (expected != 0).double())


def test_nothing_at_all() -> None:
    assert of_rows().total() is None
    assert Sum(None).total() is None


@pytest.mark.parametrize("which", [(True, False), (False, True)])
@pytest.mark.parametrize("kind", ["rows", "sum"])
def test_parts_of_which_some_are_in_a_graph(kind: str, which: tuple[bool, ...]) -> None:
    leaves = [rows(2, 3, grad=grad) for grad in which]
    parts = [leaf * 2 for leaf in leaves]
    if kind == "rows":
        got, expected = filled(of_rows(4), *parts), torch.cat(parts)
    else:
        got, expected = filled(Sum(None), *parts), parts[0] + parts[1]
    assert torch.equal(got, expected)
    leaf = leaves[which.index(True)]
    (back,) = torch.autograd.grad(got.sum(), leaf)
    assert torch.equal(back, torch.full_like(leaf, 2))


def sparse(*places: int) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([places]),
        torch.full((len(places), 3), 2.0, dtype=torch.float64),
        (4, 3),
        check_invariants=True,
    )


@pytest.mark.parametrize("kinds", ["sd", "ds", "ss", "sds", "dsd", "ssd", "dds"])
def test_sparse_and_dense_gradients(kinds: str) -> None:
    parts = [
        sparse(0, i) if k == "s" else rows(4, 3, grad=False)
        for i, k in enumerate(kinds)
    ]
    kept = [part.to_dense().clone() for part in parts]
    got = filled(Sum(None), *parts)
    assert got.layout == (torch.sparse_coo if "d" not in kinds else torch.strided)
    torch.testing.assert_close(got.to_dense(), torch.stack(kept).sum(0))
    for part, before in zip(parts, kept, strict=True):
        assert torch.equal(part.to_dense(), before)


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["own", "wider"])
def test_the_first_gradient_is_not_written_to(dtype: torch.dtype | None) -> None:
    for first in (torch.ones(1, 3).expand(4, 3), torch.ones(4, 3)):
        kept = first.clone()
        got = filled(Sum(dtype), first, torch.ones(4, 3), torch.ones(4, 3))
        assert torch.equal(got, torch.full((4, 3), 3.0))
        assert torch.equal(first, kept)
        alone = filled(Sum(dtype), first)
        alone.add_(1)
        assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, 256), (torch.float32, 512), (torch.float64, 512)]
)
def test_what_it_is_summed_in(dtype: torch.dtype | None, expected: int) -> None:
    got = filled(Sum(dtype), *[torch.ones(3, dtype=torch.bfloat16)] * 512)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("asked", "gradient", "expected"),
    [
        ("auto", torch.bfloat16, torch.float32),
        ("auto", torch.float16, torch.float32),
        ("auto", torch.float32, None),
        ("auto", torch.float64, None),
        ("auto", torch.complex64, None),
        (None, torch.bfloat16, None),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, None),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
)
def test_sum_dtype(
    asked: object, gradient: torch.dtype, expected: torch.dtype | None
) -> None:
    assert sum_dtype(asked, gradient) == expected


@pytest.mark.parametrize("kind", ["rows", "sum"])
@pytest.mark.parametrize("constant", [None, "missing", 0, 1])
def test_batched_gradients(kind: str, constant: object) -> None:
    """Also where a chunk has none, or one that does not depend on what is batched."""

    class Combined(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.new_ones(4, 3)

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            parts: list[Tensor | None] = list(gradient.split(2))
            if constant == "missing":
                parts[1] = None
            elif isinstance(constant, int):
                parts[constant] = torch.ones(2, 3, dtype=torch.float64)
            return filled(of_rows(4) if kind == "rows" else Sum(None), *parts)

    x = rows(4 if kind == "rows" else 2, 3)
    out: Tensor = Combined.apply(x)  # type: ignore[no-untyped-call]
    weights = rows(5, 4, 3, grad=False)
    expected = [
        torch.autograd.grad(out, x, weight, retain_graph=True)[0] for weight in weights
    ]
    (got,) = torch.autograd.grad(out, x, weights, is_grads_batched=True)
    torch.testing.assert_close(got, torch.stack(expected))
