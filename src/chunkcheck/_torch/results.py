"""Results: what the chunks gave, checked against each other and joined.

Knows trees, plans and tensors. Knows nothing of how the chunks were run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from chunkcheck._leaves import classify
from chunkcheck._plan import Join, Plan, check_rows, plan_results
from chunkcheck._torch import tensors as library
from chunkcheck._torch.compat import has_values, share_storage
from chunkcheck._torch.gradients import Sum, sum_dtype
from chunkcheck._torch.joined import Joined
from chunkcheck._torch.tensors import is_tensor
from chunkcheck._tree import LEAF, Tree, align, broadcast, equal, unflatten

_log = logging.getLogger("chunkcheck")


class _Kind(NamedTuple):
    """What is remembered of a tensor, which is not to be held."""

    type: type
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"a {self.type.__name__} of {self.dtype} and shape {self.shape}"


@dataclass(slots=True)
class Column:
    """One result leaf over all chunks."""

    join: Join
    first: object  # the first chunk's, but for tensors their kind
    value: object = None  # under out_dim None: the first chunk's
    parts: Joined | None = None
    sum: Sum | None = None
    # Of a reduced leaf under `determinism_check="values"`, what each chunk gave.
    copies: list[Tensor] = field(default_factory=list)


def recompute_error(plan: Plan, chunk: int, how: str) -> RuntimeError:
    """Return the error that says how the recompute of a chunk differs from forward."""
    return RuntimeError(
        f"the recompute of {plan.describe(chunk)} {how}; f must do the same in forward"
        " and in recompute"
    )


class Results:
    """The results of the chunks so far."""

    def __init__(
        self,
        plan: Plan,
        out_dim: object,
        determinism_check: Literal["default", "values", "none"] = "default",
        accumulate_dtype: object = "auto",
    ) -> None:
        self._plan = plan
        self._out_dim = out_dim
        self._check = determinism_check
        self._sum_dtype = accumulate_dtype
        self._copies: list[object] = []
        self._tree = LEAF
        self._first = ""  # the name of the first chunk, once there is one
        self.columns: list[Column] = []

    def accept(self, tree: Tree, values: list[object], chunk: int) -> list[object]:
        """Check the result of one chunk, and return its leaves in the first's order.

        Raises:
            TypeError, ValueError: It cannot be joined or reduced, or does not fit the
                first one.

        """
        if not self._first:
            start, stop = self._plan.bounds(chunk)
            self._tree, self._first = tree, self._name(chunk)
            joins = self._plan_joins(tree, values, stop - start)
            self.columns = [
                Column(join, _kind(value))
                for join, value in zip(joins, values, strict=True)
            ]
            for column in self.columns:
                if isinstance(column.first, _Kind):
                    shape, dtype = column.first.shape, column.first.dtype
                    check_rows(column.join, shape, stop - start, self._first)
                    _check_reduction(column.join, dtype)
                    if self._plan.equal_chunks and shape[:1] == (stop - start,):
                        self._warn_of_rows(column.join)
        return self.checked(tree, values, chunk)

    def put(
        self, values: Sequence[object], chunk: int, *, connected: bool = True
    ) -> None:
        """Take the leaves of one chunk's result, as `accept` returned them.

        Args:
            values: The leaves.
            chunk: The chunk.
            connected: Whether the whole is in the graph of the chunks.

        """
        for column, value in zip(self.columns, values, strict=True):
            join = column.join
            if is_tensor(value) and join.dim is not None:
                if column.parts is None:
                    column.parts = Joined(value, join.dim, self._plan)
                column.parts.add(value, chunk, connected=connected)
            elif is_tensor(value) and join.reduction:
                if column.sum is None:
                    column.sum = Sum(sum_dtype(self._sum_dtype, value.dtype))
                if self._check == "values":
                    column.copies.append(value.detach().clone())
                given = value if connected else value.detach()
                column.sum.add(chunk, given, weight=self._weight(join, chunk))
            elif chunk == 0:
                column.value = (
                    value.detach() if is_tensor(value) and not connected else value
                )

    def checked(self, tree: Tree, values: list[object], chunk: int) -> list[object]:
        """Return the leaves of a chunk's result in the order of the first chunk's.

        Raises:
            ValueError: They do not fit the first chunk's.

        """
        if not (tree.is_leaf and self._tree.is_leaf):
            try:
                values = align(self._tree, tree, values, "result")
            except ValueError as error:
                raise ValueError(
                    f"the result of {self._name(chunk)} differs in structure from that"
                    f" of {self._first}: {error}"
                ) from None
        full = (chunk + 1) * self._plan.size <= self._plan.rows
        for column, value in zip(self.columns, values, strict=True):
            first = column.first
            if not (  # most chunks are like the first one, which has been checked
                full
                and isinstance(first, _Kind)
                and is_tensor(value)
                and type(value) is first.type
                and value.dtype is first.dtype
                and value.shape == first.shape
            ):
                self._check_leaf(column, _kind(value), chunk)
        return values

    def join(self, arguments: Sequence[Tensor]) -> list[object]:
        """Return the leaves of the whole, none of them in the memory of `arguments`."""
        leaves: list[object] = []
        for column in self.columns:
            value, column.value = column.value, None
            parts, column.parts = column.parts, None
            if parts is not None:
                leaves.append(parts.tensor())
                continue
            if column.sum is not None:
                value, column.sum = column.sum.total(), None
            if is_tensor(value) and any(share_storage(value, a) for a in arguments):
                value = value.clone()
            leaves.append(value)
        if self._check == "values":
            self._copies = [
                t.detach().clone() if is_tensor(t) else None for t in leaves
            ]
        return leaves

    def unchunked(self, values: Sequence[object]) -> list[tuple[str, object]]:
        """Return the leaves of the first chunk that stand for all, with their paths.

        None where there is one chunk only, which is the whole.
        """
        if len(self._plan) == 1:
            return []
        return [
            (column.join.path, value)
            for column, value in zip(self.columns, values, strict=True)
            if column.join.only_first
        ]

    def ends(
        self, values: Sequence[object], chunk: int, gradients: Mapping[int, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the leaves of a chunk that get a gradient, each with its own.

        Args:
            values: The leaves.
            chunk: The chunk.
            gradients: Those of the whole's leaves, by column; of a joined one that
                part that is this chunk's.

        """
        found = []
        for index, gradient in gradients.items():
            join, value = self.columns[index].join, values[index]
            if not is_tensor(value) or not value.requires_grad:
                continue
            if not (chunk and join.only_first):
                weight = self._weight(join, chunk)
                found.append((value, gradient if weight == 1 else gradient * weight))
        return found

    def _weight(self, join: Join, chunk: int) -> float:
        return self._plan.weight(chunk) if join.reduction == "mean" else 1

    def rebuilt(self, leaves: Iterable[object]) -> object:
        """Return the whole result, given its leaves."""
        return unflatten(self._tree, leaves)

    def check_again(self, tree: Tree, values: list[object], chunk: int) -> list[object]:
        """Check what a recompute gave, and return its leaves in the first's order.

        Raises:
            RuntimeError: Forward gave something else.

        """
        try:
            values = self.checked(tree, values, chunk)
        except ValueError as error:
            if self._check == "none":
                return values
            raise self.differs(chunk, f"gave another result: {error}") from None
        if self._copies:
            self._check_values(values, chunk)
        return values

    def _check_values(self, values: Sequence[object], chunk: int) -> None:
        start, stop = self._plan.bounds(chunk)
        for column, value, whole in zip(
            self.columns, values, self._copies, strict=True
        ):
            dim = column.join.dim
            if not is_tensor(value) or not is_tensor(whole) or not has_values(value):
                continue
            if not (chunk and column.join.only_first):
                here = column.copies[chunk] if column.copies else whole
                if dim is not None:
                    here = whole.narrow(dim, start, stop - start)
                try:
                    torch.testing.assert_close(value.detach(), here, equal_nan=True)
                except AssertionError as error:
                    how = f"gave other values of {column.join.path}: {error}"
                    raise self.differs(chunk, how) from None

    def differs(self, chunk: int, how: str) -> RuntimeError:
        """Return the error that says how a recompute differs from forward."""
        return recompute_error(self._plan, chunk, how)

    def _name(self, chunk: int) -> str:
        return self._plan.describe(chunk)

    def _warn_of_rows(self, join: Join) -> None:
        """Warn of what may be one entry per row: unequal chunks would be an error."""
        if join.reduction and self._plan.size > 1:
            _log.warning(
                "%s has as many entries as a chunk has rows, and out_dim=%r adds the"
                " first ones of all chunks, the second ones, and so on: reduce over the"
                " rows inside f if that is what they are",
                join.path,
                join.reduction,
            )

    def _plan_joins(
        self, tree: Tree, values: list[object], rows: int
    ) -> tuple[Join, ...]:
        entries = broadcast(self._out_dim, tree, "out_dim", "result")
        leaves = [
            classify(path, value, entry, library)
            for path, value, entry in zip(
                tree.paths("result"), values, entries, strict=True
            )
        ]
        return plan_results(leaves, self._plan, rows)

    def _check_leaf(self, column: Column, here: object, chunk: int) -> None:
        join, first = column.join, column.first
        if isinstance(here, _Kind) and join.dim is not None:
            start, stop = self._plan.bounds(chunk)
            check_rows(join, here.shape, stop - start, self._name(chunk))
        if not _agree(join.dim, first, here):
            raise ValueError(
                f"{join.path} is {_describe(first)} for {self._first}, but"
                f" {_describe(here)} for {self._name(chunk)}: "
                + (
                    "chunks are joined along one dim and agree in all else"
                    if join.dim is not None
                    else "a result that is reduced over the chunks has the same shape"
                    " and dtype in all of them; reduce over the rows inside f"
                    if join.reduction
                    else "a result without a batch dim must be the same in all chunks,"
                    " or compare equal; return it as a tensor of one entry per row, or"
                    " do not return it (a cache: use_cache=False)"
                )
            )


def _check_reduction(join: Join, dtype: torch.dtype) -> None:
    if join.reduction == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"{join.path} is of {dtype}, which has no mean: use out_dim='sum', or"
            " convert it to a floating dtype"
        )
    if join.reduction == "sum" and dtype == torch.bool:
        raise TypeError(
            f"{join.path} is of torch.bool, which does not add up: count in f by"
            " .sum(), which gives integers"
        )


def _kind(value: object) -> object:
    if is_tensor(value):
        return _Kind(type(value), value.dtype, library.shape(value))
    return value


def _agree(dim: int | None, first: object, here: object) -> bool:
    """Whether a leaf fits the first chunk's."""
    if not isinstance(first, _Kind) or not isinstance(here, _Kind):
        return (
            type(first) is not _Kind and type(here) is not _Kind and equal(first, here)
        )
    if first.dtype != here.dtype:
        return False
    if dim is None:
        return first == here
    return (first.shape[:dim], first.shape[dim + 1 :]) == (
        here.shape[:dim],
        here.shape[dim + 1 :],
    )


def _describe(value: object) -> str:
    return str(value) if isinstance(value, _Kind) else repr(value)
