"""Buffers: which modules write to theirs, and what these held at some time.

Knows modules. Knows nothing of `f`, nor when it is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from chunkcheck._torch.compat import buffers_of, version

_LARGEST = 2**24  # bytes; to copy a larger one for each chunk would cost too much


class Buffers:
    """The buffers of some modules, and which of the modules write to theirs."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if buffers_of(module)]
        self._known = False  # whether these are the modules that write

    def snapshot(self) -> list[Snapshot]:
        """Return what the buffers hold now."""
        return [Snapshot(module) for module in self._modules]

    @property
    def ids(self) -> set[int]:
        """The ids of all buffers of the modules that write."""
        if not self._known:
            return set()
        return {
            id(buffer)
            for module in self._modules
            for buffer in buffers_of(module).values()
        }

    def written(self, before: list[Snapshot]) -> list[Snapshot]:
        """Return those of the snapshots that a run has made outdated."""
        if not self._known:  # the first run tells which modules have to be watched
            before = [snapshot for snapshot in before if snapshot.outdated()]
            self._modules = [snapshot.module for snapshot in before]
            self._known = True
        return before


class Snapshot:
    """The buffers of one module at one time."""

    __slots__ = ("_before", "_values", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        buffers = buffers_of(module)
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
        return buffers.keys() != self._before.keys() or any(
            buffer is not buffers[name]
            or (buffer is not None and version(buffer) != before)
            for name, (buffer, before) in self._before.items()
        )

    @contextmanager
    def seen_again(self) -> Iterator[None]:
        """Let the module have buffers as they were, to write to, and then its own."""
        for name, buffer in self._values.items():
            if buffer is not None and buffer.nbytes > _LARGEST:
                raise RuntimeError(
                    f"f writes to buffers of a {type(self.module).__name__}, but its"
                    f" buffer {name!r} of {buffer.nbytes} bytes is too large for a"
                    " copy per chunk, so that recompute cannot see what forward saw:"
                    " write to it outside of f"
                )
        now = dict(buffers_of(self.module))
        self._replace(
            {n: b if b is None else b.clone() for n, b in self._values.items()}
        )
        try:
            yield
        finally:
            self._replace(now)

    def restore(self) -> None:
        """Give the module its buffers back with the values that they had."""
        self._replace({name: buffer for name, (buffer, _) in self._before.items()})
        with torch.no_grad():
            for name, value in self._values.items():
                buffer = self._before[name][0]
                if buffer is not None and value is not None and value is not buffer:
                    buffer.copy_(value)

    def _replace(self, buffers: dict[str, Tensor | None]) -> None:
        buffers_of(self.module).clear()
        buffers_of(self.module).update(buffers)
