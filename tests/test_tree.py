"""Tests of `_tree`: flatten, rebuild, paths, prefixes, alignment."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from chunkcheck._tree import LEAF, align, broadcast, equal, flatten, unflatten


class Point(NamedTuple):
    """A namedtuple by class."""

    x: object
    y: object


class Named(namedtuple("Named", "a b")):  # noqa: PYI024, SLOT002
    """A namedtuple with a method."""

    def total(self) -> Any:
        """Return the sum of both."""
        return self.a + self.b


class Registered:
    """A container that torch's registry knows."""

    def __init__(self, left: object, right: object, label: str) -> None:
        self.left = left
        self.right = right
        self.label = label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


_pytree.register_pytree_node(
    Registered,
    lambda value: ([value.left, value.right], value.label),
    lambda children, label: Registered(*children, label),  # type: ignore[call-arg]
)

VALUES: list[object] = [
    1,
    None,
    "text",
    (),
    [],
    {},
    (1, [2, (3,)], {"a": 4}),
    OrderedDict(b=1, a=[2]),
    defaultdict[str, object](list, {"x": 1}),
    deque([1, 2], maxlen=5),
    Point(1, (2, 3)),
    Named(1, 2),
    Registered(1, {"k": 2}, "label"),
    torch.Size((2, 3)),
    {1: "int key", ("t", 2): None},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_unflatten_inverts_flatten(value: object) -> None:
    leaves, tree = flatten(value)
    rebuilt = unflatten(tree, leaves)
    assert rebuilt == value
    assert type(rebuilt) is type(value)
    assert tree.count() == len(leaves) == len(list(tree.paths("v")))


def test_containers_keep_what_makes_them_work() -> None:
    factory: defaultdict[str, object] = defaultdict(list, {"x": 1})
    leaves, tree = flatten((factory, deque([1], maxlen=5), Named(1, 2)))
    factory, queue, named = unflatten(tree, leaves)
    assert factory["new"] == []
    assert queue.maxlen == 5
    assert named.total() == 3


def test_no_cycle_keeps_a_leaf_alive() -> None:
    class Leaf:
        pass

    leaf = Leaf()
    alive = weakref.ref(leaf)
    gc.collect()
    gc.disable()
    try:
        leaves, tree = flatten({"a": [leaf]})
        rebuilt = unflatten(tree, leaves)
        del leaf, leaves, rebuilt
        assert alive() is None
    finally:
        gc.enable()


def test_containers_are_fresh() -> None:
    inner: list[int] = [1]
    value = {"a": inner}
    leaves, tree = flatten(value)
    rebuilt = unflatten(tree, leaves)
    rebuilt["a"].append(2)
    rebuilt["b"] = 3
    assert value == {"a": [1]}


def test_return_types_of_torch_keep_their_type() -> None:
    value = torch.tensor([[1.0, 3.0], [5.0, 2.0]]).max(dim=1)
    leaves, tree = flatten(value)
    assert len(leaves) == 2
    assert type(unflatten(tree, leaves)) is type(value)


@pytest.mark.filterwarnings("ignore:.*_register_pytree_node` is deprecated")
def test_registered_dataclass_is_a_container_with_named_fields() -> None:
    @dataclasses.dataclass
    class Batch:
        x: object
        y: object

    torch.export.register_dataclass(Batch, serialized_type_name="tests.Batch")
    leaves, tree = flatten(Batch(1, {"k": 2}))
    assert leaves == [1, 2]
    assert list(tree.paths("v")) == ["v.x", "v.y['k']"]
    assert unflatten(tree, leaves) == Batch(1, {"k": 2})


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        type("Dict", (dict,), {})(a=1),
        type("List", (list,), {})([1]),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)]),
        range(3),
        "ab",
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_rebuilt_is_a_leaf(value: object) -> None:
    leaves, tree = flatten(value)
    assert tree is LEAF
    assert leaves[0] is value


def test_paths_read_as_python() -> None:
    value = ({"mask": 1, 2: [3, 4]}, Point(5, (6,)), Registered(7, 8, ""))
    _, tree = flatten(value)
    assert list(tree.paths("args")) == [
        "args[0]['mask']",
        "args[0][2][0]",
        "args[0][2][1]",
        "args[1].x",
        "args[1].y[0]",
        "args[2][0]",
        "args[2][1]",
    ]


def _said(prefix: object, value: object) -> list[tuple[object, bool, str]]:
    _, tree = flatten(value)
    return [tuple(entry) for entry in broadcast(prefix, tree, "dim", "args")]  # type: ignore[misc]


def test_prefix_single_value_holds_for_all() -> None:
    assert _said(0, {"a": 1, "b": (2, 3)}) == [(0, False, "dim")] * 3


def test_prefix_descends_where_it_is_a_container() -> None:
    assert _said((0, {"a": None, "b": 1}), ((1, 2), {"b": 3, "a": 4})) == [
        (0, False, "dim[0]"),
        (0, False, "dim[0]"),
        (1, True, "dim[1]['b']"),
        (None, True, "dim[1]['a']"),
    ]


def test_prefix_mapping_describes_fields() -> None:
    assert _said({"x": 0, "y": None}, Point(1, 2)) == [
        (0, True, "dim['x']"),
        (None, True, "dim['y']"),
    ]
    assert _said([0, None], Point(1, 2)) == [
        (0, True, "dim[0]"),
        (None, True, "dim[1]"),
    ]


@pytest.mark.parametrize(
    ("prefix", "value", "message"),
    [
        ((0, 1), (1, 2, 3), r"dim is \(0, 1\), but args is a tuple of 3"),
        ((0,), 5, r"dim is \(0,\), but args is a single value"),
        ({"a": 0}, {"b": 1}, r"dim is \{'a': 0\}, but args is a dict of 1 \('b'\)"),
        (
            (0, (0, 0)),
            (1, (1,)),
            r"dim\[1\] is \(0, 0\), but args\[1\] is a tuple of 1",
        ),
        ({"a": 0}, {}, "args is a dict of 0: write a tuple, or a dict by key"),
        ({"a": 0}, (1,), "args is a tuple of 1: write a tuple, or a dict"),
    ],
)
def test_prefix_that_does_not_fit(prefix: object, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _said(prefix, value)


def test_align_reorders_keys_to_the_reference() -> None:
    _, reference = flatten(({"a": 1, "b": (2, 3)}, 4))
    leaves, tree = flatten(({"b": (20, 30), "a": 10}, 40))
    assert align(reference, tree, leaves, "result") == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("reference", "value", "message"),
    [
        ({"a": 1}, {"b": 1}, r"result is a dict of 1 \('a'\) there, is a dict of 1"),
        ((1, 2), (1, 2, 3), "tuple of 2 there, is a tuple of 3 here"),
        ((1, [2]), (1, (2,)), r"result\[1\] is a list of 1 there, is a tuple of 1"),
        ({"a": {"b": 1}}, {"a": 1}, r"result\['a'\] is a dict .* is a single value"),
        (OrderedDict(a=1), {"a": 1}, r"OrderedDict of 1 .* is a dict of 1"),
        (Registered(1, 2, "a"), Registered(1, 2, "b"), r"context 'a' there, 'b' here"),
    ],
)
def test_align_says_where_two_trees_differ(
    reference: object, value: object, message: str
) -> None:
    leaves, tree = flatten(value)
    with pytest.raises(ValueError, match=message):
        align(flatten(reference)[1], tree, leaves, "result")


class Ambiguous:
    """A value whose comparison has no truth value."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(2)

    __hash__ = None  # type: ignore[assignment]


def test_equal() -> None:
    shared = Ambiguous()
    assert equal(1, 1.0)
    assert equal(float("nan"), float("nan"))
    assert equal(shared, shared)
    assert not equal(Ambiguous(), Ambiguous())
    assert not equal(1, 2)
    assert not equal(float("nan"), 1.0)
    assert not equal("a", None)
