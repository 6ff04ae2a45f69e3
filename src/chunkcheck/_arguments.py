"""Arguments: the call of `f` taken apart, and what `batch_dim` says of each leaf.

Knows signatures and parameter names. Knows no array library and makes no plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkcheck._tree import Entry, Tree, broadcast, flatten, unflatten


@dataclass(frozen=True, slots=True)
class Call:
    """`f(*args, **kwargs)` without its leaves, so that it can outlive them."""

    f: Callable[..., Any]
    args: Tree
    kwargs: Tree

    @classmethod
    def split(
        cls,
        f: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[Call, list[object]]:
        """Take a call apart and return it with its leaves."""
        positional, args_tree = flatten(args)
        named, kwargs_tree = flatten(dict(kwargs))
        return cls(f, args_tree, kwargs_tree), positional + named

    @property
    def is_flat(self) -> bool:
        """Whether the leaves are the positional arguments."""
        return not self.kwargs.keys and all(c.is_leaf for c in self.args.children)

    def invoke(self, leaves: Iterable[object]) -> Any:
        """Call `f` with these leaves, in fresh containers."""
        rest = iter(leaves)
        args, kwargs = unflatten(self.args, rest), unflatten(self.kwargs, rest)
        return self.f(*args, **kwargs)

    @property
    def paths(self) -> list[str]:
        """The path of every leaf, `args[1]['mask']` or `kwargs['bias']`."""
        return [*self.args.paths("args"), *self.kwargs.paths("kwargs")]


def batch_entries(call: Call, batch_dim: object, arrays: Sequence[bool]) -> list[Entry]:
    """Return what `batch_dim` says of each leaf of `call`.

    Args:
        call: The call.
        batch_dim: An int, None, a tuple with an entry per positional argument, or a
            mapping with an entry per parameter name.
        arrays: Whether each leaf is an array of one dim or more, and so needs a dim.

    Raises:
        TypeError: `batch_dim` is of another type, or leaves out an argument that holds
            an array.
        ValueError: An entry does not have the shape of its argument.

    """
    if isinstance(batch_dim, Mapping):
        return _by_name(call, batch_dim, arrays)
    if isinstance(batch_dim, tuple):
        if any(arrays[call.args.count() :]):
            raise TypeError(
                f"batch_dim is the tuple {batch_dim!r}, which says nothing of the"
                " keyword arguments that hold tensors: "
                + (
                    "pass them by position"
                    if _signature(call.f) is None
                    else "write a mapping by parameter name, such as"
                    f" batch_dim={_suggestion(call, batch_dim)}"
                )
            )
        entries = broadcast(batch_dim, call.args, "batch_dim", "args")
        return entries + [Entry(None, False, "batch_dim")] * call.kwargs.count()
    if isinstance(batch_dim, list):
        raise TypeError(
            f"batch_dim must be an int, None, a tuple with one entry per positional"
            f" argument, or a mapping by parameter name, found the list {batch_dim!r}:"
            f" write the tuple {tuple(batch_dim)!r}"
        )
    return [Entry(batch_dim, False, "batch_dim")] * len(arrays)


def _by_name(
    call: Call, batch_dim: Mapping[Any, object], arrays: Sequence[bool]
) -> list[Entry]:
    """Bind the leaves to parameters of `f` and look each parameter up."""
    named = _parameters(call)
    missing: dict[str, None] = {}
    entries: list[Entry] = []
    for name, path, tree, prefix in _bound(call, named, batch_dim):
        below = arrays[len(entries) : len(entries) + tree.count()]
        if prefix is _ABSENT and any(below):
            missing[name] = None
        chosen = None if prefix is _ABSENT else prefix
        entries += broadcast(chosen, tree, f"batch_dim[{name!r}]", path)
    unknown = [key for key in batch_dim if key not in named.accepted]
    if unknown:
        raise TypeError(
            f"batch_dim names {_listed(unknown)}, but the parameters given to f are"
            f" {_listed(named.accepted) or 'none'}"
        )
    if missing:
        first = next(iter(missing))
        raise TypeError(
            f"batch_dim leaves out {_listed(missing)}, where f is given tensors: add"
            f" {first!r}: 0 to cut along dim 0, or {first!r}: None to pass whole"
        )
    return entries


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameter names of a call."""

    positional: tuple[str, ...]  # of the arguments that have a name of their own
    variadic: str | None  # the name of `*args`, which takes the rest
    accepted: tuple[str, ...]  # all names that a mapping may hold


def _parameters(call: Call) -> _Parameters:
    signature = _signature(call.f)
    if signature is None:
        raise TypeError(
            f"batch_dim is a mapping, but {call.f!r} has no signature to tell its"
            " parameter names: write a tuple with one entry per positional argument"
        )
    kinds = inspect.Parameter
    own = [
        name
        for name, p in signature.parameters.items()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    variadic = next(
        (
            name
            for name, p in signature.parameters.items()
            if p.kind is kinds.VAR_POSITIONAL
        ),
        None,
    )
    given = len(call.args.children)
    if given > len(own) and variadic is None:
        raise TypeError(
            f"f takes {len(own)} positional arguments ({', '.join(own)}), found {given}"
        )
    keyword_names = [
        name for name, p in signature.parameters.items() if p.kind is kinds.KEYWORD_ONLY
    ]
    accepted = (
        *own,
        *([variadic] if variadic is not None else []),
        *keyword_names,
        *(str(key) for key in call.kwargs.keys),
    )
    return _Parameters(tuple(own[:given]), variadic, tuple(dict.fromkeys(accepted)))


def _bound(
    call: Call, named: _Parameters, batch_dim: Mapping[Any, object]
) -> Iterable[tuple[str, str, Tree, object]]:
    """Yield name, path, tree and prefix for each argument, in flatten order."""
    own = len(named.positional)
    for index, name in enumerate(named.positional):
        child = call.args.children[index]
        yield name, f"args[{index}]", child, batch_dim.get(name, _ABSENT)
    rest = call.args.children[own:]
    if rest:
        name = str(named.variadic)
        tree = Tree(tuple, tuple(range(len(rest))), rest, None, call.args.container)
        yield name, f"args[{own}:]", tree, batch_dim.get(name, _ABSENT)
    for key, child in zip(call.kwargs.keys, call.kwargs.children, strict=True):
        yield str(key), f"kwargs[{key!r}]", child, batch_dim.get(key, _ABSENT)


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    # A module hides the signature of its forward behind a generic `__call__`.
    target = getattr(f, "forward", f)
    try:
        return inspect.signature(target if callable(target) else f)
    except (TypeError, ValueError):
        return None


def _suggestion(call: Call, batch_dim: tuple[object, ...]) -> str:
    """Return the mapping that says what a tuple says, with 0 for the keywords."""
    named = _parameters(call)
    own = len(named.positional)
    given: dict[str, object] = dict(zip(named.positional, batch_dim, strict=False))
    if len(batch_dim) > own:
        given[str(named.variadic)] = batch_dim[own:]
    return repr({name: given.get(name, 0) for name, *_ in _bound(call, named, {})})
