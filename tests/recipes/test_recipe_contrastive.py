"""Contrastive losses and GradCache against the whole N x N block and the plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples.recipes.contrastive import (
    clip_loss,
    grad_cache_loss,
    siglip_loss,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import StrategyName, chunk_and_checkpoint
from chunkcheck.diagnostics import MemoryTrace, measure_memory, phase
from reference import assert_close, assert_same_runs, rows, run

N = 10
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant", "grad_in_forward"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
encoders = pytest.mark.parametrize("strategy", STRATEGIES[:2])  # what gives no loss
sizes = pytest.mark.parametrize("size", [1, 3, 4, N, None])


def plain_siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(image), dtype=image.dtype, device=image.device) - 1
    logits = scale * image @ text.T + bias
    return -F.logsigmoid(signs * logits).sum() / len(image)


def plain_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, label = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, label) + F.cross_entropy(logits.T, label)) / 2


class Towers(nn.Module):
    """Two encoders, a scale that is learned by its logarithm, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(4, 6)
        self.text = nn.Linear(5, 6)
        self.log_scale = nn.Parameter(torch.tensor(1.2))
        self.bias = nn.Parameter(torch.tensor(-0.7))
        self.double()

    def embeddings(self, pixels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        image = F.normalize(self.image(pixels), dim=-1)
        return image, F.normalize(self.text(words), dim=-1)


@strategies
@sizes
def test_siglip_is_that_of_the_whole_block(
    strategy: StrategyName, size: int | None
) -> None:
    towers, pixels, words = Towers(), rows(N, 4), rows(N, 5)

    def step(loss: Callable[..., Tensor], **options: Any) -> Tensor:
        image, text = towers.embeddings(pixels, words)
        return loss(image, text, towers.log_scale.exp(), towers.bias, **options)

    leaves = (pixels, words, towers)
    expected = run(lambda: step(plain_siglip), leaves)
    assert_same_runs(
        run(lambda: step(siglip_loss, chunk_size=size, strategy=strategy), leaves),
        expected,
    )


@strategies
@sizes
def test_clip_is_that_of_the_whole_block(
    strategy: StrategyName, size: int | None
) -> None:
    towers, pixels, words = Towers(), rows(N, 4), rows(N, 5)

    def step(loss: Callable[..., Tensor], **options: Any) -> Tensor:
        image, text = towers.embeddings(pixels, words)
        return loss(image, text, towers.log_scale.exp(), **options)

    leaves = (pixels, words, towers)
    expected = run(lambda: step(plain_clip), leaves)
    assert_same_runs(
        run(lambda: step(clip_loss, chunk_size=size, strategy=strategy), leaves),
        expected,
    )


@strategies
@pytest.mark.parametrize("scale", [1e-3, 1e3])  # flat, and far into the tails
def test_extreme_scales(strategy: StrategyName, scale: float) -> None:
    image, text = rows(N, 6), rows(N, 6)
    factor = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    leaves = (image, text, factor, bias)
    options: Any = {"chunk_size": 3, "strategy": strategy}
    assert_same_runs(
        run(lambda: siglip_loss(image, text, factor, bias, **options), leaves),
        run(lambda: plain_siglip(image, text, factor, bias), leaves),
    )
    assert_same_runs(
        run(lambda: clip_loss(image, text, factor, **options), leaves),
        run(lambda: plain_clip(image, text, factor), leaves),
    )


@strategies
@pytest.mark.parametrize("frozen", ["image", "text", "scale"])
def test_what_is_frozen_gets_no_gradient(strategy: StrategyName, frozen: str) -> None:
    leaves = {
        "image": rows(N, 6),
        "text": rows(N, 6),
        "scale": rows(),
        "bias": rows(),
    }
    leaves[frozen].requires_grad = False
    got = run(lambda: siglip_loss(**leaves, chunk_size=4, strategy=strategy), leaves)
    assert_same_runs(got, run(lambda: plain_siglip(**leaves), leaves))


@strategies
def test_the_loss_is_one_term_of_many(strategy: StrategyName) -> None:
    image, text, scale = rows(N, 6), rows(N, 6), rows()
    leaves = (image, text, scale)
    assert_same_runs(
        run(
            lambda: (
                0.25 * clip_loss(image, text, scale, chunk_size=4, strategy=strategy)
                + image.square().mean()
            ),
            leaves,
        ),
        run(
            lambda: 0.25 * plain_clip(image, text, scale) + image.square().mean(),
            leaves,
        ),
    )


@strategies
def test_evaluation_without_gradients(strategy: StrategyName) -> None:
    image, text, scale, bias = rows(N, 6), rows(N, 6), rows(), rows()
    with torch.no_grad():
        got = siglip_loss(image, text, scale, bias, chunk_size=4, strategy=strategy)
    assert not got.requires_grad
    assert_close(got, plain_siglip(image, text, scale, bias), "loss")


def siglip_step(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, strategy: Any
) -> None:
    """Train on a block of rows at a time, or on the whole one if `strategy` is None."""
    with phase("forward"):
        if strategy is None:
            loss = plain_siglip(image, text, scale, bias)
        else:
            loss = siglip_loss(
                image, text, scale, bias, chunk_size=16, strategy=strategy
            )
    with phase("backward"):
        loss.backward()
    image.grad = text.grad = scale.grad = bias.grad = None


def clip_step(image: Tensor, text: Tensor, scale: Tensor, strategy: Any) -> None:
    """Do the same for CLIP."""
    if strategy is None:
        loss = plain_clip(image, text, scale)
    else:
        loss = clip_loss(image, text, scale, chunk_size=16, strategy=strategy)
    loss.backward()
    image.grad = text.grad = scale.grad = None


@functools.cache
def measured(step: Callable[..., None], strategy: Any, n: int) -> MemoryTrace[None]:
    """Measure a step on `n` pairs; its first run may allocate what later ones reuse."""
    scalars = 1 if step is clip_step else 2
    args = [rows(n, 8), rows(n, 8), *(rows() for _ in range(scalars)), strategy]
    step(*args)
    return measure_memory(step, *args)


@strategies
@pytest.mark.parametrize("step", [siglip_step, clip_step])
def test_four_times_the_pairs_take_four_times_the_memory(
    step: Callable[..., None], strategy: StrategyName
) -> None:
    few, many = (measured(step, strategy, n).peak_bytes for n in (128, 512))
    assert many < 4.1 * few
    few, whole = (measured(step, None, n).peak_bytes for n in (128, 512))
    assert whole > 13 * few
    assert many < whole / 8


@strategies
def test_open_clip_pr_1214_no_block_is_kept_until_backward(
    strategy: StrategyName,
) -> None:
    """A chunked SigLIP loss that autograd keeps every block of saves nothing."""
    n = 512
    block = n * n * 8
    kept = measured(siglip_step, "none", n).phases["forward"].held_bytes
    assert kept > block
    held = measured(siglip_step, strategy, n).phases["forward"].held_bytes
    assert held < block / 10


class TextEncoder(nn.Module):
    """A mean over the tokens that the mask keeps, with dropout; counts its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.drop = nn.Dropout(0.4)
        self.out = nn.Linear(8, 6)
        self.double()
        self.seen: list[int] = []

    def forward(self, batch: dict[str, Any]) -> Tensor:
        assert batch.get("modality", "text") == "text"
        self.seen.append(len(batch["input_ids"]))
        hidden = self.drop(self.embed(batch["input_ids"]))
        mask = batch["attention_mask"][..., None]
        y: Tensor = self.out((hidden * mask).sum(1) / mask.sum(1))
        return F.normalize(y, dim=-1)


class Pair(nn.Module):
    """Two encoders with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(4, 9), nn.GELU(), nn.Dropout(0.4), nn.Linear(9, 6)
        ).double()
        self.text = TextEncoder()


def texts(n: int) -> dict[str, Any]:
    """Return a batch of texts as a tokenizer gives it, and an entry that is no row."""
    mask = torch.arange(7) < torch.randint(1, 8, (n, 1))
    return {
        "input_ids": torch.randint(20, (n, 7)),
        "attention_mask": mask.double(),
        "modality": "text",
    }


def cut(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        key: value[start:stop] if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def loop_loss(
    pair: Pair,
    pixels: Tensor,
    words: dict[str, Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    size: int,
) -> Tensor:
    """Return the loss of a loop that keeps everything: the oracle of GradCache."""
    starts = range(0, len(pixels), size)
    image = torch.cat([pair.image(pixels[i : i + size]) for i in starts])
    text = torch.cat([pair.text(cut(words, i, i + size)) for i in starts])
    return loss(image, text)


def seeded(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def from_the_same_state() -> Tensor:
        torch.manual_seed(3)
        return call()

    return from_the_same_state


@encoders
@pytest.mark.parametrize("size", [1, 3, 4, N])
def test_grad_cache_is_the_loop(strategy: StrategyName, size: int) -> None:
    """sentence-transformers PR #3862: a random state of the wrong object, unnoticed.

    With one such fault, the recompute has other dropout, and gradients are silently
    wrong. The same PR: an entry that is no tensor was cut like rows, and every chunk's
    gradient but the last one's was dropped.
    """
    pair, pixels, words, scale = Pair(), rows(N, 4), texts(N), rows()

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return plain_clip(image, text, scale)

    leaves = (pixels, pair, scale)
    expected = run(seeded(lambda: loop_loss(pair, pixels, words, loss, size)), leaves)
    got = run(
        seeded(
            lambda: grad_cache_loss(
                pair.image,
                pixels,
                pair.text,
                words,
                loss,
                chunk_size=size,
                strategy=strategy,
            )
        ),
        leaves,
    )
    assert_same_runs(got, expected)
    gradient = got.gradients["[0]"]
    assert gradient is not None
    assert gradient.abs().sum(1).gt(0).all()


@encoders
def test_no_tail_row_is_dropped(strategy: StrategyName) -> None:
    pair, words = Pair(), texts(N)
    text = chunk_and_checkpoint(pair.text, words, chunk_size=4, strategy=strategy)
    assert text.shape == (N, 6)
    assert pair.text.seen == [4, 4, 2]
    text.sum().backward()
    assert sorted(pair.text.seen[3:]) == [2, 4, 4]


@encoders
def test_each_parameter_is_delivered_one_gradient(strategy: StrategyName) -> None:
    """sentence-transformers #4027: one all-reduce per chunk, since each delivers."""
    pair, pixels, words = Pair(), rows(N, 4), texts(N)
    delivered: list[Tensor] = []
    for parameter in pair.parameters():
        parameter.register_post_accumulate_grad_hook(delivered.append)
    one = torch.ones((), dtype=torch.float64)
    grad_cache_loss(
        pair.image,
        pixels,
        pair.text,
        words,
        lambda image, text: plain_clip(image, text, one),
        chunk_size=3,
        strategy=strategy,
    ).backward()
    assert len(delivered) == len(list(pair.parameters()))
    assert {id(p) for p in delivered} == {id(p) for p in pair.parameters()}


@encoders
@pytest.mark.parametrize("of_loss", STRATEGIES)
def test_grad_cache_with_a_chunked_loss(
    strategy: StrategyName, of_loss: StrategyName
) -> None:
    pair, pixels, words, scale, bias = Pair(), rows(N, 4), texts(N), rows(), rows()
    leaves = (pixels, pair, scale, bias)

    def in_chunks(image: Tensor, text: Tensor) -> Tensor:
        return siglip_loss(image, text, scale, bias, chunk_size=3, strategy=of_loss)

    got = run(
        seeded(
            lambda: grad_cache_loss(
                pair.image,
                pixels,
                pair.text,
                words,
                in_chunks,
                chunk_size=4,
                strategy=strategy,
            )
        ),
        leaves,
    )
    expected = run(
        seeded(
            lambda: loop_loss(
                pair,
                pixels,
                words,
                lambda image, text: plain_siglip(image, text, scale, bias),
                4,
            )
        ),
        leaves,
    )
    assert_same_runs(got, expected)


def grad_cache_step(
    encoder: nn.Module, pixels: Tensor, words: Tensor, size: int | None
) -> None:
    """Train on chunks of pairs, or on all at once if `size` is None."""
    one = torch.ones((), dtype=torch.float64)
    if size is None:
        loss = plain_siglip(encoder(pixels), encoder(words), one, one)
    else:
        loss = grad_cache_loss(
            encoder,
            pixels,
            encoder,
            words,
            lambda image, text: siglip_loss(image, text, one, one, chunk_size=size),
            chunk_size=size,
        )
    loss.backward()
    encoder.zero_grad()


def test_grad_cache_keeps_embeddings_alone() -> None:
    """What each further pair takes is some embeddings, not what its encoding took."""
    wide = 512
    encoder = nn.Sequential(
        nn.Linear(4, wide), nn.GELU(), nn.Dropout(0.4), nn.Linear(wide, 6)
    ).double()

    def of_each(size: int | None) -> float:
        peaks = []
        for n in (64, 256):
            args = (encoder, rows(n, 4, grad=False), rows(n, 4, grad=False), size)
            grad_cache_step(*args)
            peaks.append(measure_memory(grad_cache_step, *args).peak_bytes)
        return (peaks[1] - peaks[0]) / (256 - 64)

    hidden = wide * 8
    assert of_each(None) > 6 * hidden
    assert of_each(16) < 0.4 * hidden
