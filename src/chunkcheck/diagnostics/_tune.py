"""Owns the choice of a chunk size by memory and time, for calls that are made often.

Knows how to ask for the peak and the time of a size. Knows nothing of how they are
measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from chunkcheck._api import planned
from chunkcheck._sizes import Search, as_bytes
from chunkcheck._strategies import (
    NoCheckpoint,
    Strategy,
    StrategyName,
    resolve_strategy,
)
from chunkcheck._torch.free import free_memory
from chunkcheck._torch.measure import Probe
from chunkcheck._torch.untouched import old_objects_apart
from chunkcheck._typing import BatchDim, OutDim

_log = logging.getLogger("chunkcheck")

_TIE = 1.03  # times so close are the same: then less memory is better
_MOST_OF_FREE = 0.8  # of the free memory, where no budget is given


def tune(
    f: Callable[..., object],
    /,
    *args: object,
    memory_budget: float | str | None = None,
    max_slowdown: float | None = None,
    batch_dim: BatchDim = 0,
    out_dim: OutDim = "auto",
    strategy: Strategy | StrategyName = "auto",
    kwargs: Mapping[str, object] | None = None,
) -> int:
    """Return the rows per chunk that are fastest within a budget of memory.

    Or, with `max_slowdown`, those that take the least memory and are not slower than
    plain `f` by more than that factor. Larger and larger chunks are tried, each on a
    few of the rows, forward and backward, and none that would not fit. Parameters,
    gradients, buffers and random states stay as they are. Times are those of this
    machine as it is now: close other programs.

    Args:
        f: The function, as in `chunk_and_checkpoint`.
        *args: Its positional arguments, as there.
        memory_budget: What forward and backward may take at their peak, results and
            gradients included: bytes, a string such as "2GiB", or a float below 1 for
            that part of the memory that is free. By default four fifths of it.
        max_slowdown: The most time, relative to plain `f` on as many rows as fit. It
            may be below 1, since chunks that fit the cache can be faster.
        batch_dim: As in `chunk_and_checkpoint`.
        out_dim: As there.
        strategy: As there.
        kwargs: Keyword arguments of `f`, as in `chunked`.

    Returns:
        The chunk size.

    Raises:
        TypeError: `memory_budget` or `max_slowdown` is of the wrong kind.
        ValueError: One is not positive; not even one row fits into the budget; or no
            size that does is fast enough.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import tune
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)
        ... )
        >>> x = torch.randn(1000, 8, requires_grad=True)
        >>> 1 <= tune(mlp, x, memory_budget="1 MiB") <= 200
        True

    """
    slowdown = _checked_slowdown(max_slowdown)
    chosen = resolve_strategy(strategy)
    call, leaves, plan = planned(f, args, kwargs or {}, None, batch_dim, out_dim)
    probe = Probe(call, leaves, plan, out_dim, chosen)
    memory = _MOST_OF_FREE if memory_budget is None else memory_budget
    budget = as_bytes(memory, free_memory(probe.device))
    search = Search(plan.rows, probe.peak)
    with old_objects_apart():
        search.run(budget)
    if not (fitting := search.fitting(budget)):
        least = min(search.known.values())
        raise ValueError(
            f"not even chunks of one row fit into memory_budget={memory_budget!r}"
            f" ({budget:,} bytes): they take {least:,.0f}"
        )
    seconds = {size: probe.seconds(size) for size in sorted(fitting)}
    for size, time in seconds.items():
        _log.info(
            "chunks of %d rows: %.0f bytes, %.3g s a row",
            size,
            search.known[size],
            time,
        )
    if slowdown is None:
        fastest = min(seconds.values())
        return min(size for size, time in seconds.items() if time <= _TIE * fastest)
    plain = Probe(call, leaves, plan, out_dim, NoCheckpoint()).seconds(max(fitting))
    quick = [size for size, time in seconds.items() if time <= slowdown * plain]
    if not quick:
        best = min(seconds.values()) / plain
        raise ValueError(
            f"no chunk size within the budget is as fast as max_slowdown={slowdown}"
            f" asks for: the fastest takes {best:.2f} times as long as plain f"
        )
    return min(quick, key=lambda size: (search.known[size], -size))


def _checked_slowdown(slowdown: object) -> float | None:
    if slowdown is None:
        return None
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float):
        raise TypeError(
            "max_slowdown must be a factor, such as 1.5, or None, found"
            f" {slowdown!r} of type {type(slowdown).__name__}"
        )
    if not 0 < slowdown < math.inf:
        raise ValueError(f"max_slowdown must be positive and finite, found {slowdown}")
    return float(slowdown)
