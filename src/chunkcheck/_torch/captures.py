"""Captures: what `f` uses besides its arguments, found in `f` or in its graph.

Knows Python objects and graph nodes. Knows nothing of chunks, nor what becomes of a
capture.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from chunkcheck._torch.compat import (
    LEAF_NUMBER,
    memory,
    next_number,
    number,
    saved_by,
    version,
)

_log = logging.getLogger(__name__)

# Looking further would cost more than a chunk, and what is so far away is rarely used.
_MOST_OBJECTS = 4096
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype)
_MODULE_FIELDS = frozenset(vars(nn.Module()))  # all of them hold no capture of `f`'s,
_MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")  # but for these


@dataclass(slots=True)
class Reached:
    """What can be reached from a callable without running it."""

    modules: list[nn.Module] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # parameters among them


def reach(f: Callable[..., Any], *others: object) -> Reached:
    """Look into a callable and other objects, the nearest first.

    Through modules, closures, the globals that code names, defaults, bound and partial
    arguments, attributes and containers. Nothing of the user's is run. What is further
    away than some thousands of objects is not found.
    """
    found = Reached()
    queue: deque[object] = deque((f, *others))
    seen: set[int] = set()
    left = _MOST_OBJECTS
    while queue:
        value = queue.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case Tensor():
                found.tensors.append(value)
                continue
            case torch.Generator():
                found.generators.append(value)
                continue
            case nn.Module():
                found.modules.append(value)
                inner: Iterable[object] = _in_module(value)
            case _:
                inner = _in_object(value)
        before = len(queue)
        queue.extend(islice(inner, left))
        left -= len(queue) - before
        if left == 0:
            _log.debug(
                "looked at %d objects that f reaches, and no further", _MOST_OBJECTS
            )
            left = -1
            break
    for value in queue if left < 0 else ():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found.tensors.append(value)
    return found


def _in_module(module: nn.Module) -> Iterator[object]:
    if isinstance(module, torch.jit.ScriptModule):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from module.children()
        return
    fields = vars(module)
    for name in _MODULE_MEMBERS:
        yield from fields.get(name, {}).values()
    for name, value in fields.items():
        if name not in _MODULE_FIELDS:
            yield value
    yield from _methods(type(module), "forward")


def _in_object(value: object) -> Iterable[object]:
    match value:
        case types.FunctionType():
            return () if _is_library(value.__module__) else _in_function(value)
        case types.MethodType():
            kind, name = type(value.__self__), value.__func__.__name__
            return (value.__self__, value.__func__, *_methods(kind, name))
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case dict():
            return value.values()
        case list() | tuple() | set() | frozenset() | deque():
            return value
        case types.ModuleType():
            return ()
    # Past any `__getattr__` and property, which are the user's.
    fields: list[object] = []
    with suppress(AttributeError):
        fields += object.__getattribute__(value, "__dict__").values()
    for kind in type(value).__mro__:
        for member in vars(kind).values():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # a slot that is empty
                    fields.append(member.__get__(value))
    return [*fields, *_methods(type(value), "__call__")]


def _methods(kind: type, name: str) -> list[types.FunctionType]:
    """Return a method and, of the same class, those that it calls."""
    names, found = [name], []
    for candidate in names:  # which grows as we go
        method = getattr(kind, candidate, None)
        if isinstance(method, types.FunctionType) and not _is_library(
            method.__module__
        ):
            found.append(method)
            names.extend(n for n in _names(method.__code__) if n not in names)
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in code and the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _in_function(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    names = list(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            yield from (vars(value).get(other) for other in names)


_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names}) - {"__main__"}


def _is_library(module: str | None) -> bool:
    """Whether a module, by its name, holds nothing that `f` could capture."""
    return module is not None and module.partition(".")[0] in _LIBRARIES


class Borders(NamedTuple):
    """Where the graph of one run of `f` ends."""

    given: set[int]  # which of the tensors that `f` was given it used
    leaves: list[Tensor]  # the leaves that it was not given
    older: set[int]  # the numbers of nodes that were there before
    nodes: list[Node]  # the whole graph


def borders(
    results: Iterable[Tensor], given: Sequence[Tensor], first: int | None
) -> Borders | None:
    """Walk the graph of `results` back to what was there before.

    Args:
        results: Those that require a gradient.
        given: The tensors that `f` was given.
        first: The sequence number of the first node that the run made.

    Returns:
        None if nodes have no numbers.

    """
    last = next_number()  # nodes of other threads may have any number
    if first is None or last is None:
        return None
    found = Borders(set(), [], set(), [])
    own_leaves = {id(t): index for index, t in enumerate(given)}
    own_nodes = {t.grad_fn: i for i, t in enumerate(given) if t.grad_fn is not None}
    nodes, ends = found.nodes, []
    for result in results:
        if result.grad_fn is not None:
            nodes.append(result.grad_fn)
        else:
            ends.append(result)
    seen = set(nodes)
    for node in nodes:  # which grows as we go
        position = number(node)
        if first <= position < last:
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen.add(other)
                    nodes.append(other)
        elif position == LEAF_NUMBER:
            if (variable := getattr(node, "variable", None)) is not None:
                ends.append(variable)
        elif node in own_nodes:
            found.given.add(own_nodes[node])
        else:
            found.older.add(position)
    for leaf in ends:
        if id(leaf) in own_leaves:
            found.given.add(own_leaves[id(leaf)])
        else:
            found.leaves.append(leaf)
    return found


Stamp: TypeAlias = tuple[int | None, tuple[int, int]]  # version and memory
Observed: TypeAlias = list[tuple[weakref.ref[Tensor], Stamp]]


def stamp(tensor: Tensor) -> Stamp:
    """Return what changes when `tensor` is written to or gets other data."""
    return version(tensor), memory(tensor)


def observed(nodes: Iterable[Node], given: Iterable[Tensor]) -> Observed:
    """Return the tensors that a run saved for backward, without holding them.

    Those that outlive its graph are captured constants, or kept by `f` itself. What `f`
    was given is not among them.
    """
    own = {id(tensor) for tensor in given}
    found = {
        id(saved): (weakref.ref(saved), stamp(saved))
        for node in nodes
        if number(node) != LEAF_NUMBER
        for saved in saved_by(node)
        if id(saved) not in own
    }
    return list(found.values())


def fingerprint(nodes: Iterable[Node]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of all that torch's own operators saved in a run.

    Functions of others may save what they like: a compiled one differs from run to run.
    """
    return [
        (saved.shape, saved.dtype)
        for node in nodes
        if number(node) != LEAF_NUMBER and not hasattr(node, "saved_tensors")
        for saved in saved_by(node)
    ]


def alive(refs: Iterable[weakref.ref[Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors that are still there."""
    return (tensor for ref in refs if (tensor := ref()) is not None)


def check_unchanged(
    tensors: Observed, replayed: Container[int], f: Callable[..., Any]
) -> None:
    """Check that none of these tensors was written to since, of those still there.

    Args:
        tensors: The tensors.
        replayed: The ids of those that recompute sees as they were.
        f: What captures them.

    Raises:
        RuntimeError: One was.

    """
    for ref, (before, where) in tensors:
        tensor = ref()
        if tensor is None or id(tensor) in replayed:
            continue
        here = memory(tensor)
        # A parameter that is gathered as it is used may be nowhere.
        if version(tensor) != before or (here != where and here[0] and where[0]):
            raise RuntimeError(
                f"{_name(tensor, f)}, which f captures, has been modified by an inplace"
                " operation, or was given other data, between forward and backward, so"
                " that gradients would be wrong: change it after backward, or give f a"
                " copy"
            )


def _name(tensor: Tensor, f: Callable[..., Any]) -> str:
    shape = f"a tensor of shape {tuple(tensor.shape)}"
    for module in reach(f).modules:
        for name, parameter in module.named_parameters():
            if parameter is tensor:
                return f"{type(module).__name__}.{name}, {shape}"
    return shape
