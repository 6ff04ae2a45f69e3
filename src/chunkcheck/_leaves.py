"""Leaves: what each value is to a chunked call, and which values cannot take part.

Knows containers that hide tensors and arrays of foreign libraries by their looks only;
the library at hand is described by a `Library`, so none is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, Protocol

from chunkcheck._plan import Leaf
from chunkcheck._tree import Entry


class Library(Protocol):
    """What a backend says of its own array type."""

    def is_tensor(self, value: object, /) -> bool:
        """Whether `value` is an array of this library."""
        ...

    def shape(self, tensor: Any, /) -> tuple[int, ...]:
        """Return the shape of `tensor`."""
        ...

    def refusal(self, tensor: Any, /) -> str | None:
        """Return why `tensor` cannot be cut or joined, with the remedy, or None."""
        ...


def classify(path: str, value: Any, entry: Entry, library: Library) -> Leaf:
    """Return the leaf that stands for `value` in a plan.

    Raises:
        TypeError: `value` is an iterator, or it holds rows that cannot be reached and
            its dim is not None.

    """
    if isinstance(value, Iterator):
        raise TypeError(
            f"{path} is an iterator ({type(value).__qualname__}), which the first chunk"
            " would use up: make it a list or a tuple"
        )
    if library.is_tensor(value):
        reason = None if entry.value is None else library.refusal(value)
        if reason is not None:
            raise TypeError(f"{path} is {reason}")
        return Leaf(path, library.shape(value), entry)
    if entry.value is not None:
        reason = _opacity(value, library)
        if reason is not None:
            raise TypeError(f"{path} is {reason}")
    return Leaf(path, None, entry, absent=value is None)


def is_array(value: object) -> bool:
    """Whether `value` looks like an array of one dim or more, of whatever library."""
    if not hasattr(value, "dtype"):
        return False
    try:
        shape = getattr(value, "shape", ())
    except Exception:  # noqa: BLE001 (a nested tensor has none)
        return True
    return isinstance(shape, tuple) and len(shape) > 0


def _opacity(value: object, library: Library) -> str | None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_array(value):
        return (
            f"an array of another library ({kind}): convert it to a tensor, or write"
            " None for its dim to pass it whole as it is"
        )
    if _holds_tensor(value, library, seen=set()):
        return (
            f"of type {kind}, which holds tensors but is no registered container: pass"
            " its tensors in a dict, tuple or namedtuple, register the type (by"
            " torch.export.register_dataclass if it is a dataclass, else by"
            " torch.utils._pytree.register_pytree_node), or, for an argument, write"
            " None for its dim to pass it whole"
        )
    return None


def _holds_tensor(value: object, library: Library, seen: set[int]) -> bool:
    if library.is_tensor(value) or is_array(value):
        return True
    if id(value) in seen or callable(value):  # a module is no batch of rows
        return False
    seen.add(id(value))
    return any(_holds_tensor(item, library, seen) for item in _contents(value))


def _contents(value: Any) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list | AbstractSet | ValuesView):
        return value
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    if hasattr(type(value), "__attrs_attrs__"):
        return [getattr(value, a.name, None) for a in type(value).__attrs_attrs__]
    return ()
