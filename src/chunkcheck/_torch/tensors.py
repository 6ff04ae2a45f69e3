"""Tensors: which take part, how one is cut into chunks and chunks joined to one.

Knows dims and memory formats. Knows no tree, no strategy and no `f`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

_FORMATS = (
    torch.contiguous_format,
    torch.channels_last,
    torch.channels_last_3d,
)
_FORMAT_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a torch tensor."""
    return isinstance(value, Tensor)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of `tensor`; a nested tensor has none."""
    return () if tensor.is_nested else tuple(tensor.shape)


def refusal(tensor: Tensor) -> str | None:
    """Return why `tensor` cannot be cut or joined, with the remedy, or None."""
    if tensor.is_nested:
        return (
            "a nested tensor, which has no dim of equal rows: pass a padded tensor and"
            " a mask, or write None for its dim to pass it whole"
        )
    if tensor.layout != torch.strided:
        return (
            f"a tensor of layout {tensor.layout}, which cannot be cut: convert it by"
            " .to_dense(), or write None for its dim to pass it whole"
        )
    if getattr(tensor, "has_names", bool)():  # which newer torches do not have
        return (
            "a named tensor, whose names would be lost: drop them by .rename(None), or"
            " write None for its dim to pass it whole"
        )
    return None


def memory_format(tensor: Tensor) -> torch.memory_format | None:
    """Return the format in which `tensor` is contiguous, if in any."""
    for candidate in _FORMATS:
        dims = _FORMAT_DIMS.get(candidate, tensor.dim())
        if dims == tensor.dim() and tensor.is_contiguous(memory_format=candidate):
            return candidate
    return None


def cut(
    tensors: Sequence[Tensor], dims: Sequence[int], size: int
) -> list[tuple[Tensor, ...]]:
    """Return the pieces of the first tensors, for each of which there is a dim.

    One split for all pieces: the backward of a slice for each would fill a zero tensor
    of the whole size each time, which is quadratic in their number.
    """
    return [t.split(size, dim) for t, dim in zip(tensors, dims, strict=False)]


def as_contiguous(tensor: Tensor, layout: torch.memory_format | None) -> Tensor:
    """Return `tensor` itself if it is contiguous in `layout`, else a copy that is."""
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


def alias(tensor: Tensor) -> Tensor:
    """Return a tensor for `f` to hang hooks on, if a gradient flows through `tensor`.

    Forward and recompute get the same tensor: a hook that `f` registers on it in both
    would act twice.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    plain = tensor.layout == torch.strided and not tensor.is_nested
    return tensor.view_as(tensor) if plain else tensor


def detached(tensors: tuple[Tensor, ...], which: list[bool]) -> tuple[Tensor, ...]:
    """Return `tensors`, some of them detached; an empty `which` means none."""
    if not any(which):
        return tensors
    return tuple(
        t.detach() if chosen else t for t, chosen in zip(tensors, which, strict=True)
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is dense and of no subclass, so that it may be written to."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )


def stub(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes next to no memory."""
    return tensor.new_empty(()).expand(tensor.shape)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps in the format of `tensor`."""
    return torch.empty_like(tensor, device="meta").stride()


def new_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor of another shape, in the format of `tensor`."""
    layout = memory_format(tensor) or torch.contiguous_format
    return torch.empty(
        shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout
    )
