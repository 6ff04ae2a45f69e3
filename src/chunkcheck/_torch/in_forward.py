"""Gradients in forward: those of one reduced scalar, there before backward asks.

Forward runs each chunk with its graph, takes the gradients from that and drops it.
Backward multiplies them by the one that comes in. Knows nothing of recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from chunkcheck._strategies import GradInForward
from chunkcheck._torch.captures import borders
from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.compat import hooks_muted, next_number, number, will_run
from chunkcheck._torch.cuts import Apart
from chunkcheck._torch.gradients import Gradient, Sum, gradient_maker, sum_dtype
from chunkcheck._torch.products import add_gradients
from chunkcheck._torch.reach import Reached, reach
from chunkcheck._torch.replay import casts_off, own_casts
from chunkcheck._torch.results import Results
from chunkcheck._torch.saved import Saved, kept_from
from chunkcheck._torch.suited import (
    HISTORY,
    UnsuitedError,
    check_graph,
    check_leaf,
    why_not_apart,
)
from chunkcheck._torch.tensors import is_tensor


def run_in_forward(
    options: GradInForward, chunks: Chunks, tensors: Sequence[Tensor], out_dim: object
) -> object:
    """Return the result of all chunks, its gradients computed.

    Raises:
        RuntimeError: They would not be exact, or are not those of one scalar.

    """
    reached = reach(chunks.f, *chunks.constants)
    try:
        reason = why_not_apart(reached, tensors)
        if reason is not None:
            raise UnsuitedError(reason)
        return _InForward(options, chunks, tensors, out_dim, reached).run(tensors)
    except UnsuitedError as error:
        captured = str(error).startswith(HISTORY)
        remedy = "pass it as an argument (None in batch_dim passes it whole), or "
        raise RuntimeError(
            f"strategy 'grad_in_forward' cannot be exact here: {error};"
            f" {remedy if captured else ''}use strategy='auto'"
        ) from None


class _InForward:
    """One call, while it runs."""

    def __init__(
        self,
        options: GradInForward,
        chunks: Chunks,
        tensors: Sequence[Tensor],
        out_dim: object,
        reached: Reached,
    ) -> None:
        self._chunks = chunks
        self._reached = reached
        self._asked = options.accumulate_dtype
        self._results = Results(chunks.plan, out_dim, accumulate_dtype=self._asked)
        self._cut = Apart(chunks, tensors, [t.requires_grad for t in tensors])
        self._column: int | None = None  # of the scalar
        plan, dims = chunks.plan, chunks.dims
        self._totals: dict[int, Gradient] = {
            i: gradient_maker(
                t, dims[i] if i < len(dims) else None, plan.size, self._asked
            )()
            for i, t in enumerate(tensors)
            if t.requires_grad
        }
        self._captures: dict[int, tuple[Tensor, Sum]] = {}  # by id

    def run(self, tensors: Sequence[Tensor]) -> object:
        """Return the result of all chunks.

        Raises:
            UnsuitedError: `f` captures what has a history or is no plain leaf.
            RuntimeError: The gradients are not those of one scalar.

        """
        plan = self._chunks.plan
        with kept_from(outer_hooks=Saved((), self._chunks.path).outer_hooks):
            for chunk in range(len(plan)):
                for ref, total in self._run(chunk):
                    # One that `f` made is gone by now, together with the graph.
                    if (leaf := ref()) is not None:
                        self._captures[id(leaf)] = leaf, total
        leaves = self._results.join(tensors)
        column = self._column
        if column is None or not is_tensor(whole := leaves[column]):
            return self._results.rebuilt(leaves)
        totals = [(tensors[i], total) for i, total in self._totals.items()]
        found = [
            (tensor, gradient)
            for tensor, total in (*totals, *self._captures.values())
            if (gradient := total.total()) is not None
        ]
        if not found:  # `f` made a leaf of its own
            found.append((torch.empty(0, requires_grad=True), torch.empty(0)))
        inputs, of_inputs = zip(*found, strict=True)
        unit = plan.weight(0) if self._is_mean() else 1
        leaves[column] = _Scaled.apply([whole], unit, of_inputs, *inputs)  # type: ignore[no-untyped-call]
        return self._results.rebuilt(leaves)

    def _run(self, chunk: int) -> Iterable[tuple[weakref.ref[Tensor], Sum]]:
        """Run one chunk and add its gradients; return those of leaves yet unknown."""
        given = self._cut.given(chunk)
        first = next_number()
        with own_casts():
            tree, values = self._chunks.run(chunk, given)
        values = self._results.accept(tree, values, chunk)
        self._results.put(values, chunk, connected=False)
        scalar = self._scalar(values)
        if scalar is None:
            return []
        found = borders([scalar], given, first)
        if found is None or found.older:
            older = found.older if found is not None else []
            raise UnsuitedError(HISTORY + self._which(older))
        if chunk == 0:
            check_graph(found.nodes)
        wanted: list[tuple[Tensor, Gradient]] = []
        new = []
        for leaf in found.leaves:
            if id(leaf) in self._captures:
                wanted.append(self._captures[id(leaf)])
            elif leaf.requires_grad:
                check_leaf(leaf)
                total = self._sum(leaf)
                new.append((weakref.ref(leaf), total))
                wanted.append((leaf, total))
        captured = [leaf for leaf, _ in wanted]
        wanted += [(given[i], self._totals[i]) for i in sorted(found.given)]
        # Hooks on what is captured are for the whole gradient. Those that `f` hung on
        # what it was given are for this one.
        if wanted:
            with hooks_muted(captured), casts_off():
                seed = torch.full_like(scalar, self._share(chunk))
                add_gradients([(scalar, seed)], wanted, found.nodes, chunk)
        return new

    def _which(self, numbers: Sequence[int]) -> str:
        """Return which captured tensor has a node of these, if `f` shows it."""
        for tensor in self._reached.tensors:
            node = tensor.grad_fn
            if node is not None and number(node) in numbers:
                return f", one of shape {tuple(tensor.shape)} by {node.name()}"
        return ""

    def _share(self, chunk: int) -> float:
        """Return what to weight a chunk with, beside a full one."""
        plan = self._chunks.plan
        return plan.weight(chunk) / plan.weight(0) if self._is_mean() else 1

    def _sum(self, tensor: Tensor) -> Sum:
        return Sum(sum_dtype(self._asked, tensor.dtype))

    def _is_mean(self) -> bool:
        column = self._column
        columns = self._results.columns
        return column is not None and columns[column].join.reduction == "mean"

    def _scalar(self, values: Sequence[object]) -> Tensor | None:
        """Return that leaf of a chunk's result which requires a gradient.

        Raises:
            RuntimeError: Several do, or it is not reduced to one number.

        """
        columns = self._results.columns
        ends = [
            (column, value)
            for column, value in enumerate(values)
            if is_tensor(value) and value.requires_grad
        ]
        if not ends:
            return None
        known = [] if self._column is None else [self._column]
        several = sorted({*known, *(column for column, _ in ends)})
        if len(several) > 1:
            raise RuntimeError(
                "strategy 'grad_in_forward' gives the gradients of one result, but"
                f" {', '.join(columns[c].join.path for c in several)} require one:"
                " detach in f what is only reported, add up in f what is only added, or"
                " use strategy='auto'"
            )
        ((self._column, scalar),) = ends
        join = columns[self._column].join
        if join.reduction is None or scalar.numel() != 1 or scalar.is_complex():
            raise RuntimeError(
                "strategy 'grad_in_forward' gives the gradients of one real number, but"
                f" {join.path} is of {scalar.dtype} and shape {tuple(scalar.shape)} and"
                f" {join.reduction or 'not'} reduced: let f return the loss of its rows"
                " with out_dim='sum' or 'mean', or use strategy='auto'"
            )
        return scalar


class _Scaled(torch.autograd.Function):
    """The node of the scalar: its gradients are known up to the one that comes in."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: list[Tensor],  # in a list, or torch takes it for an input
        unit: float,
        gradients: Sequence[Tensor],
        *_inputs: Tensor,
    ) -> Tensor:
        ctx.unit = unit
        ctx.save_for_backward(*gradients)
        ctx.set_materialize_grads(False)
        return whole[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RuntimeError(
                "strategy 'grad_in_forward' keeps no graph to differentiate a second"
                " time, which create_graph=True asks for: use strategy='auto'"
            )
        found: list[Tensor | None] = [None] * len(ctx.next_functions)
        if gradient is not None:
            scale = gradient.reshape(()) * ctx.unit
            # Never in place: there may be another backward.
            found = [
                saved * scale if will_run(node) else None
                for saved, (node, _) in zip(
                    ctx.saved_tensors, ctx.next_functions, strict=True
                )
            ]
        return None, None, None, *found
