"""Host memory that a call holds from forward to backward: nodes, records, handles.

No counter of torch's sees it. Each way runs in a fresh process, where the resident
memory grows by what the forward leaves; the tensors are a few kilobytes.
"""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import psutil
import torch
from torch import Tensor

from benchmarks.contenders import LOOP, OURS, Function
from benchmarks.engine import keeps_own_graphs
from benchmarks.figures import Figure, Part, Setting
from benchmarks.models import elementwise

WIDTH, OPERATIONS = 4, 100


def measure(setting: Setting) -> Part:
    """Return the bytes that are held for all chunks, and for each."""
    chunks = 200 if setting.quick else 2000
    work = f"{chunks:,} chunks of {OPERATIONS} operations"
    figures = []
    setting.say("host memory, each way in a process of its own")
    spawn = get_context("spawn")
    each = None if setting.quick else 1  # ways in a process
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=each) as pool:
        found = list(pool.map(held_bytes, WAYS, repeat(chunks)))
    for (key, (label, _)), held in zip(WAYS.items(), found, strict=True):
        note = f"{held / chunks:,.0f} a chunk"
        figures.append(Figure(key, f"{work}, {label}", held, "bytes", note=note))
    title = "Host memory held between forward and backward"
    return Part("host", title, figures)


def held_bytes(key: str, chunks: int) -> int:
    """Return by how much the forward of one way lets this process grow."""
    torch.set_num_threads(1)
    _, way = WAYS[key]
    x = torch.randn(chunks, WIDTH, requires_grad=True)
    few = torch.randn(4, WIDTH, requires_grad=True)
    if keeps_own_graphs(lambda: way(few)) != (key == "own_graph"):
        raise RuntimeError(f"the engine did not take the way {key!r}")
    way(few).sum().backward()
    gc.collect()
    before = _resident()
    y = way(x)
    gc.collect()
    held = _resident() - before
    del y
    return max(held, 0)


def _resident() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def _one_node(x: Tensor) -> Tensor:
    return OURS.run(_f, x, 1)


def _own_graph(x: Tensor) -> Tensor:
    shift = torch.zeros((), requires_grad=True).clone()  # has a history
    return OURS.run(lambda rows: _f(rows) + shift, x, 1)


def _loop(x: Tensor) -> Tensor:
    return LOOP.run(_f, x, 1)


def _f(rows: Tensor) -> Tensor:
    return elementwise(rows, OPERATIONS)


WAYS: dict[str, tuple[str, Function]] = {
    "one_node": ("one node for all chunks", _one_node),
    "own_graph": ("each chunk keeps its own graph", _own_graph),
    "loop": ("loop of checkpoint", _loop),
}
