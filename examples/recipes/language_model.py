"""Cross-entropy of a language model, of which logits exist for a few rows only.

`language_model_loss` is `F.cross_entropy(F.linear(hidden, weight, bias), target)`, mean
over the rows that are not ignored. `cross_entropy_` is `F.cross_entropy` in the memory
of the logits: one buffer of their size instead of two, and less time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint

IGNORED = -100
BLOCK = 2**18  # numbers that `cross_entropy_` works on at a time: what a cache holds


def language_model_loss(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int | None,
    dim: int = 0,
    ignore_index: int = IGNORED,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    fast: bool = False,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return the mean cross-entropy; nan, with gradients of 0, if all is ignored.

    One chunk may keep all of its rows and the next none, so that a mean of means would
    be wrong: the chunks give a sum and what it is to be divided by.

    Args:
        hidden: `(rows, width)` or `(batch, sequence, width)`.
        target: `(rows,)` or `(batch, sequence)`, a class each or `ignore_index`.
        weight: `(classes, width)`. It may be a parameter or computed from others.
        bias: `(classes,)`.
        chunk_size: How many rows, samples or positions have logits at a time.
        dim: What to chunk along; 1 in `(batch, sequence, width)` is the sequence.
        ignore_index: The target of rows that do not count.
        class_weight: `(classes,)`, a constant: as `weight` of `F.cross_entropy`.
        label_smoothing: As there.
        fast: Use `cross_entropy_`, which cannot be differentiated twice.
        strategy: As in `chunk_and_checkpoint`.
    """

    def sum_and_count(
        hidden: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden.flatten(0, -2), weight, bias)
        target = target.flatten()
        kept = target != ignore_index
        if class_weight is None:
            count = kept.sum()
        else:
            class_weight = class_weight.detach()
            count = (class_weight[target.where(kept, 0)] * kept).sum()
        if fast:
            return cross_entropy_(
                logits, target, class_weight, ignore_index, label_smoothing
            ).sum(), count
        return F.cross_entropy(
            logits,
            target,
            class_weight,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=label_smoothing,
        ), count

    # Tensors that every chunk needs whole are arguments with None, not captured: then
    # they may have a history, as a weight that is computed, on every strategy.
    total, count = chunk_and_checkpoint(
        sum_and_count,
        hidden,
        target,
        weight,
        bias,
        class_weight,
        chunk_size=chunk_size,
        batch_dim=(dim, dim, None, None, None),
        out_dim="sum",
        strategy=strategy,
    )
    return exact_mean(total, count)


def exact_mean(total: Tensor, count: Tensor) -> Tensor:
    """Return `total / count`; where the count is 0, nan with a gradient of 0.

    That is what `F.cross_entropy` gives. A plain division has an infinite gradient
    there, which the zeros of the ignored rows turn into nan.
    """
    empty = count == 0
    return (total / count.masked_fill(empty, 1)).masked_fill(empty, torch.nan)


def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of each row, and use up the logits.

    The loss is that of `F.cross_entropy(..., reduction="none")`, in float32 or wider.
    The memory of the logits holds their gradient afterwards: they have no further use,
    one backward is all there is, and a second derivative is an error.

    Args:
        logits: `(rows, classes)`, fresh from a product of matrices: neither a leaf nor
            a view, nor the result of what needs it in backward, as tanh does.
        target: `(rows,)`, a class each or `ignore_index`.
        class_weight: `(classes,)`, a constant.
        ignore_index: The target of rows whose loss is 0.
        label_smoothing: The share of the target that goes to all classes evenly.

    Returns:
        `(rows,)`.
    """
    apply = cast("Any", _CrossEntropy.apply)
    found = apply(logits, target, class_weight, ignore_index, label_smoothing)
    losses: Tensor = found[0]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """The losses, and the logits, which hold their gradient from forward on."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        count, classes = logits.shape
        wide = torch.promote_types(logits.dtype, torch.float32)
        one = torch.ones((), dtype=wide, device=logits.device)
        weights = one if class_weight is None else class_weight.to(wide)
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0)[:, None]
        kept = ~ignored[:, None]
        # The loss of a row is a sum over classes of -log p, each times a weight: this
        # one for the target, this one times `weights` for all.
        of_target = (weights.expand(classes)[index] * kept) * (1 - smoothing)
        of_all = kept * one * (smoothing / classes)
        of_both = of_target + of_all * weights.expand(classes).sum()
        losses = torch.empty((count, 1), dtype=wide, device=logits.device)
        rows = max((BLOCK if logits.is_cpu else 64 * BLOCK) // classes, 1)
        per_row = (logits, index, of_target, of_all, of_both, losses)
        for own, i, one_class, each, both, out in zip(
            *(tensor.split(rows) for tensor in per_row), strict=True
        ):
            block = own.to(wide)  # the same memory, but for bf16 and fp16
            block.sub_(block.amax(1, keepdim=True))
            loss = -one_class * block.gather(1, i)
            if smoothing:
                of_row = block.sum(1) if class_weight is None else block @ weights
                loss -= each * of_row[:, None]
            total = block.exp_().sum(1, keepdim=True)
            torch.add(loss, both * total.log(), out=out)
            if ctx.needs_input_grad[0]:
                block.mul_(both / total)
                if smoothing:
                    block.addcmul_(each, weights, value=-1)
                block.scatter_(1, i, block.gather(1, i) - one_class)
            if block is not own:
                own.copy_(block)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits, ignored, torch.tensor(False))
        return losses[:, 0].masked_fill(ignored, 0), logits

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, of_logits: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if of_logits is not None:
            raise RuntimeError("the logits were used after cross_entropy_ used them up")
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RuntimeError(
                "cross_entropy_ cannot be differentiated twice, for which"
                " create_graph=True asks: use F.cross_entropy"
            )
        if gradient is None:
            return None, None, None, None, None
        # Both are written to, so that torch refuses to unpack them a second time. If
        # hooks keep them where it cannot see that, `used` tells.
        logits, ignored, used = ctx.saved_tensors
        if used:
            raise RuntimeError(
                "cross_entropy_ has one backward, in the memory of the logits: use"
                " F.cross_entropy for a second one"
            )
        used.fill_(True)
        found = cast("Tensor", logits).detach()
        # Ones, as the strategy "grad_in_forward" gives, change nothing. To look is free
        # on the CPU; a GPU would have to be waited for.
        if not (gradient.is_cpu and bool((gradient == 1).all())):
            found.mul_(gradient.masked_fill(ignored, 0)[:, None])
        return found, None, None, None, None
