"""Tests of `_torch.captures` on graphs: where that of a run ends, what it saved."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

from chunkcheck._torch.captures import (
    Observed,
    borders,
    check_unchanged,
    observed,
    stamp,
)
from chunkcheck._torch.compat import next_number, number
from reference import rows


def test_borders_tell_the_given_from_the_captured() -> None:
    given, captured = [rows(2, 3), rows(3), rows(3)], rows(3)
    first = next_number()
    hidden = given[0] * captured
    found = borders([hidden.exp(), hidden.sin() + given[2]], given, first)
    assert found is not None
    assert found.given == {0, 2}
    assert [leaf is captured for leaf in found.leaves] == [True]
    assert hidden.grad_fn in found.nodes
    assert len(found.nodes) == len(set(found.nodes)) == 7  # three of them of leaves


def test_a_result_that_is_itself_a_leaf() -> None:
    given, captured = [rows(3), rows(3)], rows(3)
    found = borders([given[1], captured], given, next_number())
    assert found is not None
    assert found.given == {1}
    assert [leaf is captured for leaf in found.leaves] == [True]
    assert not found.nodes


def test_a_captured_history_is_older_than_the_run() -> None:
    x, old = rows(3), rows(3).exp()
    assert old.grad_fn is not None
    first = next_number()
    for result, expected in (
        (x.sin(), []),
        (x * old, [number(old.grad_fn)]),
        (old, [number(old.grad_fn)]),
    ):
        found = borders([result], [x], first)
        assert found is not None
        assert found.older == expected
        assert not found.leaves  # those behind it are not looked for
    assert borders([x.sin()], [x], None) is None


def test_what_was_given_may_have_a_history() -> None:
    x = rows(3).exp()
    first = next_number()
    found = borders([x.sin() * x], [rows(3), x], first)
    assert found is not None
    assert (found.given, found.older, found.leaves) == ({1}, [], [])


@pytest.mark.parametrize("made_before", [0, 10_000])
def test_a_node_of_another_thread_is_not_of_the_run(made_before: int) -> None:
    x, leaf = rows(3), rows(3)
    made: list[Tensor] = []

    def work() -> None:
        for _ in range(made_before):
            leaf.view_as(leaf)
        made.append(leaf.exp())

    for _ in range(100):
        x.view_as(x)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    first = next_number()
    found = borders([x * made[0]], [x], first)
    assert found is not None
    assert made[0].grad_fn is not None
    assert found.older == [number(made[0].grad_fn)]
    assert not found.leaves


def test_observed_are_the_constants_that_a_run_saves() -> None:
    x, constant, other = rows(3), rows(3, grad=False), rows(3, grad=False)
    first = next_number()
    y = x.sin() * constant * other.exp()
    found = borders([y], [x], first)
    assert found is not None
    refs = observed(found.nodes, [x])
    assert any(ref() is constant for ref, _ in refs)
    assert not any(ref() is x or ref() is other for ref, _ in refs)
    del y, found
    assert [ref() is constant for ref, _ in refs if ref() is not None] == [True]


def test_check_unchanged() -> None:
    def watch(tensor: Tensor) -> Observed:
        return [(weakref.ref(tensor), stamp(tensor))]

    layer = torch.nn.Linear(5, 2)
    module = torch.nn.Sequential(layer)
    tensor, passing, weight = torch.ones(2, 5), torch.ones(1), layer.weight
    watched = watch(tensor) + watch(passing)
    check_unchanged(watched, set(), module)
    passing.add_(1)
    del passing  # what is gone cannot be used again
    check_unchanged(watched, set(), module)
    tensor[0].add_(1)
    check_unchanged(watched, {id(tensor)}, module)
    with pytest.raises(RuntimeError, match=r"shape \(2, 5\), which f captures, has be"):
        check_unchanged(watched, set(), module)
    watched = watch(weight)
    weight.data = torch.zeros(2, 5)  # which counts as no write
    with pytest.raises(RuntimeError, match=r"Sequential.0.weight, a tensor of shape"):
        check_unchanged(watched, set(), module)
