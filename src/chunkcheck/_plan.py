"""Plans: which rows make a chunk, how each leaf is cut and each result leaf joined.

Pure arithmetic on shapes, decided once per call. Knows no array library, no strategy,
and nothing of how the trees are described by the caller.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from chunkcheck._tree import Entry, step

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the arguments or of a result, as the plan sees it."""

    path: str
    shape: Shape | None  # None: no tensor
    entry: Entry  # what batch_dim or out_dim says of it
    absent: bool = False  # the value is None, an optional that is not given


@dataclass(frozen=True, slots=True)
class Plan:
    """How the arguments of one call are cut."""

    rows: int
    size: int
    dims: tuple[int | None, ...]  # per leaf; None passes whole
    shared_dim: int | None  # the dim along which results join unless told otherwise
    passes_one: bool  # a leaf of size 1 along its dim passes whole

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each chunk and the row after its last."""
        return map(self.bounds, range(len(self)))

    def __len__(self) -> int:
        """Return the number of chunks; an empty batch is one."""
        return max(1, -(-self.rows // self.size))

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk and the row after its last."""
        start = chunk * self.size
        return start, min(start + self.size, self.rows)

    def summary(self, paths: Sequence[str]) -> str:
        """Return in words what is cut and what passes whole.

        Args:
            paths: Those of the leaves.

        """
        cut: dict[int | None, list[str]] = {}
        for path, dim in zip(paths, self.dims, strict=True):
            cut.setdefault(dim, []).append(path)
        whole = ", ".join(cut.pop(None, [])) or "nothing"
        parts = [f"{', '.join(found)} along dim {dim}" for dim, found in cut.items()]
        count = len(self)
        chunks = "1 chunk" if count == 1 else f"{count} chunks of {self.size} rows"
        return f"{self.rows} rows in {chunks}: cut {'; '.join(parts)}; whole: {whole}"

    def in_chunks_of(self, size: int) -> Plan:
        """Return the same plan with another number of rows per chunk."""
        return replace(self, size=max(1, min(size, self.rows)))

    @property
    def equal_chunks(self) -> bool:
        """Whether there are several chunks, all with the same number of rows."""
        return self.size < self.rows and self.rows % self.size == 0

    def weight(self, chunk: int) -> float:
        """Return the part of the rows that is in a chunk; 1 for one that has all."""
        start, stop = self.bounds(chunk)
        return (stop - start) / self.rows if self.rows else 1.0

    def describe(self, chunk: int) -> str:
        """Return the name of one chunk."""
        start, stop = self.bounds(chunk)
        return f"rows {start}:{stop} of {self.rows}"


def checked_size(chunk_size: object) -> int | None:
    """Return `chunk_size` as an int, or None for one chunk.

    Raises:
        TypeError: It is no integer.
        ValueError: It is zero or negative.

    """
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not hasattr(chunk_size, "__index__"):
        raise TypeError(
            f"chunk_size must be a positive int, or None for one chunk, found"
            f" {chunk_size!r} of type {type(chunk_size).__name__}"
        )
    size = operator.index(chunk_size)
    if size < 1:
        raise ValueError(
            f"chunk_size must be a positive int, or None for one chunk, found {size}"
        )
    return size


def _checked_dim(dim: object, where: str, allowed: str) -> int | None:
    if dim is None:
        return None
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(
            f"{where} must be {allowed}, found {dim!r} of type {type(dim).__name__}"
        )
    return operator.index(dim)


def _normalized(leaf: Leaf, shape: Shape, dim: int, remedy: str) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{leaf.path} has shape {shape} and so no dim {dim}, which"
            f" {leaf.entry.where} asks for: {remedy}"
        )
    return dim % len(shape)


def plan_arguments(leaves: Sequence[Leaf], chunk_size: int | None) -> Plan:
    """Return the plan for these argument leaves.

    Raises:
        TypeError: A dim is no int, or an explicit int stands at a non-tensor.
        ValueError: A leaf lacks its dim, sizes differ, or no leaf is chunked.

    """
    sized = {
        index: (leaf, leaf.shape, dim)
        for index, leaf in enumerate(leaves)
        if (dim := _batch_dim(leaf)) is not None and leaf.shape is not None
    }
    if not sized:
        raise ValueError(
            "no tensor is chunked: batch_dim must be an int for at least one argument"
            " that is a tensor of one dim or more"
        )
    sizes = {shape[dim] for _, shape, dim in sized.values()}
    rows = 0 if sizes == {0, 1} else max(sizes)
    if sizes - {1, rows}:
        raise ValueError(
            "the chunked tensors must agree in size along their batch dim, but for a"
            " size of 1, which passes whole; found:\n"
            + "\n".join(
                f"  {leaf.path} of shape {shape}: size {shape[dim]} along dim {dim}"
                for leaf, shape, dim in sized.values()
            )
            + "\nwrite None in batch_dim for what is not part of the batch"
        )
    cut = {index: dim for index, (_, shape, dim) in sized.items() if shape[dim] == rows}
    written = {leaves[index].entry.value for index in cut}
    shared = written if len(written) == 1 else set(cut.values())
    return Plan(
        rows=rows,
        size=max(1, rows if chunk_size is None else min(chunk_size, rows)),
        dims=tuple(cut.get(index) for index in range(len(leaves))),
        shared_dim=operator.index(*shared) if len(shared) == 1 else None,
        passes_one=len(cut) < len(sized),
    )


def _batch_dim(leaf: Leaf) -> int | None:
    """Return the dim along which a leaf may be cut, counted from its first."""
    dim = _checked_dim(leaf.entry.value, leaf.entry.where, "an int or None")
    if dim is not None and leaf.shape is None and leaf.entry.exact and not leaf.absent:
        raise TypeError(
            f"{leaf.path} is no tensor, but {leaf.entry.where} is {dim}: write None"
            " there"
        )
    if dim is None or not leaf.shape:
        return None
    return _normalized(leaf, leaf.shape, dim, "write None there to pass it whole")


@dataclass(frozen=True, slots=True)
class Join:
    """How one result leaf is put together: joined, reduced, or the first chunk's."""

    path: str
    dim: int | None
    tensor: bool
    reduction: Literal["sum", "mean"] | None = None

    @property
    def only_first(self) -> bool:
        """Whether the whole is what the first chunk gave."""
        return self.dim is None and self.reduction is None


def check_out_dim(out_dim: object, plan: Plan, where: str = "out_dim") -> None:
    """Check what can be checked of `out_dim` before there is a result.

    Raises:
        TypeError: An entry is no int, None, "sum", "mean" or "auto".
        ValueError: It is "auto" for the whole result, and no dim is shared.

    """
    if isinstance(out_dim, Mapping):
        for key, value in out_dim.items():
            check_out_dim(value, plan, step(where, key))
    elif isinstance(out_dim, tuple | list):
        for index, value in enumerate(out_dim):
            check_out_dim(value, plan, step(where, index))
    elif out_dim == "auto":
        if plan.shared_dim is None:
            raise ValueError(
                "the chunked arguments share no batch dim, so out_dim must say along"
                " which dim the result is joined, and None for what does not depend on"
                " the rows"
            )
    elif out_dim not in ("sum", "mean"):
        _checked_dim(out_dim, where, "an int, None, 'sum', 'mean' or 'auto'")


def plan_results(leaves: Sequence[Leaf], plan: Plan, rows: int) -> tuple[Join, ...]:
    """Return how each result leaf is joined, from the leaves of a chunk of `rows` rows.

    Raises:
        TypeError: An explicit int or a reduction stands at a leaf that is no tensor.
        ValueError: A leaf cannot be joined as asked, or it is not clear how.

    """
    return tuple(_plan_result(leaf, plan, rows) for leaf in leaves)


def _plan_result(leaf: Leaf, plan: Plan, rows: int) -> Join:
    value, where = leaf.entry.value, leaf.entry.where
    if leaf.shape is None or leaf.absent:
        reduced = value in ("sum", "mean")
        if not leaf.absent and (
            reduced or (value not in (None, "auto") and leaf.entry.exact)
        ):
            remedy = "write None there"
            if reduced:
                remedy = (
                    "return a tensor, such as torch.tensor(n), for the chunks to be"
                    " added, or write None if it does not depend on the rows"
                )
            raise TypeError(
                f"{leaf.path} is no tensor, but {where} is {value!r}: {remedy}"
            )
        return Join(leaf.path, None, tensor=False)
    if value == "auto":
        return Join(leaf.path, _default_dim(leaf, leaf.shape, plan, rows), tensor=True)
    if value in ("sum", "mean"):
        return Join(leaf.path, None, tensor=True, reduction=value)
    dim = _checked_dim(value, where, "an int or None")
    if dim is not None:
        dim = _join_dim(leaf, leaf.shape, dim)
    return Join(leaf.path, dim, tensor=True)


def _join_dim(leaf: Leaf, shape: Shape, dim: int) -> int:
    if not shape:
        raise ValueError(
            f"{leaf.path} is 0-dimensional and cannot be joined along dim {dim}: use"
            " out_dim='sum' or 'mean', as f does over its rows, or return one entry per"
            " row; 'mean' only if all rows count the same: where some are ignored or"
            " weighted, return the sum and the count, both 'sum', and divide outside"
        )
    return _normalized(leaf, shape, dim, "write the dim that holds the rows")


def _default_dim(leaf: Leaf, shape: Shape, plan: Plan, rows: int) -> int:
    """Return the shared dim, where the row check can be trusted to confirm it."""
    if plan.shared_dim is None:
        raise ValueError(
            f"{leaf.entry.where} must say along which dim {leaf.path} of shape {shape}"
            f" (from {rows} rows) is joined: the chunked arguments share no batch dim"
        )
    dim = _join_dim(leaf, shape, plan.shared_dim)
    rivals = [d for d, size in enumerate(shape) if size == rows and d != dim]
    if plan.shared_dim != 0 and plan.equal_chunks and rivals and shape[dim] == rows:
        raise ValueError(
            f"{leaf.path} has shape {shape}, and both dim {dim} and dim {rivals[0]}"
            f" have as many rows as every chunk ({rows}): write"
            f" out_dim={plan.shared_dim} if that is the dim to join along"
        )
    if plan.passes_one and plan.size == 1 and shape[dim] == 1:
        raise ValueError(
            f"{leaf.path} has shape {shape}: every chunk has one row, and so has a"
            " tensor that passes whole, so that its rows cannot be told from the"
            f" chunk's: write out_dim={plan.shared_dim} to join it, or None if it does"
            " not depend on the rows"
        )
    return dim


def check_rows(join: Join, shape: Shape, rows: int, chunk: str) -> None:
    """Check that a result leaf to be joined has as many rows as its chunk.

    Raises:
        ValueError: It has another number.

    """
    if join.dim is not None and (len(shape) <= join.dim or shape[join.dim] != rows):
        raise ValueError(
            f"{join.path} has shape {shape} for {chunk}: expected {rows} rows along dim"
            f" {join.dim}; write its dim in out_dim, 'sum' or 'mean' if f has reduced"
            " over its rows, or None if it does not depend on the rows"
        )
