"""Captures: what `f` uses besides its arguments, found in its graph.

Knows Python objects and graph nodes. Knows nothing of chunks, nor what becomes of a
capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from chunkcheck._torch.compat import (
    LEAF_NUMBER,
    memory,
    next_number,
    number,
    saved_by,
    version,
)
from chunkcheck._torch.reach import reach


class Borders(NamedTuple):
    """Where the graph of one run of `f` ends."""

    given: set[int]  # which of the tensors that `f` was given it used
    leaves: list[Tensor]  # the leaves that it was not given, as the walk met them
    older: list[int]  # the numbers of nodes that were there before
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
    found = Borders(set(), [], [], [])
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
            found.older.append(position)
    for leaf in ends:
        if id(leaf) in own_leaves:
            found.given.add(own_leaves[id(leaf)])
        else:
            found.leaves.append(leaf)
    return found


Stamp: TypeAlias = tuple[int | None, tuple[object, int] | None]  # version and memory
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
        if version(tensor) != before or (here and where and here != where):
            raise RuntimeError(
                f"{_name(tensor, f)}, which f captures, has been modified by an inplace"
                " operation, or was given other data, after f had used it in forward,"
                " so that gradients would be wrong: change it after backward, or give f"
                " a copy; if f itself changes it, do that outside of f, or use"
                " strategy='none'"
            )


def _name(tensor: Tensor, f: Callable[..., Any]) -> str:
    shape = f"a tensor of shape {tuple(tensor.shape)}"
    for module in reach(f).modules:
        for name, parameter in module.named_parameters():
            if parameter is tensor:
                return f"{type(module).__name__}.{name}, {shape}"
    return shape
