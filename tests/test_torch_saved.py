"""Tests of `_torch.saved`: tensors kept as a node of torch's keeps what it saves."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from chunkcheck._torch.saved import Saved
from reference import rows, without_gc


def test_tensors_come_back_in_order_and_in_their_graph() -> None:
    leaf, constant = rows(3), rows(2, grad=False)
    computed = leaf.exp()
    number = torch.arange(3)
    got = Saved([leaf, constant, computed, number], str).tensors()
    assert [t.data_ptr() for t in got] == [
        t.data_ptr() for t in (leaf, constant, computed, number)
    ]
    assert got[0] is leaf
    assert [t.requires_grad for t in got] == [True, False, True, False]
    assert got[2].grad_fn is computed.grad_fn


def test_none_at_all() -> None:
    assert Saved([], str).tensors() == []


@pytest.mark.parametrize("kind", ["leaf", "computed", "constant"])
def test_what_was_written_to_raises(kind: str) -> None:
    leaf = rows(3)
    tensor = {"leaf": leaf, "computed": leaf.exp(), "constant": leaf.detach().clone()}[
        kind
    ]
    saved = Saved([tensor], str)
    saved.tensors()
    with torch.no_grad():
        tensor[1:].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.tensors()


def test_inference_tensors_are_constants() -> None:
    with torch.inference_mode():
        first, last = torch.ones(2), torch.zeros(2)
    leaf = rows(3)
    got = Saved([first, leaf, last], str).tensors()
    assert [a is b for a, b in zip(got, (first, leaf, last), strict=True)] == [True] * 3


def test_all_is_freed_with_the_last_holder() -> None:
    class Marked(Tensor):
        pass

    with without_gc():
        tensors = [torch.ones(2).as_subclass(Marked) for _ in range(2)]
        tensors[1].requires_grad_()
        refs = [weakref.ref(t) for t in tensors]
        saved = Saved(tensors, str)
        del tensors
        assert all(len(t) == 2 for t in saved.tensors())
        del saved
        assert [ref() for ref in refs] == [None, None]


def test_hooks_around_see_each_tensor_once() -> None:
    packed: list[Any] = []
    unpacked: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor * 3

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor

    leaf, constant = rows(3), rows(2, grad=False)
    with saved_tensors_hooks(pack, unpack):
        saved = Saved([leaf, constant], str)
    assert saved.outer_hooks
    assert [shape for shape in packed if shape.numel()] == [(3,), (2,)]
    assert not unpacked
    got = saved.tensors()
    torch.testing.assert_close(got[1], constant * 3)  # what the hooks make of it counts
    assert [shape for shape in unpacked if shape.numel()] == [(3,), (2,)]


def test_without_hooks_around() -> None:
    leaf = rows(3)
    assert not Saved([leaf], str).outer_hooks
    assert not Saved([], str).outer_hooks
    with torch.autograd.graph.save_on_cpu():
        assert Saved([], str).outer_hooks
