"""Losses of segmentation over volumes, of which logits exist for a few slices only.

Dice after Milletari et al., "V-Net" (2016), focal loss after Lin et al. (2017). Both
end in sums over voxels, so that it does not matter along which dim they are chunked:
`dim` is 0 for the batch, or -3, -2 or -1 for depth, height or width, which count the
same in features and target. A head of 1 x 1 x 1 convolutions may be cut anywhere; one
that looks at neighbours, along the batch alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint

Head = Callable[[Tensor], Tensor]
IGNORED = -100


def dice_sums(head: Head, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return per class the intersection, and the two sizes added up.

    Args:
        head: From features to logits, `(batch, classes, depth, height, width)`.
        features: `(batch, channels, depth, height, width)`.
        target: `(batch, depth, height, width)`, a class per voxel or `IGNORED`.

    Returns:
        Two of `(classes,)`.
    """
    kept = (target != IGNORED)[:, None]
    found = head(features).softmax(1) * kept
    wanted = F.one_hot(target.clamp(min=0), found.shape[1]).movedim(-1, 1) * kept
    voxels = (0, 2, 3, 4)
    return (found * wanted).sum(voxels), found.sum(voxels) + wanted.sum(voxels)


def dice_loss(
    head: Head,
    features: Tensor,
    target: Tensor,
    *,
    chunk_size: int | None,
    dim: int = -3,
    smooth: float = 1.0,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return one minus the mean over classes of Dice's coefficient; see `dice_sums`.

    A ratio of sums is no sum of ratios: the sums go over the chunks, the ratio is
    outside. They are several, which rules out the strategy "grad_in_forward".
    """
    intersection, size = chunk_and_checkpoint(
        dice_sums,
        head,
        features,
        target,
        chunk_size=chunk_size,
        batch_dim=dim,
        out_dim="sum",
        strategy=strategy,
    )
    return 1 - ((2 * intersection + smooth) / (size + smooth)).mean()


def focal_voxels(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    """Return the focal loss of each voxel, 0 where the target is `IGNORED`."""
    kept = target != IGNORED
    picked = logits.log_softmax(1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    return -((-torch.expm1(picked)) ** gamma) * picked * kept


def focal_sum_and_count(
    head: Head, features: Tensor, target: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Return the focal loss, a sum over voxels, and how many are not ignored."""
    loss = focal_voxels(head(features), target, gamma).sum()
    return loss, (target != IGNORED).sum()


def focal_loss(
    head: Head,
    features: Tensor,
    target: Tensor,
    *,
    chunk_size: int | None,
    dim: int = -3,
    gamma: float = 2.0,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return the mean focal loss of the voxels that are not ignored.

    Shapes are those of `dice_sums`. One chunk may keep all of its voxels and the next
    none, so that a mean over chunks would be wrong: their sum and count go outside.
    The strategy "grad_in_forward" saves the recompute, and holds the gradient of
    `features` from forward on.
    """
    loss, count = chunk_and_checkpoint(
        focal_sum_and_count,
        head,
        features,
        target,
        gamma,
        chunk_size=chunk_size,
        batch_dim=dim,
        out_dim="sum",
        strategy=strategy,
    )
    return loss / count.clamp(min=1)


def focal_mean(head: Head, features: Tensor, target: Tensor, gamma: float) -> Tensor:
    """Return the mean focal loss of all voxels."""
    return focal_voxels(head(features), target, gamma).mean()


def focal_loss_of_all(
    head: Head,
    features: Tensor,
    target: Tensor,
    *,
    chunk_size: int | None,
    dim: int = -3,
    gamma: float = 2.0,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return the mean focal loss of all voxels, of which an ignored one counts as 0.

    Every slice has as many voxels, so that the mean of a chunk's slices, weighted by
    how many they are, is exact.
    """
    return chunk_and_checkpoint(
        focal_mean,
        head,
        features,
        target,
        gamma,
        chunk_size=chunk_size,
        batch_dim=dim,
        out_dim="mean",
        strategy=strategy,
    )
