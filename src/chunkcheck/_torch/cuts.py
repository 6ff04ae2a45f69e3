"""Cut: the tensors of a call as each chunk is given them, in a graph or apart from any.

Knows which tensors are cut and which pass whole. Knows nothing of `f`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chunkcheck._torch.compat import graph_task
from chunkcheck._torch.gradients import Gradient, gradient_maker
from chunkcheck._torch.tape import Runnable
from chunkcheck._torch.tensors import alias, cut, is_plain, stub


class Apart:
    """The tensors of each chunk as leaves of a graph of their own.

    Args:
        chunks: How they are cut.
        tensors: The tensors.
        require: Which of them require a gradient, whatever they say now.

    """

    def __init__(
        self, chunks: Runnable, tensors: Sequence[Tensor], require: Sequence[bool]
    ) -> None:
        self._chunks = chunks
        self._require = require
        detached = [t.detach() for t in tensors]
        self._pieces = cut(detached, chunks.dims, chunks.plan.size)
        self._whole = detached[len(self._pieces) :]

    def given(self, chunk: int) -> list[Tensor]:
        """Return the tensors of one chunk."""
        given = self._chunks.as_contiguous([pieces[chunk] for pieces in self._pieces])
        # Detached, since no chunk may see what another did to the tensor.
        given += [t.detach() for t in self._whole]
        for tensor, required in zip(given, self._require, strict=True):
            if required:
                tensor.requires_grad_()
        return given


class InPlace:
    """The tensors of each chunk in the graph, each gradient put together in place.

    Args:
        chunks: How they are cut.
        tensors: The tensors.
        accumulate_dtype: The option of the strategy.

    """

    def __init__(
        self, chunks: Runnable, tensors: Sequence[Tensor], accumulate_dtype: object
    ) -> None:
        self._chunks = chunks
        self._parts: list[tuple[Sequence[Tensor], _Gather | None]] = []
        size, count = chunks.plan.size, len(chunks.plan)
        for index, tensor in enumerate(tensors):
            dim = chunks.dims[index] if index < len(chunks.dims) else None
            if tensor.requires_grad and is_plain(tensor):
                gather = _Gather(gradient_maker(tensor, dim, size, accumulate_dtype))
                parts = _Parts.apply(gather, tensor, dim, size, count)  # type: ignore[no-untyped-call]
                self._parts.append((parts, gather))
            elif dim is None:
                self._parts.append(([tensor] * count, None))
            else:
                self._parts.append((tensor.split(size, dim), None))

    def given(self, chunk: int) -> list[Tensor]:
        """Return the tensors of one chunk."""
        # Made now, so that backward comes to its node before those of earlier chunks:
        # else the gradients of all chunks would wait for it.
        parts = [
            alias(parts[chunk]) if gather is None else gather.alias(parts[chunk], chunk)
            for parts, gather in self._parts
        ]
        count = len(self._chunks.dims)
        return [*self._chunks.as_contiguous(parts[:count]), *parts[count:]]


class _Gather:
    """Takes the gradients of the chunks on their way, and leaves stubs instead."""

    __slots__ = ("_new", "_running")

    def __init__(self, new: Callable[[], Gradient]) -> None:
        self._new = new
        self._running: dict[int, tuple[Gradient, set[int]]] = {}  # by backward

    def alias(self, part: Tensor, chunk: int) -> Tensor:
        """Return what a chunk is given of a part of the tensor."""
        given = part.view_as(part)
        # A hook on the node rather than the tensor: `f` may hang its own on that.
        if given.grad_fn is not None:
            given.grad_fn.register_prehook(partial(self._take, chunk))
        return given

    def _take(
        self, chunk: int, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor] | None:
        (gradient,) = gradients
        if gradient is None or torch.is_grad_enabled() or not is_plain(gradient):
            return None
        total, taken = self._running.setdefault(graph_task(), (self._new(), set()))
        total.add(chunk, gradient)
        taken.add(chunk)
        return (stub(gradient),)

    def total(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the whole gradient, of what has been taken and what has not."""
        task = graph_task()
        total, taken = self._running.get(task) or (self._new(), set())
        self._running.pop(task, None)
        for chunk, gradient in enumerate(gradients):
            if gradient is not None and chunk not in taken:
                total.add(chunk, gradient)
        return total.total()


class _Parts(torch.autograd.Function):
    """Give each chunk its part of a tensor, or a view of all of it."""

    @staticmethod
    def forward(
        ctx: Any,
        gather: _Gather,
        tensor: Tensor,
        dim: int | None,
        size: int,
        count: int,
    ) -> tuple[Tensor, ...]:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        if dim is None:
            return tuple(tensor.view_as(tensor) for _ in range(count))
        pieces: tuple[Tensor, ...] = tensor.split(size, dim)
        return pieces

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, ctx.gather.total(gradients), None, None, None
