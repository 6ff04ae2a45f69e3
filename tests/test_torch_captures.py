"""Tests of `_torch.captures`: what is reached from `f` without running it."""

from __future__ import annotations

import functools
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch.captures import Reached, reach
from reference import rows

F = Callable[[Any], Any]
GLOBAL = torch.ones(3)  # what some of the functions below name
MINE = types.ModuleType("of_a_user")
MINE.weight = GLOBAL  # type: ignore[attr-defined]


def by_name(x: Tensor) -> Tensor:
    return x + GLOBAL


class Model(nn.Module):
    def __init__(self, tensor: Tensor, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.Module())
        match how:
            case "parameter":
                self.inner[1].w = nn.Parameter(tensor)
            case "buffer":
                self.inner[1].register_buffer("b", tensor)
            case "attribute":
                self.table = [tensor]

    def forward(self, x: Tensor) -> Tensor:
        return x


class GlobalModel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x + GLOBAL


class Thing:
    """Holds a tensor, or uses the global one in a method that another one calls."""

    def __init__(self, tensor: object = None) -> None:
        self.tensor = tensor

    def method(self, x: Tensor) -> Tensor:
        return self.between(x)

    def between(self, x: Tensor) -> Tensor:
        return self.last(x)

    def last(self, x: Tensor) -> Tensor:
        return x + GLOBAL

    def unrelated(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x + GLOBAL

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + GLOBAL


class Called(Thing):
    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)


class Slots:
    __slots__ = ("empty", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x


class MoreSlots(Slots):
    __slots__ = "single"  # noqa: PLC0205 (what is allowed has to work)


def cell(tensor: object) -> F:
    return lambda x: (x, tensor)


def default(tensor: object) -> F:
    def f(x: object, tensor: object = tensor) -> object:
        return x, tensor

    return f


def keyword_default(tensor: object) -> F:
    def f(x: object, *, tensor: object = tensor) -> object:
        return x, tensor

    return f


def nested(_: object) -> F:
    def f(x: Tensor) -> object:
        def inner() -> Tensor:
            def innermost() -> Tensor:
                return x + GLOBAL

            return innermost()

        return inner()

    return f


def through_a_module(_: object) -> F:
    return lambda x: x + MINE.weight


def decorated(tensor: object) -> F:
    return functools.wraps(by_name)(cell(tensor))


# How a callable comes by a tensor; some of them by the global one.
HELD: dict[str, Callable[[Tensor], F]] = {
    "cell": cell,
    "default": default,
    "keyword_default": keyword_default,
    "decorated": decorated,
    "cached": lambda t: functools.cache(cell(t)),
    "partial": lambda t: functools.partial(pow, t),
    "partial_keyword": lambda t: functools.partial(dict, t=t),
    "partial_of_partial": lambda t: functools.partial(functools.partial(pow, t), 1),
    "partial_of_a_method": lambda t: functools.partial(Thing(t).unrelated),
    "parameter": lambda t: Model(t, "parameter"),
    "buffer": lambda t: Model(t, "buffer"),
    "module_attribute": lambda t: Model(t, "attribute"),
    "method_of_a_module": lambda t: Model(t, "parameter").forward,
    "method": lambda t: Thing(t).unrelated,
    "object": Called,
    "object_in_object": lambda t: Thing(Thing(t)).unrelated,
    "slots": Slots,
    "inherited_slots": MoreSlots,
    "list": lambda t: cell([1, t]),
    "tuple": lambda t: cell((1, t)),
    "set": lambda t: cell({t}),
    "frozenset": lambda t: cell(frozenset({t})),
    "deque": lambda t: cell(deque([t])),
    "dict": lambda t: cell({"a": {"b": t}}),
}
NAMED: dict[str, Callable[[Tensor], F]] = {
    "global": lambda _: by_name,
    "global_function": lambda _: lambda x: by_name(x) * 2,
    "nested": nested,
    "module_of_a_user": through_a_module,
    "called_by_a_method": lambda _: Thing().method,
    "called_by_call": lambda _: Called(),
    "called_by_forward": lambda _: GlobalModel(),
    "class_method": lambda _: Thing.of_class,
    "static_method": lambda _: Thing.static,
}


@pytest.mark.parametrize("how", [*HELD, *NAMED])
def test_reach_finds_a_tensor(how: str) -> None:
    tensor = torch.ones(3)
    make = (HELD | NAMED)[how]
    expected = GLOBAL if how in NAMED else tensor
    # A parameter is another object, of the same memory.
    found = [t.data_ptr() for t in reach(make(tensor)).tensors]
    assert expected.data_ptr() in found


def test_reach_finds_modules_and_generators_and_what_else_it_is_given() -> None:
    model, generator = Model(torch.ones(3), "parameter"), torch.Generator()
    found = reach(cell([model]), generator)
    assert found.generators == [generator]
    assert found.modules == list(model.modules())
    assert [t.data_ptr() for t in found.tensors] == [
        p.data_ptr() for p in model.parameters()
    ]


def test_a_method_reaches_only_the_methods_that_it_calls() -> None:
    assert not reach(Thing().unrelated).tensors
    assert any(t is GLOBAL for t in reach(Thing().method).tensors)


def test_libraries_are_not_looked_into() -> None:
    def f(x: Tensor) -> object:
        return torch.nn.functional.relu(x), functools, sys, weakref

    found = reach(f)
    assert found == Reached()


def test_an_empty_cell() -> None:
    tensor, late = torch.ones(3), torch.ones(3)

    def f(x: Tensor) -> Tensor:
        return x + tensor + late  # noqa: F821 (ruff minds the `del`)

    del late
    (found,) = reach(f).tensors
    assert found is tensor


def test_cycles_end() -> None:
    tensor = torch.ones(3)
    itself: list[object] = []
    itself.append(itself)
    thing, model = Thing(), Model(tensor, "attribute")
    thing.tensor = [thing, itself, model]
    model.table.append(thing)  # type: ignore[arg-type]
    assert [t is tensor for t in reach(thing.unrelated).tensors] == [True]


def test_each_tensor_is_found_once() -> None:
    tensor = torch.ones(3)
    assert len(reach(cell([tensor, {"a": tensor}]), tensor).tensors) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(10**6)),
        lambda: dict.fromkeys(range(10**6), 0.5),
        lambda: [[0.5] * 5000 for _ in range(5000)],
    ],
    ids=["list", "dict", "lists"],
)
def test_a_very_long_container_takes_no_time(make: Callable[[], object]) -> None:
    data, tensor = make(), torch.ones(3)

    def f(x: Tensor) -> object:
        return x + tensor, data

    start = time.process_time()
    found = reach(f).tensors
    assert time.process_time() - start < 0.25
    assert [t is tensor for t in found] == [True]


def test_what_is_far_away_is_not_found(caplog: pytest.LogCaptureFixture) -> None:
    near, many = torch.ones(3), [torch.ones(0) for _ in range(5000)]
    with caplog.at_level("DEBUG", logger="chunkcheck"):
        found = reach(cell([many, near])).tensors
    assert found[0] is near
    assert len(found) < 4096
    assert "looked at 4096 objects" in caplog.text


def test_nothing_of_the_users_is_run() -> None:
    ran = []
    tensor = torch.ones(3)

    class Curious:
        __slots__ = ("empty", "tensor")

        def __init__(self) -> None:
            self.tensor = tensor

        def __getattr__(self, name: str) -> object:
            ran.append(name)
            return 1

        @property
        def late(self) -> object:
            ran.append("late")
            return 1

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.tensor

    assert any(t is tensor for t in reach(Curious()).tensors)
    assert not ran


def test_a_private_slot() -> None:
    class Private:
        __slots__ = ("__tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.__tensor = tensor

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.__tensor

    tensor = torch.ones(3)
    assert any(t is tensor for t in reach(Private(tensor)).tensors)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_scripted_module() -> None:
    module = torch.jit.script(nn.Linear(3, 3).double())
    found = reach(module)
    assert found.modules[0] is module
    assert {id(p) for p in module.parameters()} <= {id(t) for t in found.tensors}

    x = rows(5, 3)
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), leaves)
    y = chunk_and_checkpoint(module, x, chunk_size=2)
    for got, plain in zip(
        torch.autograd.grad(y.square().sum(), leaves), expected, strict=True
    ):
        torch.testing.assert_close(got, plain)
