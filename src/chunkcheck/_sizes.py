"""Sizes: policies that choose the chunk size, and the search for one that fits.

Pure arithmetic on what a measure says. Knows no array library, nor how it is measured.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("chunkcheck")

Measure: TypeAlias = Callable[[int], float]  # bytes at the peak, by rows per chunk

# A peak is the largest of several lines in the chunk size. From small chunks the slope
# of the last one is not seen, so no step goes further than this.
FURTHEST = 4
_STARTS = 1024  # so many chunks the search starts with: fewer rows take no memory
_UNITS = {"": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", 1)
    for infix, base in (("", 1000), ("i", 1024))
}


@runtime_checkable
class ChunkSizePolicy(Protocol):
    """Chooses the rows per chunk when a call is made; backward keeps to them."""

    def resolve(self, rows: int, measure: Measure) -> int:
        """Return the rows per chunk.

        Args:
            rows: The rows of the batch.
            measure: Returns the bytes that forward and backward take at their peak in
                chunks of so many rows, infinity if they run out of memory. It runs `f`,
                on no more than three such chunks and without a trace.

        """
        ...


@dataclass(frozen=True, slots=True)
class NumChunks:
    """At most so many chunks, all of the same size but for the last one.

    Attributes:
        count: The number of chunks, 1 or more. There are fewer where the batch has no
            so many rows, or cannot be divided so: 10 rows in 6 chunks are 5 of 2.

    Raises:
        TypeError: `count` is no int.
        ValueError: It is less than 1.

    Example:
        >>> import torch
        >>> from chunkcheck import NumChunks, chunk_and_checkpoint
        >>> y = chunk_and_checkpoint(torch.sin, torch.ones(10), chunk_size=NumChunks(4))

    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not hasattr(self.count, "__index__"):
            raise TypeError(
                f"count must be an int of 1 or more chunks, found {self.count!r} of"
                f" type {type(self.count).__name__}"
            )
        if operator.index(self.count) < 1:
            raise ValueError(f"count must be 1 or more chunks, found {self.count}")

    def resolve(self, rows: int, measure: Measure) -> int:  # noqa: ARG002
        """Return the rows per chunk."""
        return max(1, -(-rows // operator.index(self.count)))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The largest chunks with which forward and backward stay within a budget.

    The first call with arguments of some shapes runs `f` on a few of their rows,
    forward and backward, to see what memory that takes, and chooses; later calls with
    the same shapes, dtypes, devices and grad mode do not. The logger `chunkcheck` says
    what was chosen.

    Attributes:
        memory: What the call may take at its peak, its results and gradients
            included: bytes, a string such as "2GiB" or "500 MB", or a float below 1
            for that part of the memory that is free when it is decided.
        group: A process group whose ranks take the smallest of their choices, so that
            all have chunks of the same size. All of them must make the call, and ask
            each other at each one.

    Raises:
        TypeError: `memory` is none of these.
        ValueError: It is not positive, or a string of another form.

    Example:
        >>> import torch
        >>> from chunkcheck import MemoryBudget, chunk_and_checkpoint
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)
        ... )
        >>> x = torch.randn(1000, 8, requires_grad=True)
        >>> y = chunk_and_checkpoint(mlp, x, chunk_size=MemoryBudget("1 MiB"))

    """

    memory: int | float | str
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        as_bytes(self.memory, free=1)

    def bytes(self, free: int) -> int:
        """Return the budget, given the bytes that are free."""
        return as_bytes(self.memory, free)

    def resolve(self, rows: int, measure: Measure) -> int:
        """Return the rows per chunk; `memory` must be in bytes."""
        return largest_that_fits(rows, self.bytes(free=0), measure)


def as_bytes(memory: object, free: int) -> int:
    """Return an amount of memory in bytes.

    Args:
        memory: Bytes, a string such as "2GiB", or a float below 1 for a part of `free`.
        free: The bytes that are free.

    Raises:
        TypeError: `memory` is none of these.
        ValueError: It is not positive, or a string of another form.

    """
    forms = "bytes, a string such as '2GiB', or a part of what is free, a float below 1"
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", memory)
        units = {unit.lower(): size for unit, size in _UNITS.items()}
        try:
            number, unit = match.groups() if match else ("", "")
            memory = int(float(number) * units[unit.lower()])
        except (ValueError, KeyError):
            raise ValueError(f"memory must be {forms}, found {memory!r}") from None
    elif isinstance(memory, float) and 0 < memory < 1:
        return int(memory * free)
    elif isinstance(memory, bool) or not hasattr(memory, "__index__"):
        kind = type(memory).__name__
        if isinstance(memory, float):
            raise ValueError(f"memory must be {forms}, found {memory!r}")
        raise TypeError(f"memory must be {forms}, found {memory!r} of type {kind}")
    found = operator.index(memory)
    if found < 1:
        raise ValueError(f"memory must be positive, found {found} bytes")
    return found


def largest_that_fits(rows: int, budget: float, measure: Measure) -> int:
    """Return the most rows per chunk with which the peak is within a budget.

    Measures larger and larger chunks, none twice, and none that the last two say would
    not fit. If not even one row fits, that is the answer, and a warning is logged.
    """
    search = Search(rows, measure)
    search.run(budget)
    if not search.fitting(budget):
        _log.warning(
            "not even chunks of one row fit into %s bytes: they take %s",
            f"{budget:,.0f}",
            f"{search.known[1]:,.0f}",
        )
        return 1
    return max(search.fitting(budget))


class Search:
    """The peaks that have been measured, and where to measure next.

    Attributes:
        known: The bytes at the peak by rows per chunk.

    """

    def __init__(self, rows: int, measure: Measure) -> None:
        self._rows = max(1, rows)
        self._measure = measure
        self.known: dict[int, float] = {}

    def fitting(self, budget: float) -> list[int]:
        """Return the sizes that were seen to fit."""
        return [size for size, peak in self.known.items() if peak <= budget]

    def predicted(self, size: int) -> float:
        """Return the peak for a size, along the line through the last two."""
        last = max(self.known)
        return self.known[last] + (size - last) * self._slope()

    def run(self, budget: float) -> None:
        """Measure larger chunks while they fit, or smaller ones until one does."""
        while (size := self._next(budget)) is not None:
            self._look(size)
        if self.fitting(budget):
            self._refine(budget)

    def _refine(self, budget: float) -> None:
        """Measure one size between the largest that fits and the next one, if any."""
        largest = max(self.fitting(budget))
        slope = self._slope()
        if largest >= self._rows or slope <= 0:
            return
        above = min((s for s in self.known if s > largest), default=self._rows + 1)
        size = largest + int((budget - self.known[largest]) / slope)
        size = min(size, FURTHEST * largest, above - 1)
        size -= size % max(1, largest // 8)  # a round number
        if size > largest:
            self._look(size)

    def _next(self, budget: float) -> int | None:
        if not self.known:
            # Batch norm, for one, does not take a single row.
            return min(self._rows, max(2, self._rows // _STARTS))
        if not self.fitting(budget):
            least = min(self.known)
            return least // 2 or None
        last = max(self.known)
        if last >= self._rows or self.known[last] > budget:
            return None
        for factor in (FURTHEST, 2) if len(self.known) > 1 else (2,):
            size = min(factor * last, self._rows)
            if self.predicted(size) <= budget:
                return size
        return None

    def _look(self, size: int) -> None:
        self.known[size] = self._measure(size)
        _log.debug("chunks of %d rows take %.0f bytes", size, self.known[size])

    def _slope(self) -> float:
        """Return how the peak grows with the size, where it was measured last."""
        if len(self.known) == 1:
            return 0.0
        *_, before, last = sorted(self.known)
        return (self.known[last] - self.known[before]) / (last - before)
