"""Owns the peak meter: the memory that one call holds. Knows nothing of chunks.

The CPU has no counter to read, so torch's profiler records every allocation and every
free, and the meter replays them. A `TorchDispatchMode` would be simpler and wrong:
while one is on, autograd sums gradients out of place, which takes memory that the call
by itself does not. On an accelerator the device's own counters decide.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    TypeVarTuple,
    cast,
)

import torch
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Ts = TypeVarTuple("Ts")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of one labelled part of a measured step; see `phase`.

    Attributes:
        start: Seconds from the start of the step to the start of the phase.
        stop: Seconds from the start of the step to the end of the phase.
        peak_bytes: The most bytes held at any moment of the phase, counted from the
            start of the step as in `MemoryTrace`.
        held_bytes: The bytes held when the phase ended.
    """

    start: float
    stop: float
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTrace(Generic[R_co]):
    """What `measure_memory` saw.

    Attributes:
        result: What the step returned. The trace keeps it, and its memory, alive.
        device: The device that was measured.
        peak_bytes: The most bytes held at any moment, above what was allocated when the
            step started.
        held_bytes: The bytes still held when the step had returned, those of `result`
            included.
        timeline: `(seconds, bytes held)` after every allocation and free, from the
            step's start to its end. The seconds include the cost of measuring. Where an
            accelerator's allocator does not report to torch's profiler, only what its
            counters said where phases start and end.
        phases: The phases by name, in the order in which they were first entered.
    """

    result: R_co = field(repr=False)
    device: torch.device
    peak_bytes: int
    held_bytes: int
    timeline: tuple[tuple[float, int], ...] = field(repr=False)
    phases: Mapping[str, PhaseMemory]


def measure_memory(
    step: Callable[[*Ts], R], /, *args: *Ts, device: torch.device | str | None = None
) -> MemoryTrace[R]:
    """Run `step(*args)` once and say how much memory it held, to the byte.

    On the CPU a tensor's memory counts if it is allocated during the step, from then
    until it is freed; what was allocated before does not count, even if the step frees
    it. Not seen: the scratch memory that a kernel takes behind the back of torch's
    allocator, and what is allocated in a thread that the step itself starts. (Torch's
    own threads, those of backward among them, are seen.)

    On an accelerator the device's own counters are read, in the units of its allocator
    (512 bytes on CUDA); there, memory from before that the step frees makes room for
    what it allocates.

    The first call of an operation may allocate what later calls reuse: run the step
    once before measuring it. How long the step takes under the meter means nothing.

    Args:
        step: The callable to measure, such as a training step. It may label its parts
            with `phase`.
        args: Its positional arguments.
        device: The device whose memory is measured. By default that of the tensors
            among `args`, or the CPU if there are none.

    Returns:
        The trace, with what `step` returned.

    Raises:
        RuntimeError: If another measurement, or torch's profiler, is running.
        ValueError: If `device` is not given and more than one device is used.
        NotImplementedError: If torch has no peak memory counters for the device.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import measure_memory, phase
        >>> def step(x):
        ...     with phase("forward"):
        ...         loss = x.sin().sum()
        ...     with phase("backward"):
        ...         loss.backward()
        >>> x = torch.zeros(1000, requires_grad=True)  # 4,000 bytes
        >>> trace = measure_memory(step, x)
        >>> trace.phases["forward"].peak_bytes  # x.sin() and the loss
        4004
        >>> trace.phases["forward"].held_bytes  # backward needs x alone
        4
        >>> trace.held_bytes  # x.grad
        4000
    """
    where, counters = _chosen(device, args)
    if not _measuring.acquire(blocking=False):
        msg = (
            "measure_memory is already running. Measurements cannot be nested: measure "
            "once, and label the parts of the step with `phase`."
        )
        raise RuntimeError(msg)
    try:
        gc.collect()  # neither old garbage nor a collection due now is the step's
        _gauge.start(counters, where)
        result, events, windows = _record(lambda: _between_readings(step, *args))
        readings = _gauge.readings
    finally:
        _gauge.stop()
        _measuring.release()

    others = {event.device for event in events if event.device.type != "cpu"}
    if device is None and where.type == "cpu" and others:
        raise ValueError(_which_device(others))
    (whole,) = (window for window in windows if window.name == _STEP)
    replayed = _replay((event for event in events if event.device == where), whole)
    points = replayed if counters is None else _timed(readings, windows)
    shown = replayed if len(replayed) > 2 else points
    return MemoryTrace(
        result=result,
        device=where,
        peak_bytes=max(point.held for point in points),
        held_bytes=points[-1].held,
        timeline=tuple(((time - whole.start) / 1e9, held) for time, held in shown),
        phases=MappingProxyType(_phases(points, windows, whole)),
    )


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Label a part of a step: `measure_memory` then says what that part held as well.

    Outside a measurement, and outside its thread, it does nothing, so it may stay in
    the code. Phases may be nested. A name that is entered several times, say for each
    micro-batch, is one phase: its peak is the highest, and it held what it held the
    last time.

    Args:
        name: The key in `MemoryTrace.phases`.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import measure_memory, phase
        >>> def step():
        ...     with phase("setup"):
        ...         return torch.zeros(10)
        >>> measure_memory(step).phases["setup"].held_bytes
        40
    """
    if _gauge.thread != threading.get_ident():
        yield
        return
    with record_function(_PHASE + name):
        _gauge.read()
        try:
            yield
        finally:
            _gauge.read()


class _Counters(Protocol):
    """The memory counters that `torch.cuda`, `torch.xpu` and their like share."""

    def current_device(self) -> int: ...
    def synchronize(self, device: torch.device, /) -> None: ...
    def memory_allocated(self, device: torch.device, /) -> int: ...
    def max_memory_allocated(self, device: torch.device, /) -> int: ...
    def reset_peak_memory_stats(self, device: torch.device, /) -> None: ...


class _Event(NamedTuple):
    time: int  # nanoseconds, by the profiler's clock
    address: int
    size: int  # bytes; negative if freed
    device: torch.device


class _Window(NamedTuple):
    name: str
    start: int  # nanoseconds, by the profiler's clock
    stop: int


class _Point(NamedTuple):
    time: int  # nanoseconds, by the profiler's clock
    held: int  # bytes, above what was allocated at the start


class _Reading(NamedTuple):
    peak: int  # bytes, the most since the last reading
    held: int  # bytes, now


class _Gauge:
    """Reads an accelerator's counters where the step and its phases start and end.

    On the CPU there are none, and it reads nothing.
    """

    def __init__(self) -> None:
        self.thread: int | None = None  # the one that is being measured
        self._counters: _Counters | None = None
        self._device = torch.device("cpu")
        self._base = 0
        self.readings: list[_Reading] = []

    def start(self, counters: _Counters | None, device: torch.device) -> None:
        self.thread = threading.get_ident()
        self._counters, self._device, self.readings = counters, device, []
        if counters is not None:
            counters.synchronize(device)
            counters.reset_peak_memory_stats(device)
            self._base = counters.memory_allocated(device)

    def read(self) -> None:
        if self._counters is not None:
            self._counters.synchronize(self._device)
            peak = self._counters.max_memory_allocated(self._device) - self._base
            held = self._counters.memory_allocated(self._device) - self._base
            self.readings.append(_Reading(peak, held))
            self._counters.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        self.thread, self._counters, self.readings = None, None, []


_PREFIX = "chunkcheck.diagnostics: "
_STEP = _PREFIX + "step"
_PHASE = _PREFIX + "phase "
_measuring = threading.Lock()  # the counters and the profiler belong to the process
_gauge = _Gauge()


def _chosen(
    device: torch.device | str | None, args: Iterable[object]
) -> tuple[torch.device, _Counters | None]:
    """Decide what is measured, and find its counters (None: the CPU has none)."""
    if device is None:
        found = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        if len(found) > 1:
            raise ValueError(_which_device(found))
        device = found.pop() if found else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu"), None
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # such as "meta", which has no module
        module = None
    needed = [name for name in vars(_Counters) if not name.startswith("_")]
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        msg = (
            f"torch has no peak memory counters for device {str(device)!r} "
            f"({missing[0]} is missing): measure on the CPU or on CUDA."
        )
        raise NotImplementedError(msg)
    counters = cast("_Counters", module)
    if str(device) == device.type:  # no index: the profiler always names one
        device = torch.device(device.type, counters.current_device())
    return device, counters


def _which_device(devices: Iterable[torch.device]) -> str:
    names = sorted(map(str, devices))
    return (
        f"the step uses {' and '.join(names)}: say which device to measure, "
        f"as in device={names[0]!r}."
    )


def _between_readings(step: Callable[[*Ts], R], /, *args: *Ts) -> R:
    with record_function(_STEP):
        _gauge.read()
        result = step(*args)
        _gauge.read()
    return result


def _record(run: Callable[[], R]) -> tuple[R, list[_Event], list[_Window]]:
    """Run under torch's profiler; return what was allocated and freed, and the labels.

    All the private names of torch that this package needs are here: whether a profiler
    is active (a second one would end it without an error) and the event tree, which
    alone tells addresses. Checked on torch 2.4.1, 2.6.0, 2.9.1, 2.13.0 and 2.15.0.
    """
    if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001
        msg = "torch's profiler is running, and measure_memory needs it for itself."
        raise RuntimeError(msg)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    kineto = profiler.profiler and profiler.profiler.kineto_results
    assert kineto is not None  # noqa: S101  it has run
    allocation = torch._C._profiler._ExtraFields_Allocation  # noqa: SLF001
    events: list[_Event] = []
    windows: list[_Window] = []
    stack = kineto.experimental_event_tree()[::-1]
    while stack:
        node = stack.pop()
        stack.extend(reversed(node.children))
        time, block = node.start_time_ns, node.extra_fields
        if isinstance(block, allocation):
            events.append(_Event(time, block.ptr, block.alloc_size, block.device))
        elif node.name.startswith(_PREFIX):
            windows.append(_Window(node.name, time, node.end_time_ns))
    events.sort(key=lambda event: event.time)  # stable: keeps the order in each thread
    return result, events, windows


def _replay(events: Iterable[_Event], whole: _Window) -> list[_Point]:
    """Follow the blocks that are born in the window, and no others, by address."""
    points = [_Point(whole.start, 0)]
    alive: dict[int, int] = {}
    held = 0
    for event in events:
        if whole.start <= event.time <= whole.stop:
            # A new block where one is alive: the old one's free was not seen.
            held -= alive.pop(event.address, 0)
            if event.size > 0:
                alive[event.address] = event.size
                held += event.size
            points.append(_Point(event.time, held))
    points.append(_Point(whole.stop, held))
    return points


def _timed(readings: Iterable[_Reading], windows: Iterable[_Window]) -> list[_Point]:
    """Give each reading its time: one was taken at each edge of a window, in order."""
    edges = sorted(time for window in windows for time in (window.start, window.stop))
    pairs = zip(edges, readings, strict=True)
    return [_Point(time, held) for time, reading in pairs for held in reading]


def _phases(
    points: Sequence[_Point], windows: Iterable[_Window], whole: _Window
) -> dict[str, PhaseMemory]:
    phases: dict[str, PhaseMemory] = {}
    for window in sorted(windows, key=lambda window: window.start):
        if window.name == _STEP:
            continue
        before = [point.held for point in points if point.time <= window.start]
        until = [point.held for point in points if point.time <= window.stop]
        start, peak = (window.start - whole.start) / 1e9, max(until[len(before) - 1 :])
        name = window.name.removeprefix(_PHASE)
        if name in phases:
            start, peak = phases[name].start, max(phases[name].peak_bytes, peak)
        stop = (window.stop - whole.start) / 1e9
        phases[name] = PhaseMemory(start, stop, peak, held_bytes=until[-1])
    return phases
