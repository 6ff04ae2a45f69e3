"""Buffers: which ones modules write to, and what these held at some time.

Knows modules. Knows nothing of `f`, nor when it is run.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from chunkcheck._torch.captures import stamp
from chunkcheck._torch.compat import buffers_of

_ABSENT = object()  # stands for a buffer that is not registered

Values: TypeAlias = dict[str, object]  # of buffers, by name
# By module, as an index, what its buffers held before some run.
State: TypeAlias = dict[int, Values]


class Buffers:
    """The buffers of some modules, and which of these are written to.

    A buffer that is written to is known by what has been. Until then its first copy is
    up to date, so that only those that are written to are copied again for each run.

    Args:
        modules: The modules.
        largest: The bytes from which on a buffer is not copied.

    """

    def __init__(self, modules: Iterable[nn.Module], largest: float = math.inf) -> None:
        modules = list(modules)
        unseen = {
            id(inner)
            for module in modules
            if _writes_unseen(type(module))
            for inner in module.modules()
        }
        self._owners = [
            Owner(module, largest, unseen=id(module) in unseen)
            for module in modules
            # torch's own modules never get their first buffer in a run.
            if buffers_of(module) or not type(module).__module__.startswith("torch.nn.")
        ]

    def snapshot(self) -> State:
        """Return what the buffers hold now that are written to."""
        return {i: o.now() for i, o in enumerate(self._owners) if o.written}

    def written(self, before: State) -> State:
        """See which buffers a run wrote to, and return what they held before it.

        Args:
            before: What `snapshot` returned before that run.

        """
        for owner in self._owners:
            owner.look()
        return self.of(before)

    def finish(self) -> None:
        """Let go of the copies of what is not written to."""
        for owner in self._owners:
            owner.finish()

    def restore(self) -> None:
        """Set all buffers back to what they were before the first run."""
        for owner in self._owners:
            owner.restore()

    @property
    def written_to(self) -> bool:
        """Whether any buffer has been written to."""
        return any(owner.written for owner in self._owners)

    @property
    def ids(self) -> set[int]:
        """The ids of all buffers that are written to."""
        return {id(b) for owner in self._owners for b in owner.own().values()}

    def of(self, before: State) -> State:
        """Return what all buffers held before a run that are written to by now.

        Args:
            before: What those held that had been written to until then.

        """
        return {
            index: {n: owner.first.get(n, _ABSENT) for n in owner.written}
            | before.get(index, {})
            for index, owner in enumerate(self._owners)
            if owner.written
        }

    @contextmanager
    def seen_again(self, before: State) -> Iterator[None]:
        """Let modules have buffers as they were, to write to, and then their own.

        Args:
            before: What `written` returned after the run that is to be seen again.

        Raises:
            RuntimeError: What one held is not known.

        """
        seen = {
            index: self._owners[index].known(held)
            for index, held in self.of(before).items()
        }
        own = {index: self._owners[index].own() for index in seen}
        try:
            for index, values in seen.items():
                self._owners[index].replace(values)
            yield
        finally:
            for index, values in own.items():
                self._owners[index].replace(values)


class Owner:
    """One module with its buffers.

    Args:
        module: The module.
        largest: The bytes from which on a buffer is not copied.
        unseen: Whether it may write to its buffers in ways that leave no trace.

    Attributes:
        first: What the buffers held before the first run.
        written: The names of those that have been written to.

    """

    def __init__(
        self, module: nn.Module, largest: float = math.inf, *, unseen: bool = False
    ) -> None:
        self._module = module
        self._largest = largest
        self._unseen = unseen
        self._before = dict(buffers_of(module))
        self._stamps = {n: stamp(b) for n, b in self._before.items() if b is not None}
        self.first: Values = {n: self._held(b) for n, b in self._before.items()}
        self.written: set[str] = set()

    def look(self) -> None:
        """See which buffers have been written to since the start."""
        buffers = buffers_of(self._module)
        for name in buffers.keys() | self._before.keys():
            buffer = buffers.get(name, _ABSENT)
            if buffer is not self._before.get(name, _ABSENT) or (
                isinstance(buffer, Tensor) and stamp(buffer) != self._stamps[name]
            ):
                self.written.add(name)
        # Batch norm's own operator writes to these without counting it.
        if self._unseen or (
            self._module.training and buffers.get("running_mean") is not None
        ):
            self.written |= {n for n, b in buffers.items() if not self._is_large(b)}

    def own(self) -> Values:
        """Return those buffers that are written to."""
        buffers = buffers_of(self._module)
        return {name: buffers.get(name, _ABSENT) for name in self.written}

    def now(self) -> Values:
        """Return what they hold."""
        return {name: self._held(buffer) for name, buffer in self.own().items()}

    def known(self, held: Values) -> Values:
        """Return buffers to write to, given what they held.

        Raises:
            RuntimeError: One was too large for a copy, and was written to.

        """
        for name, value in held.items():
            if isinstance(value, _Large) and stamp(value.buffer) != value.stamp:
                raise RuntimeError(
                    f"f writes to the buffer {name!r} of a"
                    f" {type(self._module).__name__}, which with {value.buffer.nbytes}"
                    " bytes is too large for a copy per chunk, so that recompute cannot"
                    " see what forward saw: write to it outside of f"
                )
        return {name: _to_write_to(value) for name, value in held.items()}

    def replace(self, values: Values) -> None:
        """Give the module these buffers."""
        if isinstance(self._module, torch.jit.ScriptModule):
            for name, buffer in values.items():
                setattr(self._module, name, buffer)
            return
        own: dict[str, Any] = buffers_of(self._module)
        # At no time is one missing, which a thread might see.
        own.update({n: b for n, b in values.items() if b is not _ABSENT})
        for name, buffer in values.items():
            if buffer is _ABSENT:
                own.pop(name, None)

    def restore(self) -> None:
        """Give the module its first buffers back with the values that they had."""
        self.look()
        values = self.known({n: self.first.get(n, _ABSENT) for n in self.written})
        with torch.no_grad():
            for name, value in values.items():
                first = self._before.get(name)
                if isinstance(first, Tensor) and isinstance(value, Tensor):
                    if value is not first:
                        first.copy_(value)
                    values[name] = first
        self.replace(values)

    def finish(self) -> None:
        """Let go of what is only needed while there are first runs."""
        self.first = {name: self.first.get(name, _ABSENT) for name in self.written}
        self._before, self._stamps = {}, {}

    def _is_large(self, buffer: object) -> bool:
        return isinstance(buffer, Tensor) and buffer.nbytes > self._largest

    def _held(self, buffer: object) -> object:
        """Return what a buffer holds."""
        if not isinstance(buffer, Tensor):
            return buffer
        if self._is_large(buffer):
            return _Large(buffer, stamp(buffer))
        return buffer.detach().clone()


class _Large(NamedTuple):
    """A buffer that is too large to be copied."""

    buffer: Tensor
    stamp: object


def _to_write_to(held: object) -> object:
    if isinstance(held, _Large):
        return held.buffer
    return held.clone() if isinstance(held, Tensor) else held


_UNSEEN: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _writes_unseen(kind: type) -> bool:
    """Whether code of a module's class names what writes past the count of writes."""
    found = _UNSEEN.get(kind)
    if found is None:
        found = any(
            not {"data", "numpy"}.isdisjoint(member.__code__.co_names)
            for owner in kind.__mro__
            if not owner.__module__.startswith("torch.")
            for member in vars(owner).values()
            if isinstance(member, types.FunctionType)
        )
        _UNSEEN[kind] = found
    return found
