"""Owns the trial runs of a profile: each candidate's memory and time, and its failures.

Knows one device and how to run forward and backward. Knows nothing of chunks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chunkcheck._torch.failures import is_out_of_memory
from chunkcheck._torch.meter import measure_memory, phase
from chunkcheck._torch.untouched import old_objects_apart
from chunkcheck._tree import flatten
from chunkcheck.diagnostics._rows import ProfileRow

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch.autograd.graph import Node

_PATIENCE = 2.0  # seconds before a bar is shown


@dataclass(slots=True, eq=False)
class Outside:
    """What all trials share.

    Attributes:
        known: The leaves that may be used, and get back their gradients later.
        borders: Tensors with a history that is not to be run.

    """

    known: Sequence[Tensor]
    borders: Sequence[Tensor]
    _ones: dict[object, Tensor] = field(default_factory=dict)

    def ones(self, index: int, result: Tensor) -> Tensor:
        """Return the gradient of a result; all trials have it once."""
        key = (index, type(result), result.shape, result.dtype, result.device)
        if key not in self._ones:
            self._ones[key] = torch.ones_like(result)
        return self._ones[key]


@dataclass(slots=True, eq=False)
class Trial:
    """One candidate.

    Attributes:
        strategy: As in `ProfileRow`.
        chunk_size: As there.
        chunks: As there.
        forward: Runs it.
        targets: The tensors whose gradients are asked for; found in the first run.
        accumulates: Whether gradients have to be accumulated instead.
        cotangents: The gradients of its results; made in the first run.
        floor_bytes: The bytes of results and all other gradients.
        peak_bytes: As in `ProfileRow`.
        held_bytes: As there.
        seconds: What each round took.
        note: Why it is given up.

    """

    strategy: str
    chunk_size: int | None
    chunks: int
    forward: Callable[[], object]
    targets: list[Tensor] = field(default_factory=list)
    accumulates: bool = False
    cotangents: list[Tensor] = field(default_factory=list)
    floor_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    note: str = ""

    def first_run(self, outside: Outside) -> None:
        """Run it once, which may allocate what later runs reuse, and see what it gives.

        Args:
            outside: What all trials share.

        """
        try:
            self._first_run(outside)
        except RuntimeError as error:
            if self.accumulates or "torch.utils.checkpoint is incompatible" not in str(
                error
            ):
                raise
            self.accumulates = True
        if self.accumulates:  # reentrant checkpoints cannot be asked for gradients
            self._first_run(outside)

    def _first_run(self, outside: Outside) -> None:
        results = _tensors(self.forward())
        outputs = [t for t in results if t.requires_grad]
        targets = _targets(outputs, outside.borders)
        if self.accumulates:
            targets = list({id(t): t for t in (*targets, *outside.known)}.values())
        self.targets = targets
        self.cotangents = list(map(outside.ones, range(len(outputs)), outputs))
        self._forget()
        found = self._backward(outputs)
        gradients = [gradient for gradient in found if gradient is not None]
        self.floor_bytes = sum(map(size_of, [*results, *gradients]))
        self._forget()

    def measure(self, device: torch.device) -> None:
        """Measure its memory."""
        trace = measure_memory(self.run, device=device)
        self.peak_bytes = trace.peak_bytes
        self.held_bytes = trace.phases["forward"].held_bytes
        self._forget()

    def time(self, device: torch.device) -> None:
        """Time it once more."""
        _synchronize(device)
        start = perf_counter()
        self.run()
        _synchronize(device)
        self.seconds.append(perf_counter() - start)
        self._forget()

    def run(self) -> None:
        """Run forward, and backward where there is one."""
        with phase("forward"):
            result = self.forward()
        with phase("backward"):
            self._backward([t for t in _tensors(result) if t.requires_grad])

    def _backward(self, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # Not `backward`, which would add to gradients that the user holds, and run
        # hooks that wait for that, such as an optimizer's step.
        if not outputs:
            return ()
        if self.accumulates:
            torch.autograd.backward(outputs, self.cotangents)
            return [t.grad for t in self.targets]
        return torch.autograd.grad(
            outputs, self.targets, self.cotangents, allow_unused=True
        )

    def _forget(self) -> None:
        if self.accumulates:
            for tensor in self.targets:
                tensor.grad = None

    def row(self, reference: Trial | None) -> ProfileRow:
        """Return its figures, its time relative to that of another."""
        if self.note or reference is None:
            return ProfileRow(
                strategy=self.strategy,
                chunk_size=self.chunk_size,
                chunks=self.chunks,
                peak_bytes=None,
                held_bytes=None,
                seconds=None,
                ratio=None,
                spread=None,
                note=self.note,
            )
        pairs = zip(self.seconds, reference.seconds, strict=True)
        ratios = [own / other for own, other in pairs]
        low = high = ratios[0]
        if len(ratios) > 1:
            low, _, high = quantiles(ratios, n=4, method="inclusive")
        return ProfileRow(
            strategy=self.strategy,
            chunk_size=self.chunk_size,
            chunks=self.chunks,
            peak_bytes=self.peak_bytes,
            held_bytes=self.held_bytes,
            seconds=median(self.seconds),
            ratio=median(ratios),
            spread=(low, high),
        )


def run_all(
    trials: Sequence[Trial],
    outside: Outside,
    device: torch.device,
    rounds: int,
    *,
    progress: bool,
) -> None:
    """Run the trials: each to warm up and to measure it, then all by turns.

    A busy machine slows down all of them alike, so a ratio is taken within each round.
    """
    ticking = _ticking(len(trials) * (rounds + 2), shown=progress)
    with old_objects_apart(), ticking as tick:
        for trial in trials:
            _attempt(trial, partial(trial.first_run, outside))
            tick()
            _attempt(trial, partial(trial.measure, device))
            tick()
        for taken in range(rounds):
            for trial in trials if taken % 2 else reversed(trials):
                _attempt(trial, partial(trial.time, device))
                tick()


def _attempt(trial: Trial, act: Callable[[], None]) -> None:
    if trial.note:
        return
    try:
        act()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        trial.note = "out of memory"
    if trial.note:  # only now has the traceback let go of what the run held
        trial.targets, trial.cotangents = [], []
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _tensors(result: object) -> list[Tensor]:
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _targets(outputs: Iterable[Tensor], borders: Sequence[Tensor]) -> list[Tensor]:
    """Return what the graph of `outputs` ends in, on this side of the borders.

    To ask for the gradient of a leaf that lies beyond a border as well would run, and
    free, a graph of the user's.
    """
    ends = {t.grad_fn: t for t in borders if t.grad_fn is not None}
    found, met = _walk(outputs, set(ends))
    beyond, _ = _walk([t for t in borders if t.grad_fn in met], set())
    own = [leaf for key, leaf in found.items() if key not in beyond]
    return own + [t for t in borders if t.grad_fn in met]


def _walk(
    starts: Iterable[Tensor], stops: set[Node]
) -> tuple[dict[int, Tensor], set[Node]]:
    """Return the leaves of a graph by id, and the stops that were met."""
    leaves: dict[int, Tensor] = {}
    met: set[Node] = set()
    seen: set[Node] = set()
    stack: list[Node] = []
    for start in starts:
        if start.grad_fn is None:
            leaves[id(start)] = start
        else:
            stack.append(start.grad_fn)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stops:
            met.add(node)
            continue
        if node.name().endswith("AccumulateGrad"):
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            leaves[id(leaf)] = leaf
        stack += [other for other, _ in node.next_functions if other is not None]
    return leaves, met


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _ticking(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield what to call after each of `total` runs: it shows a bar if they take long.

    A bar that redrew itself would cost time in a thread of its own.
    """
    start, done = perf_counter(), 0
    bar: Progress | None = None
    shown = shown and sys.stderr.isatty()

    def tick() -> None:
        nonlocal bar, done, shown
        done += 1
        if not shown or perf_counter() - start < _PATIENCE:
            return
        if bar is None:
            bar = _new_bar(total)
            shown = bar is not None
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, refresh=True)

    try:
        yield tick
    finally:
        if bar is not None:
            bar.stop()


def _new_bar(total: int) -> Progress | None:
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress  # noqa: PLC0415
    except ImportError:
        return None
    bar = Progress(console=Console(stderr=True), auto_refresh=False, transient=True)
    bar.add_task("profile", total=total)
    bar.start()
    return bar
