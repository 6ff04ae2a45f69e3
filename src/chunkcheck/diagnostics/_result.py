"""Owns the result of a profile: its rows, the conditions, and the forms it comes in.

Knows nothing of how they were measured, nor of torch.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkcheck.diagnostics._advice import advise, reference
from chunkcheck.diagnostics._rows import ProfileRow, knee
from chunkcheck.diagnostics._table import draw, html_table, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Profile:
    """What `profile` measured. It prints as a table, and shows as one in a notebook.

    Attributes:
        rows: The candidates: plain, checkpoint, and the chunk sizes of each strategy,
            the largest first.
        rows_of_batch: The rows of the batch.
        rounds: How often each candidate was timed.
        backward: Whether backward was run; it is not where nothing requires a gradient.
        given_bytes: The bytes of what is there before, and so in no peak: the arguments
            and the gradients of the results.
        floor_bytes: The bytes of the results and of all other gradients, which no chunk
            size can save.
        free_bytes: What was free on the device before, if that is known.
        threads: The threads that torch used on the CPU.
        device: The device that was measured.
        torch_version: The version of torch.

    """

    rows: tuple[ProfileRow, ...]
    rows_of_batch: int
    rounds: int
    backward: bool
    given_bytes: int
    floor_bytes: int
    free_bytes: int | None
    threads: int
    device: str
    torch_version: str

    @property
    def knee(self) -> ProfileRow | None:
        """The row at the knee of memory against time; None if none has run.

        Of the rows that no other beats in both, the one furthest below the line from
        the fastest to the leanest, both axes logarithmic; among equals, the leanest.
        """
        return knee(self.rows)

    @property
    def reference(self) -> ProfileRow | None:
        """The row whose time is 1: plain, or if it ran out of memory, the next one."""
        return reference(self.rows)

    @property
    def advice(self) -> str:
        """Whether chunking pays, and which chunk size to take, in words."""
        return advise(
            self.rows,
            self.rows_of_batch,
            backward=self.backward,
            given_bytes=self.given_bytes,
            floor_bytes=self.floor_bytes,
            free_bytes=self.free_bytes,
        )

    def __str__(self) -> str:
        """Return a table in plain text, the knee marked by a star, and the advice."""
        table = text_table(self.rows, self.knee, self._unit)
        advice = textwrap.fill(self.advice, 88, break_long_words=False)
        return f"{self._conditions}\n\n{table}\n\n{advice}"

    def _repr_html_(self) -> str:
        above, below = self._conditions, self.advice
        return html_table(self.rows, self.knee, self._unit, above, below)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw peak memory against time, with the chunk sizes and the knee marked.

        Args:
            ax: Matplotlib's axes to draw on; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed; it comes with `chunkcheck[plot]`.

        """
        return draw(self.rows, self.knee, self._unit, ax)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as dicts, lists, numbers and strings, with the advice."""
        return {
            **asdict(self),
            "rows": [
                {**asdict(row), "spread": row.spread and list(row.spread)}
                for row in self.rows
            ],
            "knee": None if self.knee is None else self.rows.index(self.knee),
            "advice": self.advice,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return `to_dict` as JSON.

        Args:
            path: The file to write it to as well.

        """
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Return the profile that `to_dict` gave these values of."""
        derived = ("knee", "advice", "rows")
        rows = [
            ProfileRow(**{**row, "spread": row["spread"] and tuple(row["spread"])})
            for row in values["rows"]
        ]
        others = {key: value for key, value in values.items() if key not in derived}
        return cls(rows=tuple(rows), **others)

    @property
    def _unit(self) -> str:
        unit = self.reference
        return "plain" if unit is None else str(unit)

    @property
    def _conditions(self) -> str:
        run = "forward and backward" if self.backward else "forward only"
        return (
            f"{self.rows_of_batch:,} row{'s' * (self.rows_of_batch != 1)}, {run}, on"
            f" {self.device} with {self.threads} thread{'s' * (self.threads != 1)},"
            f" torch {self.torch_version}; medians of {self.rounds}"
            f" round{'s' * (self.rounds != 1)}"
        )
