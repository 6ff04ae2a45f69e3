"""Measure on one GPU, in about five minutes: the parts of a Llama 8B layer in bf16.

For each part and each way to run it: peak memory, time and tokens per second at one
length, and the longest sequence that fits. Shapes without weights: they are random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.llama import Attention, GatedMLP, Layer
from chunkcheck import chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory

Way: TypeAlias = Callable[[Layer, Tensor, int], Tensor]


def _plain(layer: Layer, x: Tensor, _: int) -> Tensor:
    return layer.rows(*layer.arguments(x))


def _checkpointed(layer: Layer, x: Tensor, _: int) -> Tensor:
    y: Tensor = checkpoint(layer.rows, *layer.arguments(x), use_reentrant=False)
    return y


def _loop(layer: Layer, x: Tensor, chunk_size: int) -> Tensor:
    arguments = layer.arguments(x)
    # A tensor that passes whole stands in every chunk.
    chunks = zip(
        *(
            [a] * -(-x.shape[1] // chunk_size) if d is None else a.split(chunk_size, d)
            for a, d in zip(arguments, layer.dims, strict=True)
        ),
        strict=True,
    )
    parts = [checkpoint(layer.rows, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(parts, 1)


def _ours(layer: Layer, x: Tensor, chunk_size: int) -> Tensor:
    y: Tensor = chunk_and_checkpoint(
        layer.rows,
        *layer.arguments(x),
        chunk_size=chunk_size,
        batch_dim=layer.dims,
        out_dim=1,
    )
    return y


WAYS: dict[str, Way] = {
    "plain": _plain,
    "checkpoint": _checkpointed,
    "loop of checkpoint": _loop,
    "chunkcheck": _ours,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and within which bounds."""

    width: int = 4096
    hidden: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    length: int = 32_768  # at which time and memory are compared
    chunk_size: int = 2048
    start: int = 65_536  # of the search for the longest sequence
    most: int = 2**23
    seconds: float = 30  # for each search, of which there are eight
    rounds: int = 5


TINY = Sizes(64, 128, 4, 2, length=64, chunk_size=16, start=64, most=256, rounds=2)


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of one way to run one layer; None where it did not run."""

    layer: str
    way: str
    peak_bytes: int | None
    seconds: float | None
    tokens_per_second: float | None
    longest: int | None
    ended_by: str  # what kept the search from a longer one
    error: str | None


class Bench:
    """Runs the ways on one device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes

    def measure(self, say: Callable[[str], object]) -> Iterator[Row]:
        """Yield what was found, one layer after the other."""
        sizes = self.sizes
        makers: list[Callable[[], Layer]] = [
            lambda: GatedMLP(sizes.width, sizes.hidden),
            lambda: Attention(sizes.width, sizes.heads, sizes.kv_heads),
        ]
        for make in makers:
            yield from self.rows(make().to(self.device, torch.bfloat16), say)

    def rows(self, layer: Layer, say: Callable[[str], object]) -> list[Row]:
        """Return what was found of all ways to run a layer."""
        sizes = self.sizes
        steps = {name: partial(self.step, layer, way) for name, way in WAYS.items()}
        peaks: dict[str, int] = {}
        errors: dict[str, str] = {}
        for name, step in steps.items():
            say(f"{layer.name}: memory, {name}")
            try:
                step(sizes.length)
                layer.zero_grad()  # so that the gradients count
                trace = measure_memory(step, sizes.length, device=self.device)
                peaks[name] = trace.peak_bytes
            except (RuntimeError, NotImplementedError) as error:
                errors[name] = str(error).partition("\n")[0]
            self.empty_cache()
        seconds: dict[str, list[float]] = {name: [] for name in peaks}
        for _ in range(sizes.rounds):  # by turns, as they share the device's clock
            for name in peaks:
                seconds[name].append(self.time(partial(steps[name], sizes.length)))
        found = []
        for name, step in steps.items():
            say(f"{layer.name}: the longest that fits, {name}")
            fits, ended_by = self.longest(step)
            time = median(seconds[name]) if name in seconds else None
            found.append(
                Row(
                    layer=layer.name,
                    way=name,
                    peak_bytes=peaks.get(name),
                    seconds=time,
                    tokens_per_second=time and sizes.length / time,
                    longest=fits,
                    ended_by=ended_by,
                    error=errors.get(name),
                )
            )
        return found

    def step(self, layer: Layer, way: Way, length: int) -> None:
        """Do forward and backward on a sequence of one length."""
        layer.zero_grad()
        shape = (1, length, self.sizes.width)
        x = torch.randn(
            shape, dtype=torch.bfloat16, device=self.device, requires_grad=True
        )
        y = way(layer, x, self.sizes.chunk_size)
        torch.autograd.backward(y, torch.ones_like(y))

    def longest(self, step: Callable[[int], None]) -> tuple[int | None, str]:
        """Double the length until it does not fit, or takes too long to go on."""
        fits, length = None, self.sizes.start
        start = perf_counter()
        while length <= self.sizes.most:
            before = perf_counter()
            try:
                self.time(partial(step, length))
            except torch.cuda.OutOfMemoryError:
                return fits, "memory"
            except RuntimeError as error:
                return fits, str(error).partition("\n")[0]
            finally:
                self.empty_cache()
            fits, length = length, 2 * length
            # Attention on twice the length takes four times as long.
            now = perf_counter()
            if now - start + 4 * (now - before) > self.sizes.seconds:
                return fits, "time"
        return fits, "the bound"

    def time(self, call: Callable[[], None]) -> float:
        """Return the seconds of a call, until the device has done its work."""
        self.synchronize()
        start = perf_counter()
        call()
        self.synchronize()
        return perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give back what the allocator keeps, so that the next way starts alike."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def tabulate(rows: list[Row], title: str) -> Table:
    """Put the rows into a table."""
    table = Table(title=title)
    for name in ("layer", "way", "peak bytes", "ms", "tokens/s", "longest", "ended by"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.layer,
            row.way,
            row.error if row.peak_bytes is None else f"{row.peak_bytes:,}",
            "" if row.seconds is None else f"{1000 * row.seconds:.1f}",
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "none" if row.longest is None else f"{row.longest:,}",
            row.ended_by,
        )
    return table


def main() -> None:
    """Measure, show the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="see that it runs")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/gpu.json")
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    sizes = TINY if options.tiny else Sizes()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler chatters
    torch.manual_seed(0)
    bench, console = Bench(device, sizes), Console()
    with console.status("starting") as status:
        found = list(bench.measure(status.update))
    title = (
        f"{name}, torch {torch.__version__}: bf16, {sizes.length:,} tokens,"
        f" chunks of {sizes.chunk_size:,}"
    )
    console.print(tabulate(found, title))
    content = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "sizes": asdict(sizes),
        "rows": [asdict(row) for row in found],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=2) + "\n")
    console.print(f"Written: {options.output}")


if __name__ == "__main__":
    main()
