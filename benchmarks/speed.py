"""Time: what a step takes, relative to the alternatives."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.contenders import Contender
from benchmarks.figures import Curves, Figure, Part, Setting
from benchmarks.models import mlp
from benchmarks.timing import Step, Times, interleaved

COUNTS = [1, 4, 16, 64, 256, 1024, 4096]


def measure(setting: Setting) -> Part:
    """Return the ratios that have a limit, and time over the number of chunks."""
    small, per_chunk = _many_small_chunks(setting)
    large, per_row = _large_chunks(setting)
    curves, over_counts = _curves(setting)
    return Part(
        "speed",
        "Time of forward and backward",
        [*small, *large],
        [curves],
        {
            "seconds per round, many small chunks": per_chunk.seconds,
            "seconds per round, large chunks": per_row.seconds,
            "median seconds over the chunk counts": over_counts,
        },
    )


def _many_small_chunks(setting: Setting) -> tuple[Iterable[Figure], Times]:
    """1,024 chunks of 32 rows: what a chunk costs of its own."""
    size, width = 32, 64
    count = 64 if setting.quick else 1024
    rows = count * size
    model = mlp(width, 256)
    ways = setting.contenders
    x = torch.randn(rows, width, requires_grad=True)
    gradient = torch.randn(rows, width)
    weights = tuple(model.parameters())
    steps = {
        key: Step(ways[key].on(model, size), x, gradient, weights)
        for key in ("ours", "loop", "bare", "release", "liger", "deepspeed")
        if key in ways
    }
    steps["forward"] = Step(ways["bare"].on(model, size), x, None)
    twice_x = torch.randn(2 * rows, width, requires_grad=True)
    twice_gradient = torch.randn(2 * rows, width)
    steps["twice"] = Step(
        ways["ours"].on(model, size), twice_x, twice_gradient, weights
    )
    setting.say(f"time: {count:,} chunks of {size} rows")
    rounds = 3 if setting.quick else 7
    times = interleaved(steps, rounds=rounds, budget=40)
    floor = times.ratio(["bare", "forward"], "loop")
    chunks = f"{count:,} chunks of {size} rows"
    ours = f"{1e6 * times.median('ours') / count:.0f} µs a chunk"
    return [
        Figure(
            "loop",
            f"{chunks}, relative to the loop of checkpoint",
            times.ratio("ours", "loop"),
            "ratio",
            limit=0.62,
            aim=0.5,
            note=f"bare loop and one more forward: {floor:.2f}; {ours}",
        ),
        Figure(
            "release",
            f"{rows:,} rows, relative to 0.1.1",
            times.ratio("ours", "release") if "release" in ways else None,
            "ratio",
            limit=0.25,
            note=f"chunks of {size} rows",
        ),
        Figure(
            "twice",
            f"{2 * rows:,} rows, relative to {rows:,}",
            times.ratio("twice", "ours"),
            "ratio",
            limit=2.2,
            note=f"chunks of {size} rows: time is linear in their number",
        ),
        *(
            Figure(
                key,
                f"{chunks}, relative to {ways[key].label}",
                times.ratio("ours", key),
                "ratio",
            )
            for key in ("liger", "deepspeed")
            if key in ways
        ),
    ], times


def _large_chunks(setting: Setting) -> tuple[Iterable[Figure], Times]:
    """256 chunks of 256 rows, which fit the cache, where the whole batch does not."""
    size, width = 256, 64
    count = 4 if setting.quick else 256
    rows = count * size
    model = mlp(width, 1024)
    ways = setting.contenders
    x = torch.randn(rows, width, requires_grad=True)
    gradient = torch.randn(rows, width)
    weights = tuple(model.parameters())
    steps = {
        key: Step(ways[key].on(model, size), x, gradient, weights)
        for key in ("ours", "checkpoint", "plain")
    }
    setting.say(f"time: {count:,} chunks of {size} rows")
    times = interleaved(steps, rounds=3 if setting.quick else 7, budget=25)
    plain = times.ratio("ours", "plain")
    return [
        Figure(
            "checkpoint",
            f"{count:,} chunks of {size} rows, relative to checkpoint of the whole",
            times.ratio("ours", "checkpoint"),
            "ratio",
            limit=0.95,
            note=f"relative to plain f: {plain:.2f}",
        )
    ], times


def _curves(setting: Setting) -> tuple[Curves, dict[str, list[float]]]:
    """Time over the number of chunks, for the yardstick of the memory."""
    rows, width = (256, 64) if setting.quick else (4096, 64)
    counts = [1, 4, 16] if setting.quick else COUNTS
    model = mlp(width, 1024)
    x = torch.randn(rows, width, requires_grad=True)
    gradient = torch.randn(rows, width)
    weights = tuple(model.parameters())
    ways = list(setting.contenders.values())
    ratios: dict[str, list[float | None]] = {way.label: [] for way in ways}
    medians: dict[str, list[float]] = {way.label: [] for way in ways}

    def step(way: Contender, count: int) -> Step:
        return Step(way.on(model, rows // count), x, gradient, weights)

    for count in counts:
        setting.say(f"time: all, {count:,} chunks")
        steps = {way.key: step(way, count) for way in ways}
        times = interleaved(steps, rounds=2 if setting.quick else 5, budget=10, least=2)
        for way in ways:
            ratios[way.label].append(times.ratio(way.key, "plain"))
            medians[way.label].append(times.median(way.key))
    return Curves(
        "time",
        f"Time of forward and backward, MLP 64 -> 1024 -> 64 on {rows:,} rows",
        "chunks",
        "time, relative to plain f",
        counts,
        ratios,
    ), medians
