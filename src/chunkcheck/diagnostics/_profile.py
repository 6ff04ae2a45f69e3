"""Owns which candidates a profile compares, and that it leaves no trace.

Knows calls and how they are cut. Knows nothing of how memory and time are measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunkcheck._api import chunked, planned
from chunkcheck._arguments import Call
from chunkcheck._plan import checked_size
from chunkcheck._strategies import Strategy, StrategyName, resolve_strategy
from chunkcheck._torch.free import free_memory
from chunkcheck._torch.reach import reach
from chunkcheck._torch.untouched import untouched
from chunkcheck._typing import BatchDim, OutDim
from chunkcheck.diagnostics._result import Profile
from chunkcheck.diagnostics._trials import Outside, Trial, run_all, size_of

Baseline: TypeAlias = Literal["plain", "checkpoint"]

_MOST_SIZES = 8
_MOST_CHUNKS = 256  # by default: with more, single runs could take minutes


def profile(
    f: Callable[..., object],
    /,
    *args: object,
    chunk_sizes: Iterable[int | None] | None = None,
    strategies: Sequence[Strategy | StrategyName] = ("auto",),
    batch_dim: BatchDim = 0,
    out_dim: OutDim = "auto",
    kwargs: Mapping[str, object] | None = None,
    rounds: int = 5,
    baselines: Sequence[Baseline] = ("plain", "checkpoint"),
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Profile:
    """Measure memory and time of `f(*args)` in chunks of several sizes.

    Forward and backward are run: plain, under torch's checkpoint of the whole batch,
    and for each strategy and chunk size. The peak of memory is that of
    `measure_memory`, of one run; the times are taken by turns, as ratios to plain
    within each round. What runs out of memory becomes a row without figures. The
    gradients of the results are ones, made before, and gradients are asked for by
    `torch.autograd.grad`, so that no hook runs that waits for them to accumulate
    (unless `f` or the strategy uses reentrant checkpoints, which cannot be asked).

    Parameters, gradients, buffers, `train()` flags and random states are afterwards
    what they were before, also after an error.

    Args:
        f: The function, as in `chunk_and_checkpoint`.
        *args: Its positional arguments, as there. A graph behind them is not run.
        chunk_sizes: The rows per chunk to try; a size of the batch or more, or None, is
            one chunk. By default up to eight powers of two below the batch, of at most
            256 chunks.
        strategies: The strategies to try, as instances or names.
        batch_dim: As in `chunk_and_checkpoint`.
        out_dim: As there.
        kwargs: Keyword arguments of `f`, as in `chunked`.
        rounds: How often to time each candidate, after two runs that are not timed.
        baselines: Which runs of the whole batch to compare with. Leave out what would
            run out of memory on a CPU whose system ends such a process.
        device: The device to measure. By default the accelerator that holds arguments
            or parameters, or else the CPU.
        progress: Whether to show a bar on runs of more than two seconds, where stderr
            is a terminal and `rich` is installed (`chunkcheck[progress]`).

    Returns:
        The rows, with `knee` and `advice`. Sizes are in bytes, times in seconds.

    Raises:
        TypeError: An argument is of the wrong kind; raised before `f` has run.
        ValueError: `chunk_sizes` is empty or not positive, there is no strategy of that
            name, `rounds` is not positive, the batch is empty, or as in
            `chunk_and_checkpoint`.
        RuntimeError: torch's profiler, or another measurement, is running.
        NotImplementedError: torch has no peak memory counters for the device.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import profile
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
        ... )
        >>> x = torch.randn(1000, 8, requires_grad=True)
        >>> found = profile(mlp, x, chunk_sizes=[100, 10], rounds=1)
        >>> print(*found.rows, sep="; ")
        plain; checkpoint; auto, chunk_size=100; auto, chunk_size=10
        >>> plain, whole, *in_chunks = [row.peak_bytes for row in found.rows]
        >>> max(in_chunks) < plain / 4
        True
        >>> mlp[0].weight.grad is None, x.grad is None
        (True, True)

    """
    keywords = {} if kwargs is None else kwargs
    if not isinstance(keywords, Mapping):
        raise TypeError(
            "kwargs must be a mapping of the keyword arguments of f, found"
            f" {keywords!r} of type {type(keywords).__name__}"
        )
    _check_rounds(rounds)
    _check_baselines(baselines)
    chosen = _resolved(strategies)
    sizes = None if chunk_sizes is None else _checked_sizes(chunk_sizes)
    call, leaves, plan = planned(f, args, keywords, None, batch_dim, out_dim)
    if not plan.rows:
        raise ValueError("the batch is empty: there is nothing to profile")
    leaves = [_apart(leaf) for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    trials = _whole(call, leaves, baselines)
    for name, strategy in chosen:
        for size in _sizes_of(sizes, plan.rows):
            in_chunks = chunked(
                f,
                chunk_size=size,
                batch_dim=batch_dim,
                out_dim=out_dim,
                strategy=strategy,
            )
            invoke = Call(in_chunks, call.args, call.kwargs).invoke
            chunks, run = -(-plan.rows // size), functools.partial(invoke, leaves)
            trials.append(Trial(name, size, chunks, run))
    with untouched(f, args, keywords) as known:
        where = _device([*known, *tensors], device)
        free = _free(where)
        borders = [t for t in reach(f, *leaves).tensors if t.grad_fn is not None]
        run_all(trials, Outside(known, borders), where, rounds, progress=progress)
    ran = [trial for trial in trials if not trial.note]
    reference = ran[0] if ran else None
    return Profile(
        rows=tuple(trial.row(reference) for trial in trials),
        rows_of_batch=plan.rows,
        rounds=rounds,
        backward=any(trial.targets for trial in ran) or not ran,
        given_bytes=sum(map(size_of, [*tensors, *(reference or trials[0]).cotangents])),
        floor_bytes=reference.floor_bytes if reference else 0,
        free_bytes=free,
        threads=torch.get_num_threads(),
        device=str(where),
        torch_version=torch.__version__,
    )


def _apart(leaf: object) -> object:
    """Return an argument without the graph behind it, which is not ours to run."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _whole(
    call: Call, leaves: Sequence[object], baselines: Sequence[Baseline]
) -> list[Trial]:
    def checkpointed() -> object:
        # Leaf by leaf, since torch looks for devices in them.
        return checkpoint(lambda *own: call.invoke(own), *leaves, use_reentrant=False)

    runs: dict[str, Callable[[], object]] = {
        "plain": functools.partial(call.invoke, leaves),
        "checkpoint": checkpointed,
    }
    return [
        Trial(name, None, 1, run) for name, run in runs.items() if name in baselines
    ]


def _device(
    tensors: Iterable[Tensor], asked: torch.device | str | None
) -> torch.device:
    if asked is not None:
        return torch.device(asked)
    found = {str(t.device): t.device for t in tensors if t.device.type != "cpu"}
    if len(found) > 1:
        raise ValueError(
            f"f uses {' and '.join(sorted(found))}: say which device to measure, as in"
            f" device={min(found)!r}"
        )
    return next(iter(found.values()), torch.device("cpu"))


def _free(device: torch.device) -> int | None:
    try:
        return free_memory(device)
    except RuntimeError:  # it cannot be known here
        return None


def _sizes_of(asked: Sequence[int | None] | None, rows: int) -> list[int]:
    """Return the chunk sizes to try, the largest first."""
    if asked is not None:
        sizes = {rows if size is None else min(size, rows) for size in asked}
        return sorted(sizes, reverse=True)
    powers = [2**power for power in range(rows.bit_length()) if 2**power < rows]
    powers = [size for size in powers if rows <= size * _MOST_CHUNKS] or [rows]
    last, most = len(powers) - 1, min(len(powers), _MOST_SIZES)
    spread = {round(index * last / max(1, most - 1)) for index in range(most)}
    return sorted((powers[index] for index in spread), reverse=True)


def _checked_sizes(chunk_sizes: object) -> list[int | None]:
    if isinstance(chunk_sizes, str) or not isinstance(chunk_sizes, Iterable):
        raise TypeError(
            f"chunk_sizes must be several sizes, such as [64, 256], found"
            f" {chunk_sizes!r} of type {type(chunk_sizes).__name__}"
        )
    found: list[int | None] = []
    for index, size in enumerate(chunk_sizes):
        try:
            found.append(checked_size(size))
        except (TypeError, ValueError) as error:
            message = str(error).replace("chunk_size", f"chunk_sizes[{index}]", 1)
            raise type(error)(message) from None
    if not found:
        raise ValueError("chunk_sizes is empty: give a size, or leave it out")
    return found


def _resolved(strategies: object) -> list[tuple[str, Strategy]]:
    if isinstance(strategies, str) or not isinstance(strategies, Iterable):
        raise TypeError(
            "strategies must be several of them, such as ('auto', 'non_reentrant'),"
            f" found {strategies!r} of type {type(strategies).__name__}"
        )
    found: list[tuple[str, Strategy]] = []
    for index, strategy in enumerate(strategies):
        try:
            found.append((_name(strategy), resolve_strategy(strategy)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"strategies[{index}]: {error}") from None
    if not found:
        raise ValueError("strategies is empty: give one, or leave it out for 'auto'")
    return found


def _name(strategy: object) -> str:
    """Return a short name: of an instance, with the options that are not default."""
    if isinstance(strategy, str):
        return strategy
    if not is_dataclass(strategy) or isinstance(strategy, type):
        own = getattr(strategy, "__name__", None)
        return own if isinstance(own, str) else type(strategy).__name__
    options = ", ".join(
        f"{option.name}={value!r}"
        for option in fields(strategy)
        if (value := getattr(strategy, option.name)) != option.default
    )
    return f"{type(strategy).__name__}({options})"


def _check_rounds(rounds: object) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(
            f"rounds must be a positive int, found {rounds!r} of type"
            f" {type(rounds).__name__}"
        )
    if rounds < 1:
        raise ValueError(f"rounds must be a positive int, found {rounds}")


def _check_baselines(baselines: object) -> None:
    if isinstance(baselines, str) or not isinstance(baselines, Sequence):
        raise TypeError(
            f"baselines must be several of 'plain' and 'checkpoint', found"
            f" {baselines!r} of type {type(baselines).__name__}"
        )
    for index, name in enumerate(baselines):
        if name not in ("plain", "checkpoint"):
            raise ValueError(
                f"baselines[{index}] must be 'plain' or 'checkpoint', found {name!r}"
            )
