"""Gradients: those of the chunks put together, in place where that is allowed.

One object is one gradient in one backward. Knows nothing of `f`, nor of who computes
the gradients of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from chunkcheck._torch.tensors import dense_strides, is_plain


class Gradient(Protocol):
    """A gradient that comes in pieces, one or none from each chunk."""

    def add(self, chunk: int, gradient: Tensor) -> None:
        """Take what one chunk gives."""
        ...

    def total(self) -> Tensor | None:
        """Return the whole; None if no chunk gave anything."""
        ...


class Rows:
    """The gradient of a tensor that is cut along `dim`, `size` rows a chunk."""

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], dim: int, size: int
    ) -> None:
        self._shape = shape
        self._strides = strides
        self._dim = dim
        self._size = size
        self._whole: Tensor | None = None
        self._places: tuple[Tensor, ...] = ()
        self._parts: dict[int, Tensor] = {}
        self._missing: set[int] = set()

    def add(self, chunk: int, gradient: Tensor) -> None:
        """Take the gradient of one chunk."""
        if self._whole is None and _is_own(gradient):
            # Made from a gradient, which vmap may have wrapped.
            self._whole = gradient.new_empty_strided(self._shape, self._strides)
            self._places = self._whole.split(self._size, self._dim)
            self._missing = set(range(len(self._places)))
        if self._whole is not None and not gradient.requires_grad:
            try:
                self._places[chunk].copy_(gradient)
                self._missing.discard(chunk)
                return
            except RuntimeError:  # sparse, or wrapped by vmap where the whole is not
                pass
        self._parts[chunk] = gradient

    def total(self) -> Tensor | None:
        """Return the whole; what no chunk gave is zero."""
        if self._parts:
            return self._joined()
        for chunk in self._missing:
            self._places[chunk].zero_()
        return self._whole

    def _joined(self) -> Tensor:
        example = next(iter(self._parts.values()))
        rows = self._shape[self._dim]
        parts = []
        for chunk, start in enumerate(range(0, max(rows, 1), self._size)):
            part = self._parts.get(chunk)
            if part is None and self._whole is not None and chunk not in self._missing:
                part = self._places[chunk]
            if part is None:
                shape = list(self._shape)
                shape[self._dim] = min(self._size, rows - start)
                part = example.new_zeros(shape)
            parts.append(part)
        return torch.cat(parts, self._dim)


class Sum:
    """The gradient of a tensor that every chunk sees whole, or another such sum.

    Args:
        dtype: What to sum in, if that is wider than the gradients are.

    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._total: Tensor | None = None
        self._result_dtype: torch.dtype | None = None
        self._in_place = False

    @property
    def widens(self) -> bool:
        """Whether it sums in a wider dtype than the gradients have."""
        return self._dtype is not None

    def add(self, _chunk: int, gradient: Tensor, *, weight: float = 1) -> None:
        """Add what one chunk gives, times a weight, to the sum."""
        total = self._total
        if total is None:
            self._result_dtype = gradient.dtype
            self._in_place = _is_own(gradient)
            # A copy, for it may be a view of what is not ours.
            wide = self._dtype or gradient.dtype
            first = gradient.to(wide, copy=self._in_place)
            self._total = first if weight == 1 else first * weight
            return
        if self._in_place and not gradient.requires_grad:
            try:
                total.add_(gradient, alpha=weight)
                return
            except RuntimeError:  # wrapped by vmap where the sum is not
                pass
        # The sum of a sparse tensor and a dense one is defined in one order only.
        sparse_first = not is_plain(total) and is_plain(gradient)
        self._total = (
            gradient * weight + total
            if sparse_first
            else torch.add(total, gradient, alpha=weight)
        )
        self._in_place = False

    def takes_products(self, leaf: Tensor) -> bool:
        """Whether `add_product` can be used for the gradient of a matrix."""
        return (
            self._dtype is None
            and leaf.dim() == 2
            and leaf.is_floating_point()
            and is_plain(leaf)
            and (self._total is None or (self._in_place and is_plain(self._total)))
        )

    def add_product(self, a: Tensor, b: Tensor, alpha: float) -> None:
        """Add `alpha * a @ b`, without a temporary of that size."""
        if self._total is None:
            self._result_dtype, self._in_place = a.dtype, True
            self._total = a @ b if alpha == 1 else a @ b * alpha
        else:
            self._total.addmm_(a, b, alpha=alpha)

    def total(self) -> Tensor | None:
        """Return the sum in the dtype of the gradients."""
        if self._total is None or self._result_dtype is None:
            return None
        return self._total.to(self._result_dtype)


def gradient_maker(
    tensor: Tensor, dim: int | None, size: int, accumulate_dtype: object
) -> Callable[[], Gradient]:
    """Return what makes the gradient of a tensor, for each backward one.

    It does not hold the tensor.

    Args:
        tensor: The tensor.
        dim: The dim along which it is cut, None if every chunk sees it whole.
        size: The rows per chunk.
        accumulate_dtype: The option of the strategy.

    """
    if dim is None:
        return partial(Sum, sum_dtype(accumulate_dtype, tensor.dtype))
    return partial(Rows, tensor.shape, dense_strides(tensor), dim, size)


def _is_own(gradient: Tensor) -> bool:
    """Whether the first gradient shows that they may be written into one tensor."""
    return is_plain(gradient) and not gradient.requires_grad


def sum_dtype(asked: object, gradient: torch.dtype) -> torch.dtype | None:
    """Return what to sum gradients of some dtype in, if not in their own.

    Args:
        asked: The option `accumulate_dtype`: a dtype, `None`, or "auto" for float32.
        gradient: The dtype of the gradients.

    """
    if asked is None or not gradient.is_floating_point:
        return None
    wide = asked if isinstance(asked, torch.dtype) else torch.float32
    promoted = torch.promote_types(wide, gradient)
    return promoted if promoted != gradient else None
