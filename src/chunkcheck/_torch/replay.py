"""Replay: what a run of `f` sees besides its tensors, so that recompute sees it again.

Owns random states, ambient modes and flags of modules. Knows nothing of chunks,
graphs or gradients.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from ctypes import string_at
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from chunkcheck._strategies import Fused
from chunkcheck._torch.buffers import Buffers, State
from chunkcheck._torch.captures import Observed, check_unchanged, stamp
from chunkcheck._torch.compat import (
    dispatch_modes,
    function_modes,
    in_dispatch_modes,
    in_function_modes,
    private_device,
)
from chunkcheck._torch.reach import Reached
from chunkcheck._torch.tensors import is_plain

# Bytes; to copy a larger buffer for each chunk would cost too much.
LARGEST_BUFFER = 2**24

# What is replayed belongs to the process, or to modules that threads may share.
_ONE_AT_A_TIME = threading.RLock()

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, eq=False)
class _Random:
    """One source of random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    # States are bytes on the CPU. An operator of torch's on them would take three times
    # as long, and modes such as fake tensors would see it.
    return string_at(a.data_ptr(), a.numel()) == string_at(b.data_ptr(), b.numel())


def _generator(generator: torch.Generator) -> _Random:
    return _Random(generator.get_state, generator.set_state, _same_bytes)


def _device(device: torch.device) -> _Random:
    module = torch.get_device_module(device)
    return _Random(
        lambda: module.get_rng_state(device),
        lambda state: module.set_rng_state(state, device),
        _same_bytes,
    )


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    return (kind, keys.tobytes(), *rest)


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    numpy = sys.modules["numpy"]
    kind, keys, *rest = state
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def _random_sources(
    options: Fused, reached: Reached, devices: set[torch.device]
) -> list[_Random]:
    found: list[_Random] = []
    if options.preserve_rng_state:
        own = {id(g): g for g in (*options.generators, *reached.generators)}
        own[id(torch.default_generator)] = torch.default_generator
        found += map(_generator, own.values())
        found += [_device(d) for d in devices if d.type not in ("cpu", "meta")]
    if options.preserve_python_rng_state:
        found.append(_Random(random.getstate, random.setstate, operator.eq))
        if "numpy" in sys.modules:
            found.append(_Random(_numpy_state, _set_numpy_state, operator.eq))
    return found


def _autocast_types() -> tuple[str, ...]:
    """Return the device types that have an autocast on this torch."""
    return _available_autocasts(private_device())


@functools.cache
def _available_autocasts(own: str) -> tuple[str, ...]:
    found = []
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", own):
        with suppress(RuntimeError):  # what an older torch says of a type it lacks
            if torch.amp.is_autocast_available(kind):
                found.append(kind)
    return tuple(found)


@contextmanager
def own_casts() -> Iterator[None]:
    """Keep autocast's cache of a chunk's casts away from all others.

    A cast that another run cached belongs to its graph, or has the value that a weight
    had then.
    """
    if not any(map(torch.is_autocast_enabled, _autocast_types())):
        yield
        return
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def casts_off() -> Iterator[None]:
    """Run without autocast, as a backward does that comes after the context."""
    kinds = [kind for kind in _autocast_types() if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


@dataclass(frozen=True, slots=True)
class _Ambient:
    """The modes of this thread that change what torch's functions do."""

    autocast: tuple[torch.dtype | None, ...]  # by type of device; None: disabled
    autocast_cache: bool
    default_dtype: torch.dtype
    function_modes: tuple[TorchFunctionMode, ...]
    dispatch_modes: tuple[TorchDispatchMode, ...]

    @classmethod
    def now(cls) -> _Ambient:
        return cls(
            tuple(
                torch.get_autocast_dtype(kind)
                if torch.is_autocast_enabled(kind)
                else None
                for kind in _autocast_types()
            ),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            tuple(function_modes()),
            tuple(dispatch_modes()),
        )

    def set(self) -> None:
        """Set what is a mere setting."""
        # Not by `torch.autocast`, which not every device can be given to.
        for kind, dtype in zip(_autocast_types(), self.autocast, strict=True):
            torch.set_autocast_enabled(kind, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.set_default_dtype(self.default_dtype)

    @contextmanager
    def instead_of(self, current: _Ambient) -> Iterator[None]:
        """Run in this one, where `current` is."""
        with ExitStack() as stack:
            stack.callback(current.set)
            self.set()
            if self.function_modes != current.function_modes:
                stack.enter_context(in_function_modes(self.function_modes))
            if missing := [
                mode
                for mode in self.dispatch_modes
                if mode not in current.dispatch_modes
            ]:
                stack.enter_context(in_dispatch_modes(missing))
            yield


@dataclass(frozen=True, slots=True)
class Record:
    """What one run saw that others did not."""

    random: Sequence[tuple[_Random, Any]] = ()
    buffers: State = field(default_factory=dict)
    context: AbstractContextManager[object] | None = None
    training: Sequence[tuple[nn.Module, bool]] | None = None  # if not as at the start


_NOTHING = Record()


class Replay:
    """What all runs of one call see, and what each one sees of its own.

    Args:
        options: What is to be replayed.
        reached: What can be reached from `f`.
        tensors: What `f` is given: on their devices it may draw random numbers.

    """

    def __init__(
        self, options: Fused, reached: Reached, tensors: Iterable[Tensor]
    ) -> None:
        devices = {t.device for t in (*tensors, *reached.tensors)}
        self._sources = _random_sources(options, reached, devices)
        self._context_fn = options.context_fn
        self._ambient = _Ambient.now()
        self._casts = any(self._ambient.autocast)
        self._simple = not self._casts and options.context_fn is None
        self._training = [(module, module.training) for module in reached.modules]
        self._leaves = [(t, t.requires_grad) for t in reached.tensors if t.is_leaf]
        self._buffers = Buffers(reached.modules, LARGEST_BUFFER)
        self._frozen = [
            t for t in reached.tensors if isinstance(t, nn.Parameter) and is_plain(t)
        ]
        self._watched: Observed = []  # frozen parameters, which `f` must not write to
        self._first_states: list[Any] = []
        self._draws = False
        self._states: list[Any] = []  # after the last run
        self.records: list[Record] = []

    def run(self, f: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `f` for the first time, and record what only this run sees.

        The record is the last of `records`.
        """
        before = self._states or [source.get() for source in self._sources]
        training = None
        if any(module.training != was for module, was in self._training):
            training = [(module, module.training) for module, _ in self._training]
        snapshots = self._buffers.snapshot()
        again = None
        if self._simple:
            result = f(*args, **kwargs)
        else:
            context, again = self._contexts()
            with own_casts(), context:
                result = f(*args, **kwargs)
        self._states = [source.get() for source in self._sources]
        drawn = [
            (source, state)
            for source, state, after in zip(
                self._sources, before, self._states, strict=True
            )
            if not source.same(state, after)
        ]
        written = self._buffers.written(snapshots)
        if not self.records:
            self._first_states = before
            self._watched = [
                (weakref.ref(t), stamp(t)) for t in self._frozen if not t.requires_grad
            ]
        self._draws = self._draws or bool(drawn)
        if drawn or written or again is not None or training is not None:
            self.records.append(Record(drawn, written, again, training))
        else:
            self.records.append(_NOTHING)
        return result

    def check_unchanged(self, captures: Observed, f: Callable[..., Any]) -> None:
        """Check that no capture was written to that recompute does not see as it was.

        Args:
            captures: What `f` captures, as it was when it had run.
            f: What captures them.

        Raises:
            RuntimeError: One was, or a frozen parameter.

        """
        check_unchanged([*captures, *self._watched], self._buffers.ids, f)

    def rewind(self) -> None:
        """Set everything back to what it was before the first run."""
        if self.records:
            for source, state in zip(self._sources, self._first_states, strict=True):
                source.set(state)
            self._buffers.restore()
        self._states, self.records = [], []

    def finish(self) -> None:
        """Let go of what is only needed while there are first runs."""
        self._states, self._first_states, self._frozen = [], [], []
        self._buffers.finish()

    def differs(self) -> bool:
        """Whether any run would now see something else than all first runs saw."""
        return (
            self._casts
            or torch.is_inference_mode_enabled()
            or _Ambient.now() != self._ambient
            or any(module.training != was for module, was in self._training)
            or any(leaf.requires_grad != was for leaf, was in self._leaves)
        )

    def again(self, record: Record, *, differs: bool) -> AbstractContextManager[object]:
        """Return a context for a run like the one that gave `record`.

        Args:
            record: What only that run saw.
            differs: What `differs` returned in this backward. It is left out where it
                need not be asked again for each chunk.

        """
        changes = self._draws or self._buffers.written_to
        if record is _NOTHING and not differs and not changes:
            return _AS_IT_IS
        return self._again(record)

    @contextmanager
    def _again(self, record: Record) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            # All sources, since `f` may seed one and so leave it as it was.
            before = [(s, s.get()) for s in self._sources] if self._draws else []
            try:
                yield from self._seen(record)
            finally:
                for source, state in before:
                    source.set(state)

    def _seen(self, record: Record) -> Iterator[None]:
        for source, state in record.random:
            source.set(state)
        with ExitStack() as stack:
            self._enter_common(stack, record)
            if self._buffers.written_to:
                stack.enter_context(self._buffers.seen_again(record.buffers))
            if record.context is not None:
                stack.enter_context(record.context)
            yield

    def _enter_common(self, stack: ExitStack, record: Record) -> None:
        """Enter what all first runs saw, where it is not so now."""
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if (current := _Ambient.now()) != self._ambient:
            stack.enter_context(self._ambient.instead_of(current))
        stack.enter_context(own_casts())
        for module, training in record.training or self._training:
            if module.training != training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training
        for leaf, wanted in self._leaves:
            if leaf.requires_grad != wanted:
                stack.callback(leaf.requires_grad_, leaf.requires_grad)
                leaf.requires_grad_(wanted)

    def _contexts(
        self,
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object] | None]:
        if self._context_fn is None:
            return _AS_IT_IS, None
        contexts: object = self._context_fn()
        match contexts:
            case (AbstractContextManager() as first, AbstractContextManager() as again):
                return first, again
        raise TypeError(
            "context_fn must return two context managers, for forward and recompute,"
            f" found {contexts!r}"
        )


_AS_IT_IS = nullcontext()
