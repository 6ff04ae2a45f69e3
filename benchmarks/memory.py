"""Memory: the peak of one step, on the yardstick of the documentation, to the byte.

X is the bytes of the input, which is made within the step and so counts; weights are
made before and do not. The gradient of the result is made within the step as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from benchmarks.contenders import Function
from benchmarks.engine import keeps_own_graphs
from benchmarks.figures import Curves, Figure, Part, Setting
from benchmarks.models import history, mlp
from chunkcheck.diagnostics import MemoryTrace, measure_memory, phase

WIDTH, HIDDEN = 64, 1024


def trace(
    forward: Function, width: int, rows: int, parameters: Iterable[torch.Tensor] = ()
) -> MemoryTrace[None]:
    """Measure one step; the second, since the first may allocate what is kept."""

    def step() -> None:
        x = torch.randn(rows, width, requires_grad=True)
        with phase("forward"):
            y = forward(x)
        with phase("backward"):
            torch.autograd.backward(y, torch.ones_like(y))

    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    step()
    for parameter in parameters:
        parameter.grad = None
    return measure_memory(step)


def measure(setting: Setting) -> Part:
    """Return the peaks at 32 and 256 chunks, and the curves over all chunk counts."""
    rows, few, many, counts = 4096, 32, 256, [1, 4, 16, 32, 64, 256, 1024, 4096]
    if setting.quick:
        rows, few, many, counts = 512, 8, 32, [8, 32]
    model = mlp(WIDTH, HIDDEN)
    peaks, forwards = _curves(setting, model, rows, counts)
    ours = setting.contenders["ours"]

    def beside(count: int) -> str:
        at = counts.index(count)
        others = (label for label in peaks if label != ours.label)
        return ", ".join(f"{label} {peaks[label][at]:.2f} X" for label in others)

    first, second = (peaks[ours.label][counts.index(count)] for count in (few, many))
    forward = forwards[ours.label][counts.index(many)]
    figures = [
        Figure("few", f"{few} chunks", first, "X", 6.3, note=beside(few)),
        Figure("many", f"{many} chunks", second, "X", 5.13, 4.95, note=beside(many)),
        Figure(
            "forward",
            f"{many} chunks, forward",
            forward,
            "X",
            2.2,
            note="the input, the result and one chunk",
        ),
        *_closure(setting, model, rows, many, second),
        *_with_history(setting, rows, few, 6.3),
        *_with_history(setting, rows, many, 5.13),
        *_wide(setting, rows, many),
    ]
    title = f"Peak memory, MLP 64 -> 1024 -> 64 on {rows:,} rows"
    across = "chunks", "peak of forward and backward, X = bytes of the input"
    curves = [Curves("memory", title, *across, counts, peaks)]
    details = {"forward peaks over the chunk counts, in X": forwards}
    title = "Peak memory of forward and backward"
    return Part("memory", title, figures, curves, details)


def _curves(
    setting: Setting, model: nn.Module, rows: int, counts: list[int]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The peak, and the forward's, of all contenders over the number of chunks."""
    size = rows * WIDTH * 4
    peaks: dict[str, list[float]] = {}
    forwards: dict[str, list[float]] = {}
    for way in setting.contenders.values():
        peaks[way.label], forwards[way.label] = [], []
        found: MemoryTrace[None] | None = None
        for count in counts:
            if way.chunked or found is None:
                setting.say(f"memory: {way.label}, {count:,} chunks")
                forward = way.on(model, rows // count)
                found = trace(forward, WIDTH, rows, model.parameters())
            peaks[way.label].append(found.peak_bytes / size)
            forwards[way.label].append(found.phases["forward"].peak_bytes / size)
    return peaks, forwards


def _closure(
    setting: Setting, model: nn.Module, rows: int, chunks: int, direct: float
) -> Iterable[Figure]:
    """The same module, which the engine must find in a closure."""
    setting.say("memory: a closure around the module")

    def f(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y

    forward = setting.contenders["ours"].on(f, rows // chunks)
    found = trace(forward, WIDTH, rows, model.parameters())
    peak = found.peak_bytes / (rows * WIDTH * 4)
    yield Figure(
        "closure",
        f"{chunks} chunks through a closure, relative to the module itself",
        peak / direct,
        "ratio",
        limit=1.05,
        note=f"{peak:.2f} X and {direct:.2f} X",
    )


def _with_history(
    setting: Setting, rows: int, chunks: int, limit: float
) -> Iterable[Figure]:
    """A function that captures a tensor which was computed from others."""
    setting.say(f"memory: a capture with a history, {chunks} chunks")
    run = history(setting.contenders["ours"], WIDTH, HIDDEN, rows // chunks)
    own = keeps_own_graphs(lambda: run(torch.zeros(rows, WIDTH)))
    peak = trace(run, WIDTH, rows).peak_bytes / (rows * WIDTH * 4)
    yield Figure(
        f"history_{chunks}",
        f"{chunks} chunks, f captures a tensor with a history",
        peak,
        "X",
        limit,
        note="each chunk keeps its own graph" if own else "one node for all chunks",
    )


def _wide(setting: Setting, rows: int, chunks: int) -> Iterable[Figure]:
    """A wide input and a narrow result: only the input and its gradient are large."""
    ours, width, result = setting.contenders["ours"], 512, 8
    size = rows * width * 4
    model = nn.Sequential(nn.Linear(width, result), nn.GELU())
    setting.say("memory: a wide input")
    found = trace(ours.on(model, rows // chunks), width, rows, model.parameters())
    yield Figure(
        "wide",
        f"{chunks} chunks of 512 -> 8",
        found.peak_bytes / size,
        "X",
        limit=2.2,
        note="the input and its gradient alone take 2 X",
    )
