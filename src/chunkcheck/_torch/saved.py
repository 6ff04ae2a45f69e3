"""Saving: tensors and other things kept exactly as long as torch keeps what it saves.

Knows nothing of what is saved, nor why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from chunkcheck._torch.compat import has_hooks, memory, version


class Saved:
    """Tensors saved as a node of torch's saves them.

    So saved-tensor hooks around the call see them, once, and a tensor that is written
    to raises an error when it is asked for.
    """

    __slots__ = ("_before", "_constants", "_holder", "_name", "outer_hooks")

    def __init__(self, tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
        self._name = name
        self._before = [(weakref.ref(t), version(t), memory(t)) for t in tensors]
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
        try:
            _, *saved = node.saved_tensors
        except RuntimeError as error:
            for index, (ref, before, _) in enumerate(self._before):
                tensor = ref()
                if tensor is not None and version(tensor) != before:
                    error.add_note(
                        f"{self._name(index)} was written to between forward and"
                        " backward: do it after backward, or pass a clone"
                    )
            raise
        for index, (ref, _, where) in enumerate(self._before):
            tensor = ref()
            # Hooks have put aside what the tensor held.
            if tensor is not None and where and not self.outer_hooks:
                here = memory(tensor)
                if here and here != where:
                    raise RuntimeError(
                        f"{self._name(index)} was given other data between forward and"
                        " backward, so that gradients would be wrong: do it after"
                        " backward, or pass a clone"
                    )
        rest = iter(saved)
        return [next(rest) if t is None else t for t in self._constants]


def kept_from(*, outer_hooks: bool) -> AbstractContextManager[object]:
    """Return a context that saved-tensor hooks around the call see nothing of.

    They are for what the call saves, not for what each chunk does.
    """
    return saved_tensors_hooks(_detached, _detached) if outer_hooks else nullcontext()


def _detached(tensor: Tensor) -> Tensor:
    # A tensor that its own node saves would never be freed.
    return tensor.detach() if tensor.requires_grad else tensor


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(anchor, *tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        """Nothing is ever computed from it."""
