"""Results: what the chunks gave, checked against each other and joined.

Knows trees, plans and tensors. Knows nothing of how the chunks were run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from chunkcheck._leaves import classify
from chunkcheck._plan import Join, Plan, check_rows, plan_results
from chunkcheck._torch import tensors as library
from chunkcheck._torch.compat import share_storage
from chunkcheck._torch.tensors import is_tensor, join
from chunkcheck._tree import LEAF, Tree, align, broadcast, equal, unflatten


@dataclass(slots=True)
class _Column:
    """One result leaf over all chunks."""

    join: Join
    values: list[object]


class Results:
    """The results of the chunks so far."""

    def __init__(self, plan: Plan, out_dim: object) -> None:
        self._plan = plan
        self._out_dim = out_dim
        self._tree = LEAF
        self._columns: list[_Column] = []
        self._first = ""  # the name of the first chunk, once there is one

    def add(self, tree: Tree, values: list[object], start: int, stop: int) -> None:
        """Take the result of one chunk.

        Raises:
            TypeError, ValueError: It cannot be joined, or does not fit the first one.

        """
        chunk = self._plan.describe(start, stop)
        if not self._first:
            self._tree, self._first = tree, chunk
            joins = self._plan_joins(tree, values, stop - start)
            self._columns = [_Column(join, []) for join in joins]
        else:
            try:
                values = align(self._tree, tree, values, "result")
            except ValueError as error:
                raise ValueError(
                    f"the result of {chunk} differs in structure from that of"
                    f" {self._first}: {error}"
                ) from None
        for column, value in zip(self._columns, values, strict=True):
            self._add_leaf(column, value, stop - start, chunk)

    def join(self, arguments: Iterable[Tensor]) -> object:
        """Return the whole result, none of it in the memory of `arguments`."""
        arguments = list(arguments)
        leaves: list[object] = []
        for column in self._columns:
            values, column.values = column.values, []
            tensors = [value for value in values if is_tensor(value)]
            if not column.join.tensor:
                leaves.append(values[0])
            elif column.join.dim is not None:
                leaves.append(join(tensors, column.join.dim))
            elif any(share_storage(tensors[0], argument) for argument in arguments):
                leaves.append(tensors[0].clone())
            else:
                leaves.append(tensors[0])
        return unflatten(self._tree, leaves)

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

    def _add_leaf(self, column: _Column, value: object, rows: int, chunk: str) -> None:
        join = column.join
        if is_tensor(value):
            check_rows(join, tuple(value.shape), rows, chunk)
        first = column.values[0] if column.values else value
        if not _agree(join, first, value):
            raise ValueError(
                f"{join.path} is {_describe(first)} for {self._first}, but"
                f" {_describe(value)} for {chunk}: "
                + (
                    "a result without a batch dim must be the same in all chunks;"
                    " return it as a tensor of one entry per row, or compute it outside"
                    if join.dim is None
                    else "chunks are joined along one dim and agree in all else"
                )
            )
        if join.dim is not None or not column.values:
            column.values.append(value)


def _agree(join: Join, first: object, value: object) -> bool:
    """Whether a leaf fits the first chunk's."""
    if not is_tensor(first) or not is_tensor(value):
        return not is_tensor(first) and not is_tensor(value) and equal(first, value)
    if first.dtype != value.dtype:
        return False
    if join.dim is None:
        return type(first) is type(value) and first.shape == value.shape
    return [n for d, n in enumerate(first.shape) if d != join.dim] == [
        n for d, n in enumerate(value.shape) if d != join.dim
    ]


def _describe(value: object) -> str:
    if is_tensor(value):
        return (
            f"a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
        )
    return repr(value)
