"""Dice and focal loss over volumes against the whole volume at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples.recipes.segmentation import (
    IGNORED,
    dice_loss,
    focal_loss,
    focal_loss_of_all,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import StrategyName, chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory
from reference import assert_close, assert_same_runs, rows, run

SHAPE = (3, 4, 7, 5, 6)  # batch, channels, depth, height, width
CLASSES = 3
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant", "grad_in_forward"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
of_vectors = pytest.mark.parametrize("strategy", STRATEGIES[:2])
dims = pytest.mark.parametrize("dim", [0, -3, -2, -1])
sizes = pytest.mark.parametrize("size", [1, 2, 4, None])
ignored = pytest.mark.parametrize("share", [0.0, 0.4])


def plain_dice(head: nn.Module, features: Tensor, target: Tensor) -> Tensor:
    """Return the Dice loss, written over the kept voxels as rows of classes."""
    logits: Tensor = head(features).movedim(1, -1)[target != IGNORED]
    found = logits.softmax(-1)
    wanted = F.one_hot(target[target != IGNORED], CLASSES)
    intersection = (found * wanted).sum(0)
    return 1 - ((2 * intersection + 1) / (found.sum(0) + wanted.sum(0) + 1)).mean()


def plain_focal(head: nn.Module, features: Tensor, target: Tensor) -> Tensor:
    """Return the focal loss of the kept voxels, from their cross-entropy."""
    logits = head(features).movedim(1, -1)[target != IGNORED]
    entropy = F.cross_entropy(logits, target[target != IGNORED], reduction="none")
    return ((1 - torch.exp(-entropy)).square() * entropy).mean()


def volume(share: float = 0.0, *shape: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a head, features and a target of which a share is ignored."""
    batch, channels, *voxels = shape or SHAPE
    head = nn.Sequential(nn.Conv3d(channels, 5, 1), nn.ReLU(), nn.Conv3d(5, CLASSES, 1))
    target = torch.randint(CLASSES, (batch, *voxels))
    target[torch.rand(target.shape) < share] = IGNORED
    return head.double(), rows(batch, channels, *voxels), target


@of_vectors
@dims
@sizes
@ignored
def test_dice_is_that_of_the_whole_volume(
    strategy: StrategyName, dim: int, size: int | None, share: float
) -> None:
    head, features, target = volume(share)
    leaves = (head, features)
    got = run(
        lambda: dice_loss(
            head, features, target, chunk_size=size, dim=dim, strategy=strategy
        ),
        leaves,
    )
    assert_same_runs(got, run(lambda: plain_dice(head, features, target), leaves))


@strategies
@dims
@sizes
@ignored
def test_focal_is_that_of_the_whole_volume(
    strategy: StrategyName, dim: int, size: int | None, share: float
) -> None:
    head, features, target = volume(share)
    leaves = (head, features)
    got = run(
        lambda: focal_loss(
            head, features, target, chunk_size=size, dim=dim, strategy=strategy
        ),
        leaves,
    )
    assert_same_runs(got, run(lambda: plain_focal(head, features, target), leaves))


@strategies
@dims
@pytest.mark.parametrize("size", [2, 4])  # both uneven
def test_the_mean_of_all_voxels(strategy: StrategyName, dim: int, size: int) -> None:
    head, features, target = volume(0.4)
    leaves = (head, features)
    got = run(
        lambda: focal_loss_of_all(
            head, features, target, chunk_size=size, dim=dim, strategy=strategy
        ),
        leaves,
    )
    expected = run(
        lambda: (
            plain_focal(head, features, target) * (target != IGNORED).double().mean()
        ),
        leaves,
    )
    assert_same_runs(got, expected)


@strategies
def test_a_chunk_and_a_volume_of_which_all_is_ignored(strategy: StrategyName) -> None:
    head, features, target = volume(0.4)
    target[:, 2:5] = IGNORED
    leaves = (head, features)
    assert_same_runs(
        run(
            lambda: focal_loss(head, features, target, chunk_size=1, strategy=strategy),
            leaves,
        ),
        run(lambda: plain_focal(head, features, target), leaves),
    )
    target[:] = IGNORED
    nothing = run(
        lambda: focal_loss(head, features, target, chunk_size=3, strategy=strategy),
        leaves,
    )
    assert isinstance(nothing.result, Tensor)
    assert nothing.result.item() == 0
    for gradient in nothing.gradients.values():
        assert gradient is None or not gradient.any()


def test_a_mean_of_means_is_not_the_mean_of_what_is_kept() -> None:
    """Why `focal_loss` returns a sum and a count from each chunk."""
    head, features, target = volume()
    target[:, :4, 1:] = IGNORED

    def mean_of_kept(features: Tensor, target: Tensor) -> Tensor:
        return plain_focal(head, features, target)

    wrong = chunk_and_checkpoint(
        mean_of_kept, features, target, chunk_size=4, batch_dim=-3, out_dim="mean"
    )
    right = focal_loss(head, features, target, chunk_size=4)
    assert not torch.isclose(wrong, right, rtol=1e-3)
    assert_close(right, plain_focal(head, features, target), "loss")


@of_vectors
def test_a_head_that_looks_at_neighbours_is_chunked_along_the_batch(
    strategy: StrategyName,
) -> None:
    _, features, target = volume(0.4)
    head = nn.Conv3d(4, CLASSES, 3, padding=1).double()
    leaves = (head, features)
    for loss, plain in ((dice_loss, plain_dice), (focal_loss, plain_focal)):
        got = run(
            lambda loss=loss: loss(  # type: ignore[misc]
                head, features, target, chunk_size=2, dim=0, strategy=strategy
            ),
            leaves,
        )
        expected = run(
            lambda plain=plain: plain(head, features, target),  # type: ignore[misc]
            leaves,
        )
        assert_same_runs(got, expected)


def test_dice_has_not_one_number_to_take_gradients_of() -> None:
    with pytest.raises(RuntimeError, match=r"one (result|real number).*'auto'"):
        dice_loss(*volume(), chunk_size=2, strategy="grad_in_forward")


Loss = Callable[..., Tensor]


def per_slice(loss: Loss, *, learned: bool, **options: Any) -> float:
    """Return what a further slice takes at the peak, in units of its features."""

    def step(head: nn.Module, features: Tensor, target: Tensor) -> None:
        loss(head, features, target, **options).backward()
        head.zero_grad()
        features.grad = None

    def peak(depth: int) -> int:
        head, features, target = volume(0.2, 1, 4, depth, 16, 16)
        features.requires_grad = learned
        step(head, features, target)  # the first run may allocate what later ones reuse
        return measure_memory(step, head, features, target).peak_bytes

    return (peak(32) - peak(8)) / 24 / (4 * 16 * 16 * 8)


@pytest.mark.parametrize("loss", [plain_dice, plain_focal])
def test_a_further_slice_at_once(loss: Loss) -> None:
    assert per_slice(loss, learned=True) > 5


MOST: list[tuple[StrategyName, bool, float]] = [
    ("auto", True, 1.01),  # the gradient of its features
    ("auto", False, 0.01),  # and nothing if they are given: no logits, no one-hot
    ("non_reentrant", True, 2),  # it keeps a random state per chunk
    ("grad_in_forward", True, 2),  # the gradient before and after it is scaled
    ("grad_in_forward", False, 0.01),
]


@pytest.mark.parametrize(
    ("loss", "strategy", "learned", "most"),
    [(focal_loss, *case) for case in MOST] + [(dice_loss, *case) for case in MOST[:3]],
)
def test_a_further_slice_in_chunks(
    loss: Loss, strategy: StrategyName, most: float, *, learned: bool
) -> None:
    got = per_slice(loss, learned=learned, chunk_size=2, strategy=strategy)
    assert got < most
