"""Trees: flatten with printable paths, rebuild, broadcast a prefix, align two trees.

Owns the knowledge of containers and of other libraries' pytree registries. Knows
nothing of tensors, chunks or dims.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The structure of a value: a leaf, or a container type with children by key."""

    kind: Any  # a type; None: a leaf
    keys: tuple[object, ...] = ()
    children: tuple[Tree, ...] = ()
    context: Any = None
    container: Container | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether this is a single leaf."""
        return self.kind is None

    def paths(self, root: str) -> Iterator[str]:
        """Yield the path of every leaf, written as Python would reach it."""
        if self.is_leaf:
            yield root
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(step(root, key))

    def count(self) -> int:
        """Return the number of leaves."""
        return 1 if self.is_leaf else sum(child.count() for child in self.children)


LEAF = Tree(None)


class Attribute(str):
    """A key that is reached as an attribute, `.x`, rather than as an item, `['x']`."""

    __slots__ = ()


def step(path: str, key: object) -> str:
    """Return `path` extended by one key."""
    return f"{path}.{key}" if isinstance(key, Attribute) else f"{path}[{key!r}]"


class Container(NamedTuple):
    """How one type of container comes apart and is put together again."""

    split: Callable[[Any], tuple[Iterable[object], Iterable[object], object]]
    build: Callable[[Tree, Iterable[object]], object]
    ordered: bool = True


def _items(value: Sequence[object]) -> tuple[Iterable[object], Iterable[object], None]:
    return range(len(value)), value, None


def _mapping(
    value: Mapping[object, object],
) -> tuple[Iterable[object], Iterable[object], object]:
    return value.keys(), value.values(), getattr(value, "default_factory", None)


def _fields(value: Any) -> tuple[Iterable[object], Iterable[object], None]:
    return map(Attribute, value._fields), value, None


_BUILTIN: dict[type, Container] = {
    tuple: Container(_items, lambda _, values: tuple(values)),
    list: Container(_items, lambda _, values: list(values)),
    deque: Container(
        lambda value: (range(len(value)), value, value.maxlen),
        lambda tree, values: deque(values, tree.context),
    ),
    dict: Container(
        _mapping,
        lambda tree, values: dict(zip(tree.keys, values, strict=True)),
        ordered=False,
    ),
    OrderedDict: Container(
        _mapping,
        lambda tree, values: OrderedDict(zip(tree.keys, values, strict=True)),
        ordered=False,
    ),
    defaultdict: Container(
        _mapping,
        lambda tree, values: defaultdict(
            tree.context, zip(tree.keys, values, strict=True)
        ),
        ordered=False,
    ),
}
_NAMEDTUPLE = Container(
    _fields,
    lambda tree, values: tree.kind._make(values),
)


def _is_namedtuple(kind: type) -> bool:
    """Whether `kind` is a namedtuple that its own `_make` rebuilds.

    A subclass with a `__new__` of its own (torch's PackedSequence) promises more than
    its fields show, so it is no container to us.
    """
    if not (issubclass(kind, tuple) and hasattr(kind, "_make")):
        return False
    for base in kind.__mro__:
        if "_fields" in vars(base):
            return True
        if "__new__" in vars(base):
            return False
    return False


def _registered(kind: type) -> Container | None:
    """Look `kind` up in torch's registry, if torch is there at all."""
    pytree: Any = sys.modules.get("torch.utils._pytree")
    entry = None if pytree is None else pytree.SUPPORTED_NODES.get(kind)
    if entry is None:
        return None

    def split(value: Any) -> tuple[Iterable[object], Iterable[object], object]:
        children, context = entry.flatten_fn(value)
        children = list(children)
        with_keys = getattr(entry, "flatten_with_keys_fn", None)
        if with_keys is None:
            by_key = isinstance(value, Mapping) and len(value) == len(children)
            return list(value) if by_key else range(len(children)), children, context
        # The context that comes with the keys need not be one that rebuilds.
        pairs, _ = with_keys(value)
        keys = [_readable(key, index) for index, (key, _) in enumerate(pairs)]
        if dataclasses.is_dataclass(kind):  # torch 2.4 says ['x'] for its field x
            keys = [Attribute(key) for key in keys]
        return keys, children, context

    def build(tree: Tree, values: Iterable[object]) -> object:
        built = entry.unflatten_fn(list(values), tree.context)
        # torch rebuilds its own Size as a tuple.
        return tree.kind(built) if type(built) is tuple else built

    return Container(split, build)


def _readable(key: object, index: int) -> object:
    """Turn one of torch's key objects into a key of ours."""
    name = getattr(key, "name", None)
    if name is not None:
        return Attribute(name)
    return getattr(key, "key", getattr(key, "idx", index))


def _container(kind: type) -> Container | None:
    found = _BUILTIN.get(kind)
    if found is None:
        found = _registered(kind)
    if found is None and _is_namedtuple(kind):
        found = _NAMEDTUPLE
    return found


def flatten(value: object) -> tuple[list[object], Tree]:
    """Return the leaves of `value`, in order, and its structure. `None` is a leaf."""
    leaves: list[object] = []
    return leaves, _take(value, leaves)


# Recursive functions at module level: a nested one would refer to itself through its
# closure, a cycle that keeps all leaves alive until the garbage collector comes.


def _take(value: object, leaves: list[object]) -> Tree:
    kind = type(value)
    container = _container(kind)
    if container is None:
        leaves.append(value)
        return LEAF
    keys, values, context = container.split(value)
    children = tuple([_take(child, leaves) for child in values])
    return Tree(kind, tuple(keys), children, context, container)


def unflatten(tree: Tree, leaves: Iterable[object]) -> Any:
    """Build a fresh value of structure `tree` from its leaves."""
    return _build(tree, iter(leaves))


def _build(tree: Tree, rest: Iterator[object]) -> object:
    if tree.container is None:
        return next(rest)
    return tree.container.build(tree, [_build(child, rest) for child in tree.children])


class Entry(NamedTuple):
    """What a prefix says of one leaf."""

    value: object
    exact: bool  # it stands at the leaf itself, rather than somewhere above it
    where: str  # the path in the prefix, `batch_dim[1]['mask']`


def broadcast(prefix: object, tree: Tree, where: str, what: str) -> list[Entry]:
    """Return the entry of `prefix` for every leaf of `tree`.

    A tuple or list describes a container entry by entry, a mapping by key or attribute;
    anything else holds for all that lies below it.

    Args:
        prefix: The prefix.
        tree: The tree that it describes.
        where: The name of the prefix, for messages.
        what: The name of the tree, for messages.

    Raises:
        ValueError: The prefix does not have the shape of the tree.

    """
    if isinstance(prefix, Mapping):
        given: dict[object, object] = dict(prefix)
        fits = not tree.is_leaf and given.keys() == set(tree.keys)
    elif isinstance(prefix, tuple | list):
        given = dict(zip(tree.keys, prefix, strict=False))
        fits = not tree.is_leaf and len(prefix) == len(tree.keys)
    else:
        return [Entry(prefix, tree.is_leaf, where)] * tree.count()
    if not fits:
        raise ValueError(
            f"{where} is {prefix!r}, but {what} {_summary(tree)}: write a tuple, or a"
            " dict by key, with one entry for each of them, or a single value for all"
        )
    by_name = isinstance(prefix, Mapping)
    return [
        entry
        for index, (key, child) in enumerate(zip(tree.keys, tree.children, strict=True))
        for entry in broadcast(
            given[key],
            child,
            step(where, str(key) if isinstance(key, Attribute) else key)
            if by_name
            else step(where, index),
            step(what, key),
        )
    ]


def _summary(tree: Tree) -> str:
    if tree.kind is None:
        return "is a single value"
    size = f"is a {tree.kind.__name__} of {len(tree.keys)}"
    if tree.keys == tuple(range(len(tree.keys))):
        return size
    keys = ", ".join(repr(str(k) if isinstance(k, Attribute) else k) for k in tree.keys)
    return f"{size} ({keys})"


def align(reference: Tree, tree: Tree, leaves: Sequence[T], path: str) -> list[T]:
    """Return `leaves` of `tree` in the order of `reference`.

    Raises:
        ValueError: The two differ in type, length, key set or context; says where.

    """
    if tree.kind is not reference.kind:
        raise ValueError(_difference(path, reference, tree))
    if tree.is_leaf:
        return list(leaves)
    same_keys = (
        tree.keys == reference.keys
        if tree.container is None or tree.container.ordered
        else set(tree.keys) == set(reference.keys)
    )
    if not same_keys:
        raise ValueError(_difference(path, reference, tree))
    if not equal(tree.context, reference.context):
        raise ValueError(
            f"{path} has the context {reference.context!r} there, {tree.context!r} here"
        )
    parts: dict[object, list[T]] = {}
    position = 0
    for key, child in zip(tree.keys, tree.children, strict=True):
        parts[key] = list(leaves[position : position + child.count()])
        position += child.count()
    children = dict(zip(tree.keys, tree.children, strict=True))
    return [
        leaf
        for key, child in zip(reference.keys, reference.children, strict=True)
        for leaf in align(child, children[key], parts[key], step(path, key))
    ]


def _difference(path: str, reference: Tree, tree: Tree) -> str:
    return f"{path} {_summary(reference)} there, {_summary(tree)} here"


def equal(a: object, b: object) -> bool:
    """Whether two values are the same object, equal, or both NaN.

    A comparison that fails, or that has no truth value, counts as unequal.
    """
    if a is b:
        return True
    try:
        return bool(a == b) or bool(a != a and b != b)  # noqa: PLR0124
    except Exception:  # noqa: BLE001
        return False
