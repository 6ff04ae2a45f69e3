"""Buffers: which modules write to theirs, and what these held at some time.

Knows modules. Knows nothing of `f`, nor when it is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from chunkcheck._torch.compat import buffers_of, version

_LARGEST = 2**24  # bytes; to copy a larger one for each chunk would cost too much


class Buffers:
    """The buffers of some modules, and which of the modules write to theirs.

    A module that writes is known by what it has written. Until then the first snapshot
    is up to date, so that only those that write are copied again for each run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # torch's own modules never get their first buffer in a run.
        self._first = [
            Snapshot(module)
            for module in modules
            if buffers_of(module) or not type(module).__module__.startswith("torch.nn.")
        ]
        self._quiet = list(self._first)
        self._writers: list[Snapshot] = []  # what they held before the first run

    def snapshot(self) -> list[Snapshot]:
        """Return what the buffers of the modules that write hold now."""
        return [Snapshot(first.module) for first in self._writers]

    def written(self, before: list[Snapshot]) -> list[Snapshot]:
        """Return what the modules that write held before a run, and see who joins them.

        Args:
            before: What `snapshot` returned before that run.

        """
        if new := [snapshot for snapshot in self._quiet if snapshot.outdated()]:
            self._quiet = [s for s in self._quiet if s not in new]
            self._writers += new
        for snapshot in before:
            snapshot.outdated()
        return before + new

    def finish(self) -> None:
        """Let go of the copies of what is not written to."""
        self._first, self._quiet = [], []

    def restore(self) -> None:
        """Set all buffers back to what they were before the first run."""
        for snapshot in self._first:
            if snapshot.outdated():
                snapshot.restore()

    @property
    def written_to(self) -> bool:
        """Whether any module has written to its buffers."""
        return bool(self._writers)

    @property
    def ids(self) -> set[int]:
        """The ids of all buffers of the modules that write."""
        return {
            id(buffer)
            for first in self._writers
            for buffer in buffers_of(first.module).values()
        }

    def of(self, before: Sequence[Snapshot]) -> list[Snapshot]:
        """Return what all modules that write held before a run.

        Args:
            before: What `written` returned after it: those that wrote until then.

        """
        known = {snapshot.module for snapshot in before}
        return [*before, *(s for s in self._writers if s.module not in known)]


class Snapshot:
    """The buffers of one module at one time."""

    __slots__ = ("_before", "_lost", "_values", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        buffers = buffers_of(module)
        self._lost = ""  # a buffer that was written to, but is too large for a copy
        self._before = {
            name: (buffer, None if buffer is None else version(buffer))
            for name, buffer in buffers.items()
        }
        self._values = {
            name: buffer
            if buffer is None or buffer.nbytes > _LARGEST
            else buffer.detach().clone()
            for name, buffer in buffers.items()
        }

    def outdated(self) -> bool:
        """Whether the module has written to a buffer or replaced one."""
        buffers = buffers_of(self.module)
        # Batch norm's own operator writes to these without counting it.
        if self.module.training and buffers.get("running_mean") is not None:
            return True
        written = [
            name
            for name, (buffer, before) in self._before.items()
            if buffer is not buffers.get(name)
            or (buffer is not None and version(buffer) != before)
        ]
        for name in written:
            buffer, before = self._before[name]
            if buffer is not None and buffer.nbytes > _LARGEST:
                self._lost = name if version(buffer) != before else self._lost
        return bool(written) or buffers.keys() != self._before.keys()

    @contextmanager
    def seen_again(self) -> Iterator[None]:
        """Let the module have buffers as they were, to write to, and then its own."""
        self._check()
        own = dict(buffers_of(self.module))
        copies = {n: b if b is None else b.clone() for n, b in self._values.items()}
        self._replace(copies)
        try:
            yield
        finally:
            self._replace(own)

    def restore(self) -> None:
        """Give the module its buffers back with the values that they had."""
        self._check()
        self._replace({name: buffer for name, (buffer, _) in self._before.items()})
        with torch.no_grad():
            for name, value in self._values.items():
                buffer = self._before[name][0]
                if buffer is not None and value is not None and value is not buffer:
                    buffer.copy_(value)

    def _check(self) -> None:
        if self._lost:
            buffer, _ = self._before[self._lost]
            size = 0 if buffer is None else buffer.nbytes
            raise RuntimeError(
                f"f writes to the buffer {self._lost!r} of a"
                f" {type(self.module).__name__}, which with {size} bytes is too large"
                " for a copy per chunk, so that recompute cannot see what forward saw:"
                " write to it outside of f"
            )

    def _replace(self, buffers: dict[str, Tensor | None]) -> None:
        if isinstance(self.module, torch.jit.ScriptModule):
            for name, buffer in buffers.items():
                setattr(self.module, name, buffer)
        else:
            own = buffers_of(self.module)
            own.update(buffers)  # at no time is one missing, which a thread might see
            for name in own.keys() - buffers.keys():
                del own[name]
