"""Time as ratios: several steps by turns in one process.

A busy machine slows down all of them alike, so a ratio is taken within each round, and
of these the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.contenders import Function


class Timed(Protocol):
    """Something to time, and what to do before."""

    def prepare(self) -> None:
        """Do what does not count."""

    def __call__(self) -> None:
        """Do what does."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that needs nothing done before."""

    call: Callable[[], object]

    def prepare(self) -> None:
        """Do nothing."""

    def __call__(self) -> None:
        """Call it."""
        self.call()


@dataclass(frozen=True, slots=True)
class Step:
    """One step: forward, and backward from a gradient that comes from outside.

    Attributes:
        forward: What is run on `x`.
        x: The input.
        gradient: That of the result. Without it, forward runs alone, under no_grad.
        parameters: Whose gradients are made anew each time.
    """

    forward: Function
    x: Tensor
    gradient: Tensor | None
    parameters: tuple[Tensor, ...] = ()

    def prepare(self) -> None:
        """Forget the gradients of the last run."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None

    def __call__(self) -> None:
        """Run it once."""
        if self.gradient is None:
            with torch.no_grad():
                self.forward(self.x)
        else:
            torch.autograd.backward(self.forward(self.x), self.gradient)


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds that each step took, round by round."""

    seconds: Mapping[str, list[float]]

    def median(self, key: str) -> float:
        """Return the median seconds of one step."""
        return median(self.seconds[key])

    def ratio(self, above: str | Sequence[str], below: str | Sequence[str]) -> float:
        """Return how long a step, or several together, take relative to others."""
        pairs = zip(self._together(above), self._together(below), strict=True)
        return median(one / other for one, other in pairs)

    def _together(self, keys: str | Sequence[str]) -> list[float]:
        several = [keys] if isinstance(keys, str) else keys
        rounds = zip(*(self.seconds[key] for key in several), strict=True)
        return list(map(sum, rounds))


def interleaved(
    steps: Mapping[str, Timed], *, rounds: int, budget: float, least: int = 3
) -> Times:
    """Time steps by turns, after one round to warm up.

    Args:
        steps: The steps by key.
        rounds: How many rounds to take.
        budget: Seconds after which to take no further one.
        least: Rounds to take in any case.

    """
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    warm_up(steps.values())
    start = perf_counter()
    for taken in range(rounds):
        if taken >= min(least, rounds) and perf_counter() - start > budget:
            break
        turn = list(steps.items())
        for key, step in turn if taken % 2 else reversed(turn):
            step.prepare()
            seconds[key].append(_time(step))
    return Times(seconds)


def warm_up(steps: Iterable[Timed]) -> None:
    """Run each step once: the first backward from a gradient imports sympy."""
    for step in steps:
        step.prepare()
        step()


def _time(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start
