"""Measure: what a call would take at its peak, seen on a few of its rows.

Decides the chunk size of a call by a policy, once for all calls that are alike. Knows
the policies' protocol, and nothing of how they choose.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from chunkcheck._arguments import Call
from chunkcheck._plan import Plan, checked_size
from chunkcheck._sizes import ChunkSizePolicy, MemoryBudget
from chunkcheck._strategies import Strategy
from chunkcheck._torch.compat import has_values
from chunkcheck._torch.failures import is_out_of_memory
from chunkcheck._torch.free import free_memory
from chunkcheck._torch.meter import (
    MemoryTrace,
    measure_memory,
    phase,
)
from chunkcheck._torch.reach import reach
from chunkcheck._torch.run import run
from chunkcheck._torch.tensors import is_tensor
from chunkcheck._torch.untouched import old_objects_apart, untouched
from chunkcheck._tree import flatten

_log = logging.getLogger("chunkcheck")

_MOST_KNOWN = 1024
_TIMED = 64  # rows that are timed at least
_known: dict[Hashable, int] = {}  # the chunk sizes that have been decided


def decide(
    policy: ChunkSizePolicy,
    call: Call,
    leaves: Sequence[object],
    plan: Plan,
    out_dim: object,
    strategy: Strategy,
) -> int:
    """Return the rows per chunk that a policy chooses for a call."""
    probe = Probe(call, leaves, plan, out_dim, strategy)
    if not isinstance(policy, MemoryBudget):
        return _resolved(policy, probe, plan)
    key = _key(policy, call, leaves, plan, strategy)
    size = _known.get(key)
    if size is None:
        budget = MemoryBudget(policy.bytes(free_memory(probe.device)))
        with old_objects_apart():
            size = _resolved(budget, probe, plan)
        _log.info("%s chose chunks of %d rows of %d", policy, size, plan.rows)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = size
    # At each call: what one rank knows already, another may not, and would wait.
    group = policy.group
    return size if group is None else _smallest(size, group, probe.device)


def _resolved(policy: ChunkSizePolicy, probe: Probe, plan: Plan) -> int:
    return checked_size(policy.resolve(plan.rows, probe.peak)) or max(1, plan.rows)


class Probe:
    """Measures a call in chunks of some size, without a trace.

    Attributes:
        device: Where its tensors are.

    """

    def __init__(
        self,
        call: Call,
        leaves: Sequence[object],
        plan: Plan,
        out_dim: object,
        strategy: Strategy,
    ) -> None:
        self._call = call
        self._leaves = leaves
        self._plan = plan
        self._out_dim = out_dim
        self._strategy = strategy
        self._warm = False
        tensors = [leaf for leaf in leaves if is_tensor(leaf)]
        self.device = tensors[0].device
        self._has_values = has_values(tensors[0])

    def peak(self, size: int) -> float:
        """Return the bytes that forward and backward take in chunks of `size` rows.

        Infinity if they run out of memory. Two chunks and three are run, and each
        further one takes as much more as the third, in forward and in backward: its
        rows of arguments, results and their gradients.
        """
        return _infinite_if_out_of_memory(partial(self._peak, size))

    def seconds(self, size: int) -> float:
        """Return the seconds per row of forward and backward in chunks of `size` rows.

        The median of some runs of at least three chunks; infinity if memory runs out.
        """
        rows = min(self._plan.rows, max(3 * size, _TIMED))
        return _infinite_if_out_of_memory(partial(self._seconds, rows, size))

    def _peak(self, size: int) -> float:
        rows = self._plan.rows
        if rows <= 3 * size:
            return max(self._measured(rows, size))
        two, three = (self._measured(n * size, size) for n in (2, 3))
        more = rows / size - 2
        return max(a + (b - a) * more for a, b in zip(two, three, strict=True))

    def _seconds(self, rows: int, size: int) -> float:
        with untouched(self._call.f, tuple(self._leaves), {}) as captured:
            return median(self._timed(rows, size, captured)) / rows

    def _timed(
        self, rows: int, size: int, captured: Sequence[Tensor]
    ) -> Iterator[float]:
        for turn in range(4):
            start = perf_counter()
            self._run(rows, size, captured, phase)
            if self.device.type not in ("cpu", "meta"):
                torch.get_device_module(self.device).synchronize(self.device)
            if turn:  # the first one warms up
                yield perf_counter() - start

    def _measured(self, rows: int, size: int) -> list[int]:
        """Return the peaks of forward and of backward."""
        with untouched(self._call.f, tuple(self._leaves), {}) as captured:
            if not self._has_values:
                meter = _Meter()
                with meter:
                    self._run(rows, size, captured, meter.phase)
                return meter.peaks
            # What the first run of an operation allocates may stay, for others to use.
            if not self._warm:
                self._run(rows, size, captured, phase)
                self._warm = True
            step = partial(self._run, rows, size, captured, phase)
            trace: MemoryTrace[None] = measure_memory(step, device=self.device)
            return [found.peak_bytes for found in trace.phases.values()]

    def _run(
        self,
        rows: int,
        size: int,
        captured: Sequence[Tensor],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Run the first rows in chunks, forward and backward."""
        plan = replace(self._plan, rows=rows, size=size)
        leaves = [
            _part(leaf, dim, rows) if is_tensor(leaf) else leaf
            for leaf, dim in zip(self._leaves, plan.dims, strict=True)
        ]
        with phase("forward"):
            result = run(self._call, leaves, plan, self._out_dim, self._strategy)
        values, _ = flatten(result)
        ends = [v for v in values if is_tensor(v) and v.requires_grad]
        given = [t for t in leaves if is_tensor(t) and t.requires_grad]
        if ends and torch.is_grad_enabled():
            with phase("backward"):
                torch.autograd.grad(
                    ends,
                    [*given, *captured],
                    [torch.ones_like(end) for end in ends],
                    allow_unused=True,
                )


def _infinite_if_out_of_memory(measure: Callable[[], float]) -> float:
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return math.inf


def _part(tensor: Tensor, dim: int | None, rows: int) -> Tensor:
    part = tensor.detach()
    if dim is not None:
        part = part.narrow(dim, 0, rows)
    return part.requires_grad_(tensor.requires_grad)


class _Meter(TorchDispatchMode):
    """Adds up the memory of tensors that have none, such as meta and fake ones.

    Sums of gradients that torch does in place are not done so under a mode, so that the
    peak may come out a little high.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks: list[int] = []  # of each phase
        self._peak = self._held = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, _ = flatten((args, kwargs or {}))
        self._seen.update(t.untyped_storage() for t in given if is_tensor(t))
        result = func(*args, **(kwargs or {}))
        made, _ = flatten(result)
        for tensor in made:
            if is_tensor(tensor):
                self._note(tensor.untyped_storage())
        return result

    @contextmanager
    def phase(self, _name: str) -> Iterator[None]:
        """Note the peak of a part of the run."""
        self._peak = self._held
        yield
        self.peaks.append(self._peak)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            self._held += storage.nbytes()
            self._peak = max(self._peak, self._held)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count: int) -> None:
        self._held -= count


def _smallest(size: int, group: Any, device: torch.device) -> int:
    """Return the smallest of what the ranks of a group have chosen."""
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "the group of a chunk size policy needs torch.distributed to be initialized"
        )
    on_device = device if distributed.get_backend(group) == "nccl" else "cpu"
    chosen = torch.tensor(size, device=on_device)
    distributed.all_reduce(chosen, distributed.ReduceOp.MIN, group)
    return int(chosen)


def _key(
    policy: MemoryBudget,
    call: Call,
    leaves: Sequence[object],
    plan: Plan,
    strategy: Strategy,
) -> Hashable:
    """Return what calls have in common that take the same memory.

    Functions are told apart by their code, not by what they capture, since a lambda is
    made anew for each call; but what is captured has to have the same shapes.
    """
    reached = reach(call.f, *leaves)
    return (
        policy,
        strategy,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        type(call.f),
        getattr(call.f, "__code__", None),
        tuple(map(type, reached.modules)),
        tuple(map(_sort, reached.tensors)),
        tuple(_sort(leaf) if is_tensor(leaf) else _plain(leaf) for leaf in leaves),
        plan,
    )


def _sort(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _plain(value: object) -> Hashable:
    """Return a value that may decide on memory, as a number of heads does."""
    return value if isinstance(value, bool | int | float | str) else id(type(value))
