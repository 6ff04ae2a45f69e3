"""Saving: tensors and other things kept exactly as long as torch keeps what it saves.

Knows nothing of what is saved, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chunkcheck._torch.compat import has_hooks


class Saved:
    """Tensors saved as a node of torch's saves them.

    So saved-tensor hooks around the call see them, once, and a tensor that is written
    to raises an error when it is asked for.
    """

    __slots__ = ("_constants", "_holder", "outer_hooks")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # torch cannot save inference tensors. As constants they are right in plain `f`.
        self._constants = [t if t.is_inference() else None for t in tensors]
        anchor = torch.empty(0, requires_grad=True)
        self._holder: Tensor = _Hold.apply(  # type: ignore[no-untyped-call]
            anchor, *(t for t in tensors if not t.is_inference())
        )
        node = self._holder.grad_fn
        self.outer_hooks = node is not None and has_hooks(node)

    def tensors(self) -> list[Tensor]:
        """Return the tensors.

        Raises:
            RuntimeError: One was written to since.

        """
        node: Any = self._holder.grad_fn
        _, *saved = node.saved_tensors
        rest = iter(saved)
        return [next(rest) if t is None else t for t in self._constants]


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(anchor, *tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        """Nothing is ever computed from it."""
