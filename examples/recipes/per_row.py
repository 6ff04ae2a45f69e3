"""A loss per token, of which logits exist for a few tokens only.

`token_losses` is `F.cross_entropy(..., reduction="none")`: do with its entries what you
like, backward recomputes each chunk with the gradients that come in. Where all that you
do is to weight and add them, `weighted_loss` needs no recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100


def losses_of_tokens(
    hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the cross-entropy of each token, unchunked, in the shape of `target`."""
    logits = F.linear(hidden.flatten(0, -2), weight, bias)
    losses = F.cross_entropy(
        logits, target.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(target)


def token_losses(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int | None,
    dim: int = 0,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return the cross-entropy of each token, in the shape of `target`.

    Args:
        hidden: `(rows, width)` or `(batch, sequence, width)`.
        target: `(rows,)` or `(batch, sequence)`, a class each, or `IGNORED`: loss 0.
        weight: `(classes, width)`.
        bias: `(classes,)`.
        chunk_size: How many rows, samples or positions have logits at a time.
        dim: What to chunk along, counted from the front.
        strategy: As in `chunk_and_checkpoint`. "grad_in_forward" is for one number.
    """
    return chunk_and_checkpoint(
        losses_of_tokens,
        hidden,
        target,
        weight,
        bias,
        chunk_size=chunk_size,
        batch_dim=(dim, dim, None, None),
        out_dim=dim,
        strategy=strategy,
    )


def weighted_loss(
    hidden: Tensor,
    target: Tensor,
    row_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int | None,
    dim: int = 0,
    strategy: StrategyName = "grad_in_forward",
) -> Tensor:
    """Return the sum of the tokens' losses, each times its own weight.

    `row_weight` has the shape of `target` and may be of either sign, such as an
    advantage. It gets its gradient if it requires one. Everything else is as in
    `token_losses`.
    """

    def weighted_sum(
        hidden: Tensor,
        target: Tensor,
        row_weight: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        return (losses_of_tokens(hidden, target, weight, bias) * row_weight).sum()

    return chunk_and_checkpoint(
        weighted_sum,
        hidden,
        target,
        row_weight,
        weight,
        bias,
        chunk_size=chunk_size,
        batch_dim=(dim, dim, dim, None, None),
        out_dim="sum",
        strategy=strategy,
    )
