"""`keep_chunks`: memory for time, from a recompute of all chunks to none."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.contenders import Function
from benchmarks.figures import Curves, Figure, Part, Setting
from benchmarks.memory import trace
from benchmarks.models import mlp
from benchmarks.timing import Step, interleaved
from chunkcheck import Fused, chunk_and_checkpoint

WIDTH, HIDDEN, SIZE = 64, 1024, 256


def measure(setting: Setting) -> Part:
    """Return time and memory over the number of chunks kept, beside the bare loop."""
    count = 8 if setting.quick else 256
    kept = [0, 4, 8] if setting.quick else [0, 64, 128, 192, 256]
    rows = count * SIZE
    model = mlp(WIDTH, HIDDEN)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    gradient = torch.randn(rows, WIDTH)
    weights = tuple(model.parameters())
    bare = setting.contenders["bare"]
    ways = {"bare": bare.on(model, SIZE), **{str(n): _keep(model, n) for n in kept}}

    setting.say(f"keep_chunks: time of {count:,} chunks")
    steps = {key: Step(way, x, gradient, weights) for key, way in ways.items()}
    times = interleaved(steps, rounds=3 if setting.quick else 7, budget=30)
    # By themselves: what ran before, with other memory, leaves a heap that is warm or
    # cold, which is worth up to a quarter of the time.
    pair = {key: steps[key] for key in ("bare", str(count))}
    beside = interleaved(pair, rounds=3 if setting.quick else 16, budget=30)
    peaks = {}
    for key, way in ways.items():
        setting.say(f"keep_chunks: memory, {key}")
        peaks[key] = trace(way, WIDTH, rows, weights).peak_bytes
    all_kept = str(count)
    name = f"keep_chunks={count}"
    return Part(
        "keeping",
        f"keep_chunks, {count:,} chunks of {SIZE} rows",
        [
            Figure(
                "time",
                f"{name}, time relative to the bare loop",
                beside.ratio(all_kept, "bare"),
                "ratio",
                limit=1.05,
                note=f"keep_chunks=0: {times.ratio('0', 'bare'):.2f}",
            ),
            Figure(
                "memory",
                f"{name}, peak relative to the bare loop",
                peaks[all_kept] / peaks["bare"],
                "ratio",
                note=f"keep_chunks=0: {peaks['0'] / peaks['bare']:.2f}",
            ),
        ],
        [
            Curves(
                "keeping",
                f"Memory and time, {count:,} chunks of {SIZE} rows",
                "keep_chunks",
                "relative to the bare loop",
                kept,
                {
                    "time": [times.ratio(str(n), "bare") for n in kept],
                    "peak memory": [peaks[str(n)] / peaks["bare"] for n in kept],
                },
                log=False,
                level=1.0,
            )
        ],
        {"peak bytes": peaks, "seconds per round": times.seconds},
    )


def _keep(f: Function, count: int) -> Function:
    strategy = Fused(keep_chunks=count)

    def run(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=SIZE, strategy=strategy)

    return run
