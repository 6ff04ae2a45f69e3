"""Figures: what a benchmark found, as data. Knows neither how it is measured nor shown.

Everything here turns into JSON by `dataclasses.asdict`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

import torch

from benchmarks.contenders import Contender

Unit: TypeAlias = Literal["X", "ratio", "share", "error", "bytes", "seconds"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, beside what it has to be.

    Attributes:
        key: Its name in the JSON file.
        label: What it is, for a table.
        value: The number, or None where it could not be measured here.
        unit: What it counts. "X" is the bytes of the input, "share" a part of 1.
        limit: The most that it may be.
        aim: What it ought to be.
        note: What to see beside it.
    """

    key: str
    label: str
    value: float | None
    unit: Unit
    limit: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is within its limit; None if there is no limit or no value."""
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Curves:
    """One plot: a curve for each contender over the same `x`."""

    key: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[int]
    y: Mapping[str, Sequence[float | None]]
    log: bool = True
    level: float | None = None  # a line to see beside the curves


@dataclass(frozen=True, slots=True)
class Part:
    """What one benchmark found."""

    key: str
    title: str
    figures: Sequence[Figure]
    curves: Sequence[Curves] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON, with whether each figure is within its limit."""
        figures = [{**asdict(figure), "met": figure.met} for figure in self.figures]
        return {**asdict(self), "figures": figures}


@dataclass(frozen=True, slots=True)
class Setting:
    """How to run a benchmark.

    Attributes:
        contenders: The ways to compare, by key.
        quick: Sizes that only show that it runs.
        say: Told what is measured at the moment.
    """

    contenders: Mapping[str, Contender]
    quick: bool = False
    say: Callable[[str], object] = lambda _: None


def environment() -> dict[str, object]:
    """Return what the figures depend on besides the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": platform.machine(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
    }
