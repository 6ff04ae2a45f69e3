"""Tests of the engine's memory: what lives how long, on both ways."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chunkcheck import chunk_and_checkpoint
from reference import Counted, assert_same_as_plain, rows, without_gc

ways = pytest.mark.parametrize("history", [False, True], ids=["one_node", "own_graph"])


def capture(*, history: bool) -> tuple[Tensor, Tensor]:
    """Return a leaf, and what `f` captures, which may be computed from it."""
    leaf = rows(4)
    return leaf, -leaf if history else leaf


@ways
def test_f_is_freed_by_backward(*, history: bool) -> None:
    class Large:
        pass

    _, shift = capture(history=history)
    kept = Large()
    ref = weakref.ref(kept)

    def make(kept: object) -> Callable[[Tensor], Tensor]:
        return lambda x: (x * shift).sin() if kept else x

    with without_gc():
        x = rows(5, 4)
        y = chunk_and_checkpoint(make(kept), x, chunk_size=2)
        del kept
        assert ref() is not None
        y.sum().backward(retain_graph=True)
        assert ref() is not None
        y.sum().backward()
        assert ref() is None, "the call outlives its backward"
        assert y.requires_grad

        kept = Large()
        ref = weakref.ref(kept)
        y = chunk_and_checkpoint(make(kept), x, chunk_size=2)
        del kept, y
        assert ref() is None, "the call outlives its result"


@ways
@pytest.mark.parametrize("which", ["x", "leaf", "both"])
def test_one_chunk_at_a_time(which: str, *, history: bool) -> None:
    """Also where backward needs only a part of what the chunks saved."""
    leaf, shift = capture(history=history)
    alive: list[StorageWeakRef] = []
    most = 0

    def f(x: Tensor) -> Tensor:
        nonlocal most
        hidden = x.exp()
        alive.append(StorageWeakRef(hidden.untyped_storage()))
        most = max(most, sum(not ref.expired() for ref in alive))
        return hidden.sin() * shift

    x = rows(12, 4)
    inputs = {"x": [x], "leaf": [leaf], "both": [x, leaf]}[which]
    with without_gc():
        y = chunk_and_checkpoint(f, x, chunk_size=2)
        assert most == 1
        torch.autograd.grad(y.sum(), inputs)
        assert most == 1


class Notes(torch.autograd.Function):
    """Hands its gradients on, and notes how many of them are alive."""

    alive: list[StorageWeakRef]
    most: int

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        given = gradient * 2
        Notes.alive.append(StorageWeakRef(given.untyped_storage()))
        alive = sum(not ref.expired() for ref in Notes.alive)
        Notes.most = max(Notes.most, alive)
        return given


@ways
def test_no_two_gradients_of_chunks_are_held(*, history: bool) -> None:
    """Each is put in its place before the next chunk has its own."""
    _, shift = capture(history=history)

    def f(x: Tensor, table: Tensor) -> Tensor:
        a: Tensor = Notes.apply(x)  # type: ignore[no-untyped-call]
        b: Tensor = Notes.apply(table)  # type: ignore[no-untyped-call]
        return (a @ b).sin() * shift

    Notes.alive, Notes.most = [], 0
    x, table = rows(12, 4), rows(4, 4)
    with without_gc():
        y = chunk_and_checkpoint(f, x, table, batch_dim=(0, None), chunk_size=2)
        y.sum().backward()
    assert len(Notes.alive) == 12
    assert Notes.most <= 3  # those of both tensors, and the last of the chunk before


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        assert torch.equal(x, again)
        result: Tensor = gradient * again.cos()
        return result


@ways
def test_each_chunk_is_recomputed_once(*, history: bool) -> None:
    """Also for a node that asks for what it saved more than once."""
    _, shift = capture(history=history)
    f = Counted(lambda x: ReadsTwice.apply(x * shift))  # type: ignore[no-untyped-call]
    x = rows(5, 4)
    y = chunk_and_checkpoint(f, x, chunk_size=2)
    (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, ((x * shift).cos() * shift).detach())
    assert sorted(f.rows) == [1, 1, 2, 2, 2, 2]


@ways
def test_saved_on_the_cpu(*, history: bool) -> None:
    leaf, shift = capture(history=history)
    x = rows(5, 4)
    with torch.autograd.graph.save_on_cpu():
        assert_same_as_plain(
            lambda x: (x * shift).exp(),
            (x,),
            chunk_size=2,
            strategy="auto",
            captured=leaf,
        )
