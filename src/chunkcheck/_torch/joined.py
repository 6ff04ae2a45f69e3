"""Join: one result of all chunks, written in place and connected to each one's graph.

What stays of a chunk is a stub: one element, expanded to its shape. Knows nothing of
`f`, of trees, nor of who recomputes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chunkcheck._plan import Plan
from chunkcheck._torch.compat import transforms_active
from chunkcheck._torch.tensors import is_plain, new_like, stub


class Joined:
    """One result of all chunks, filled as they come."""

    def __init__(self, first: Tensor, dim: int, plan: Plan) -> None:
        self._dim = dim
        self._size = plan.size
        self._stubs: list[tuple[int, Tensor]] = []
        self._parts: list[Tensor] = []
        self._whole: Tensor | None = None
        # What a transform has wrapped cannot be written into what it has not.
        if is_plain(first) and not transforms_active():
            shape = (*first.shape[:dim], plan.rows, *first.shape[dim + 1 :])
            self._whole = new_like(first.detach(), shape)
            self._places = self._whole.split(plan.size, dim)

    def add(self, value: Tensor, chunk: int, *, connected: bool) -> None:
        """Take what one chunk gave, in its graph or apart from it."""
        if self._whole is None:
            self._parts.append(value if connected else value.detach())
        elif connected and value.requires_grad and torch.is_grad_enabled():
            held: Tensor = _Put.apply(self._places[chunk], value)  # type: ignore[no-untyped-call]
            self._stubs.append((chunk, held))
        else:
            self._places[chunk].copy_(value.detach())

    def tensor(self) -> Tensor:
        """Return the whole."""
        if self._whole is None:
            return torch.cat(self._parts, self._dim)
        if not self._stubs:
            return self._whole
        chunks, stubs = zip(*self._stubs, strict=True)
        joined: Tensor = _Join.apply(  # type: ignore[no-untyped-call]
            [self._whole], self._dim, self._size, chunks, *stubs
        )
        return joined


class _Put(torch.autograd.Function):
    """Write a chunk to its place, and leave a stub that has its gradient."""

    @staticmethod
    def forward(_ctx: Any, place: Tensor, chunk: Tensor) -> Tensor:
        place.copy_(chunk)
        return stub(chunk)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class _Join(torch.autograd.Function):
    """Return what the chunks were written into, and give each its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: list[Tensor],  # in a list, or torch takes it for an input
        dim: int,
        size: int,
        chunks: Sequence[int],
        *_stubs: Tensor,
    ) -> Tensor:
        ctx.dim, ctx.size, ctx.chunks = dim, size, chunks
        return whole[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient.split(ctx.size, ctx.dim)
        return (None, None, None, None, *(parts[chunk] for chunk in ctx.chunks))
