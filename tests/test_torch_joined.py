"""Tests of `_torch.joined`: chunks written to their places, each with its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chunkcheck._plan import Leaf, Plan, plan_arguments
from chunkcheck._torch.joined import Joined
from chunkcheck._tree import Entry
from reference import rows


def plan(count: int, size: int) -> Plan:
    leaf = Leaf("args[0]", (count,), Entry(0, exact=False, where="batch_dim"))
    return plan_arguments([leaf], size)


def joined(
    *chunks: Tensor, dim: int = 0, connected: bool = True, size: int | None = None
) -> Tensor:
    count = sum(chunk.shape[dim] for chunk in chunks)
    found = Joined(chunks[0], dim, plan(count, size or chunks[0].shape[dim]))
    for index, chunk in enumerate(chunks):
        found.add(chunk, index, connected=connected)
    return found.tensor()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("grad", [False, True])
def test_it_is_the_concatenation(dim: int, *, grad: bool) -> None:
    whole = rows(5, 5, grad=grad)
    chunks = [piece.clone() for piece in whole.split(2, dim)]
    got = joined(*chunks, dim=dim)
    assert torch.equal(got, whole)
    assert got.requires_grad == grad


@pytest.mark.parametrize("connected", [False, True])
def test_a_chunk_is_written_in_place_and_not_held(*, connected: bool) -> None:
    found = Joined(rows(2, 3), 0, plan(4, 2))
    refs = []
    for index in range(2):
        chunk = rows(2, 3).exp()
        refs.append(StorageWeakRef(chunk.untyped_storage()))
        found.add(
            chunk.detach() if connected and index else chunk, index, connected=connected
        )
        del chunk
        assert refs[-1].expired() or connected  # `exp` saves its own result
    assert refs[0].expired() == (not connected)
    got = found.tensor()
    assert got.requires_grad == connected
    place = got.data_ptr()
    assert found.tensor().data_ptr() == place  # no copy is made of it


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (torch.contiguous_format, (2, 3, 4, 5)),
        (torch.channels_last, (2, 3, 4, 5)),
        (torch.channels_last_3d, (2, 3, 2, 4, 5)),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_the_memory_format_is_kept(
    layout: torch.memory_format, shape: tuple[int, ...], *, grad: bool
) -> None:
    chunks = [
        torch.randn(shape).to(memory_format=layout).requires_grad_(grad)
        for _ in range(2)
    ]
    got = joined(*chunks)
    assert got.is_contiguous(memory_format=layout)
    assert torch.equal(got, torch.cat(chunks))


@pytest.mark.parametrize("which", [(True, False, True), (False, True, False)])
def test_chunks_of_which_some_require_a_gradient(which: tuple[bool, ...]) -> None:
    chunks = [rows(2, 3, grad=grad) for grad in which]
    got = joined(*chunks)
    assert torch.equal(got, torch.cat(chunks))
    assert got.grad_fn is not None
    assert len(got.grad_fn.next_functions) == sum(which)
    weight = rows(6, 3, grad=False)
    (got * weight).sum().backward()
    for chunk, part in zip(chunks, weight.split(2), strict=True):
        if chunk.requires_grad:
            assert chunk.grad is not None
            assert torch.equal(chunk.grad, part)


def test_what_stays_of_a_chunk_takes_no_memory() -> None:
    found = Joined(rows(2, 3), 0, plan(4, 2))
    for chunk in range(2):
        found.add(rows(2, 3), chunk, connected=True)
    sizes = [held.untyped_storage().nbytes() for _, held in found._stubs]
    assert sizes == [8, 8]


def test_not_connected() -> None:
    got = joined(rows(2, 3).exp(), rows(1, 3).exp(), connected=False)
    assert not got.requires_grad
    with torch.no_grad():
        assert not joined(rows(2, 3), rows(1, 3)).requires_grad
    assert not joined(torch.arange(2), torch.arange(1)).requires_grad


def test_backward_splits_without_a_copy() -> None:
    seen: list[Tensor] = []
    chunks = [rows(2, 3).exp() for _ in range(2)] + [rows(1, 3).exp()]
    for chunk in chunks:
        chunk.register_hook(seen.append)
    gradient = rows(5, 3, grad=False)
    joined(*chunks).backward(gradient)
    storage = gradient.untyped_storage().data_ptr()
    assert [t.shape[0] for t in seen] in ([2, 2, 1], [1, 2, 2])
    assert all(t.untyped_storage().data_ptr() == storage for t in seen)
    assert torch.equal(torch.cat(sorted(seen, key=lambda t: t.data_ptr())), gradient)


@pytest.mark.filterwarnings("ignore:Please use `torch.vmap`:FutureWarning")
def test_it_can_be_differentiated_twice_and_batched() -> None:
    a, b = rows(2, 3), rows(1, 3)

    def f(a: Tensor, b: Tensor) -> Tensor:
        return joined(a.sin(), b.exp() * 2, size=2)

    assert torch.autograd.gradcheck(f, (a, b), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (a, b))


def test_a_subclass_and_a_transform_take_no_writing() -> None:
    class Sub(Tensor):
        pass

    chunks: list[Tensor] = [rows(size, 3).as_subclass(Sub) for size in (2, 1)]
    got = joined(*chunks)
    assert type(got) is Sub
    assert torch.equal(got, torch.cat(chunks))

    x = rows(4, 3, 2, grad=False)
    mapped = torch.func.vmap(lambda x: joined(x[:2], x[2:], size=2))(x)
    assert torch.equal(mapped, x)
