"""Owns what one candidate of a profile came to, and which candidate is the knee.

Knows bytes and seconds. Knows nothing of how they were measured, nor of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NOISE = 0.03  # a row that saves less than this part of the memory saves nothing


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One candidate of a `Profile`; figures are None where it ran out of memory.

    Attributes:
        strategy: `"plain"` and `"checkpoint"` run the whole batch, the latter under
            torch's non-reentrant checkpoint; else the strategy of the chunks.
        chunk_size: Rows per chunk; None for the whole batch.
        chunks: The number of chunks.
        peak_bytes: The most bytes held at any moment of forward and backward, above
            what was allocated before; see `measure_memory`.
        held_bytes: The bytes held when forward had returned, its result included.
        seconds: The median time of one run.
        ratio: The median, over the rounds, of the time relative to `"plain"` in the
            same round (see `Profile.reference` where plain ran out of memory).
        spread: The quartiles of the same.
        note: Why there are no figures.

    """

    strategy: str
    chunk_size: int | None
    chunks: int
    peak_bytes: int | None
    held_bytes: int | None
    seconds: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    note: str = ""

    def __str__(self) -> str:
        """Return the name of the candidate."""
        if self.chunk_size is None:
            return self.strategy
        return f"{self.strategy}, chunk_size={self.chunk_size}"

    @property
    def costs(self) -> tuple[int, float] | None:
        """The peak in bytes and the time as a ratio, if it has run."""
        if self.peak_bytes is None or self.ratio is None:
            return None
        return self.peak_bytes, self.ratio


def knee(rows: Sequence[ProfileRow]) -> ProfileRow | None:
    """Return the row at the knee of memory against time, or None if none has run.

    Of the rows that no other beats, the one furthest below the line from the fastest
    to the leanest, both axes logarithmic; among equals, the leanest.
    """
    ran = [(row, *row.costs) for row in rows if row.costs is not None]
    front: list[tuple[ProfileRow, float, float]] = []
    least = math.inf
    for row, peak, ratio in sorted(ran, key=lambda found: (found[2], found[1])):
        if peak < (1 - _NOISE) * least:
            front.append((row, math.log(max(1, peak)), math.log(max(1e-9, ratio))))
            least = peak
    if not front:
        return None
    (_, x, y), (_, last_x, last_y) = front[0], front[-1]

    def below(point: tuple[ProfileRow, float, float]) -> tuple[float, float]:
        _, at, up = point
        # Proportional to the distance from the line, whatever the scale of the axes.
        return (last_x - x) * (up - y) - (last_y - y) * (at - x), -at

    return max(front, key=below)[0]


def size_text(size: int) -> str:
    """Return bytes for people, such as `7.6 MiB`."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def time_text(seconds: float) -> str:
    """Return seconds for people, such as `7.6 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds * 1e6:.0f} us"
