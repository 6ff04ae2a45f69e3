"""The loop over the chunks: cut the arguments once, run each chunk, join once.

Knows plans and trees. How a chunk is checkpointed is the executor's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkcheck._arguments import Call
from chunkcheck._plan import Plan
from chunkcheck._strategies import Strategy
from chunkcheck._torch.checkpoints import executor
from chunkcheck._torch.compat import version
from chunkcheck._torch.results import Results
from chunkcheck._torch.tensors import (
    alias,
    as_contiguous,
    cut,
    detached,
    is_tensor,
    memory_format,
)
from chunkcheck._tree import Tree, align, flatten
from chunkcheck._typing import P, R


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, such that torch.compile breaks its graph there.

    Traced, the recompute would be merged with the forward run and save nothing.
    """
    if torch.compiler.is_compiling():
        disabled: Callable[P, R] = torch.compiler.disable(function)
        return disabled
    return function


def run(
    call: Call, leaves: list[object], plan: Plan, out_dim: object, strategy: Strategy
) -> object:
    """Return what `call` gives on `leaves`, computed chunk by chunk as `plan` says."""
    tensors = [
        (position, leaf, dim)
        for position, (leaf, dim) in enumerate(zip(leaves, plan.dims, strict=True))
        if is_tensor(leaf)
    ]
    chunked = [(i, leaf, dim) for i, leaf, dim in tensors if dim is not None]
    whole = [(i, leaf) for i, leaf, dim in tensors if dim is None]
    template = _Template(
        call=call,
        plan=plan,
        constants=tuple(_TENSOR if is_tensor(leaf) else leaf for leaf in leaves),
        positions=(*(i for i, _, _ in chunked), *(i for i, _ in whole)),
        formats=tuple(memory_format(leaf) for _, leaf, _ in chunked),
    )
    execute = executor(strategy)
    pieces = [cut(leaf, plan.size, dim) for _, leaf, dim in chunked]
    passed = [leaf for _, leaf in whole]
    results = Results(plan, out_dim)
    for index, (start, stop) in enumerate(plan):
        chunk = _Chunk(template, start, stop)
        given = (*(piece[index] for piece in pieces), *passed)
        tree, values = chunk.result(execute(chunk, *given))
        results.add(tree, values, start, stop)
    return results.join(leaf for _, leaf, _ in tensors)


_TENSOR = object()  # stands for a tensor where the tensor itself is not to be held


@dataclass(frozen=True, slots=True)
class _Template:
    """The call with its tensors taken out, which recompute needs as forward does."""

    call: Call
    plan: Plan
    constants: tuple[object, ...]  # the leaves but for tensors
    positions: tuple[int, ...]  # of the tensors among the leaves, chunked ones first
    formats: tuple[torch.memory_format | None, ...]  # of the chunked ones


class _Chunk:
    """`f` on the rows of one chunk, as a function of flat tensors.

    Recompute calls it again, long after the loop, so it holds no tensor: neither an
    argument nor a result.
    """

    __slots__ = ("_others", "_start", "_stop", "_template", "_tree")

    def __init__(self, template: _Template, start: int, stop: int) -> None:
        self._template = template
        self._start = start
        self._stop = stop
        self._tree: Tree | None = None
        self._others: list[object] = []  # the result's leaves but for tensors

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run `f` and return the tensor leaves of its result."""
        template = self._template
        positions, formats = template.positions, template.formats
        if len(tensors) != len(positions):
            raise TypeError(
                f"the strategy called f with {len(tensors)} tensors instead of the"
                f" {len(positions)} that it was given"
            )
        chunks = map(as_contiguous, tensors, formats)
        given = list(map(alias, (*chunks, *tensors[len(formats) :])))
        leaves = list(template.constants)
        for position, tensor in zip(positions, given, strict=True):
            leaves[position] = tensor
        versions = [version(tensor) for tensor in given]
        try:
            result = template.call.invoke(leaves)
        except Exception as error:
            self._annotate(error, given)
            raise
        for position, tensor, before in zip(positions, given, versions, strict=True):
            if version(tensor) != before:
                raise RuntimeError(
                    f"f wrote into {template.call.paths[position]} while running"
                    f" {self._name}, but a chunk is a view of the caller's tensor:"
                    " clone it before changing it"
                )
        values, tree = flatten(result)
        if self._tree is not None:  # a recompute, which must give what forward gave
            path = f"the recomputed result of {self._name}"
            values = align(self._tree, tree, values, path)
        else:
            self._tree = tree
        self._others = [_TENSOR if is_tensor(value) else value for value in values]
        found = tuple(value for value in values if is_tensor(value))
        if torch.is_grad_enabled():
            return found
        # Under no_grad the result has no graph, not even if `f` has turned it on.
        return detached(found, [t.requires_grad for t in found])

    def result(self, tensors: object) -> tuple[Tree, list[object]]:
        """Return the result of `f`, given what the strategy made of its tensors.

        Raises:
            TypeError: That is not what the protocol asks for.

        """
        if self._tree is None:
            raise TypeError(
                "the strategy did not call f: it must return f(*tensors), a tuple of"
                " tensors"
            )
        expected = sum(value is _TENSOR for value in self._others)
        if not (
            isinstance(tensors, tuple)
            and len(tensors) == expected
            and all(map(is_tensor, tensors))
        ):
            found = type(tensors).__name__
            if isinstance(tensors, tuple | list):
                found += f" of ({', '.join(type(t).__name__ for t in tensors)})"
            raise TypeError(
                f"the strategy must return what f(*tensors) returned, a tuple of"
                f" {expected} tensors, found a {found}"
            )
        rest = iter(tensors)
        return self._tree, [
            next(rest) if value is _TENSOR else value for value in self._others
        ]

    def _annotate(self, error: Exception, given: list[Tensor]) -> None:
        """Say which rows `f` had, and what was cut to them."""
        error.add_note(f"while running {self._name}")
        template = self._template
        if len(given) > 1:
            paths, cut = template.call.paths, len(template.formats)
            seen = [
                f"{paths[position]} {tuple(tensor.shape)}"
                for position, tensor in zip(template.positions, given, strict=True)
            ]
            error.add_note(
                f"f was given these chunks: {', '.join(seen[:cut])};"
                f" and whole: {', '.join(seen[cut:]) or 'no tensor'}"
            )
        if "is a view and is being modified inplace" in str(error):
            error.add_note(
                "a chunk is a view of the caller's tensor, which f must not write to:"
                " clone it first"
            )

    @property
    def _name(self) -> str:
        return self._template.plan.describe(self._start, self._stop)
