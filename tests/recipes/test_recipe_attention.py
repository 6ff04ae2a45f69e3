"""Attention in chunks of queries, and a decoder block, against the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from examples.recipes.attention import (
    DecoderBlock,
    attend,
    attention_by_sequence,
    causal_attention,
    feed_forward,
    residual,
    rotate,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import StrategyName, chunk_and_checkpoint
from chunkcheck.diagnostics import MemoryTrace, measure_memory, phase
from reference import assert_close, assert_same_runs, rows, run

BATCH, HEADS, LENGTH, SIZE = 2, 3, 10, 4
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
sizes = pytest.mark.parametrize("size", [1, 3, 4, LENGTH, None])


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.where(seen, -torch.inf).softmax(-1)
    return weights @ v


def plain_rotate(x: Tensor) -> Tensor:
    """Return RoPE of a whole sequence, as a product of complex numbers."""
    half = x.shape[-1] // 2
    wave = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * wave
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def plain_block(block: DecoderBlock, x: Tensor) -> Tensor:
    y = block.norm(x)
    k, v = (block.split(t) for t in block.key_value(y).chunk(2, -1))
    q = plain_rotate(block.split(block.query(y)))
    y = F.scaled_dot_product_attention(q, plain_rotate(k), v, is_causal=True)
    x = x + block.out(y.transpose(1, 2).flatten(2))
    update: Tensor = block.mlp(block.mlp_norm(x))
    return x + update


def heads(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (rows(BATCH, HEADS, length, SIZE) for _ in range(3))
    return q, k, v


@strategies
@sizes
@pytest.mark.parametrize("cap", [None, 1.5])
def test_attention_is_that_of_the_whole_sequence(
    strategy: StrategyName, size: int | None, cap: float | None
) -> None:
    q, k, v = heads()
    got = run(
        lambda: causal_attention(q, k, v, chunk_size=size, cap=cap, strategy=strategy),
        (q, k, v),
    )
    assert_same_runs(got, run(lambda: plain_attention(q, k, v, cap), (q, k, v)))


def test_a_chunk_sees_no_key_beyond_its_last_query() -> None:
    """The first chunks are the cheaper ones: half of the scores are never computed."""
    q, k, v = heads()
    k.data[..., 8:, :] = torch.nan  # even 0 * nan would be seen
    got = causal_attention(q, k, v, chunk_size=4)
    assert got[..., :8, :].isfinite().all()
    assert got[..., 8:, :].isnan().all()


def test_positions_made_inside_start_at_zero_in_every_chunk() -> None:
    """Why they are an argument."""
    q, k, v = heads()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.arange(q.shape[-2]), k, v)

    wrong = chunk_and_checkpoint(
        f, q, k, v, chunk_size=4, batch_dim=(2, None, None), out_dim=2
    )
    right = plain_attention(q, k, v)
    assert_close(wrong[..., :4, :], right[..., :4, :], "first chunk")
    assert not torch.isclose(wrong[..., 4:, :], right[..., 4:, :]).all(-1).any()


@strategies
@sizes
def test_rotary_chunks_are_those_of_the_whole_sequence(
    strategy: StrategyName, size: int | None
) -> None:
    q, _, _ = heads()
    got = run(
        lambda: chunk_and_checkpoint(
            rotate,
            q,
            torch.arange(LENGTH),
            chunk_size=size,
            batch_dim=(2, 0),
            out_dim=2,
            strategy=strategy,
        ),
        q,
    )
    assert_same_runs(got, run(lambda: plain_rotate(q), q))


def test_positions_are_exact_in_half_precision() -> None:
    x = torch.ones(2, 4)
    far = torch.tensor([256, 4097])
    got = rotate(x.bfloat16(), far)
    assert torch.allclose(got.float(), rotate(x, far), atol=2e-2)


@strategies
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("size", [3, None])
def test_two_batch_dims(
    strategy: StrategyName, sequences: int, size: int | None
) -> None:
    q, k, v = (rows(3, HEADS, LENGTH, SIZE) for _ in range(3))
    got = run(
        lambda: attention_by_sequence(
            q, k, v, sequences=sequences, chunk_size=size, strategy=strategy
        ),
        (q, k, v),
    )
    assert_same_runs(got, run(lambda: plain_attention(q, k, v), (q, k, v)))


def layers(dim: int) -> tuple[nn.Module, nn.Module]:
    mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
    return nn.LayerNorm(dim).double(), mlp.double()


@strategies
@pytest.mark.parametrize("size", [1, 7, None])  # 7: across the ends of sequences
def test_feed_forward_with_its_residual(
    strategy: StrategyName, size: int | None
) -> None:
    norm, mlp = layers(6)
    x = rows(BATCH, LENGTH, 6)
    leaves = (x, norm, mlp)
    got = run(
        lambda: feed_forward(x, norm, mlp, chunk_size=size, strategy=strategy), leaves
    )
    assert_same_runs(got, run(lambda: x + mlp(norm(x)), leaves))


@strategies
@sizes
def test_a_decoder_of_two_blocks(strategy: StrategyName, size: int | None) -> None:
    model = nn.Sequential(
        *(DecoderBlock(12, 3, chunk_size=size, strategy=strategy) for _ in range(2))
    ).double()
    x = rows(BATCH, LENGTH, 12)

    def plain() -> Tensor:
        y = x
        for block in model:
            assert isinstance(block, DecoderBlock)
            y = plain_block(block, y)
        return y

    assert_same_runs(run(lambda: model(x), (x, model)), run(plain, (x, model)))


def step_of(f: Callable[..., Tensor]) -> Callable[..., None]:
    """Return a training step over `f`."""

    def step(*args: Tensor) -> None:
        with phase("forward"):
            y = f(*args)
        y.sum().backward()
        for arg in args:
            arg.grad = None

    return step


def measured(f: Callable[..., Tensor], *args: Tensor) -> MemoryTrace[None]:
    step = step_of(f)
    step(*args)  # the first run may allocate what later ones reuse
    return measure_memory(step, *args)


@strategies
def test_four_times_the_length_takes_four_times_the_memory(
    strategy: StrategyName,
) -> None:
    def peak(f: Callable[..., Tensor], length: int) -> int:
        return measured(f, *heads(length)).peak_bytes

    def in_chunks(*args: Tensor) -> Tensor:
        q, k, v = args
        return causal_attention(q, k, v, chunk_size=16, strategy=strategy)

    few, many = (peak(in_chunks, n) for n in (128, 512))
    assert many < 4.5 * few
    few, whole = (peak(plain_attention, n) for n in (128, 512))
    assert whole > 13 * few
    assert many < whole / 20


@strategies
def test_the_residual_outside_takes_more(strategy: StrategyName) -> None:
    norm, mlp = layers(16)
    x = rows(4, 512, 16)
    unit = x.numel() * 8

    def inside(x: Tensor) -> Tensor:
        return feed_forward(x, norm, mlp, chunk_size=32, strategy=strategy)

    def outside(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(
            nn.Sequential(norm, mlp),
            x.flatten(0, 1),
            chunk_size=32,
            strategy=strategy,
        )
        return x + y.reshape(x.shape)

    within, beside = measured(inside, x), measured(outside, x)
    forward = beside.phases["forward"].peak_bytes - within.phases["forward"].peak_bytes
    assert forward > 0.7 * unit  # the update of all tokens, less a chunk's hidden layer
    assert beside.peak_bytes - within.peak_bytes > 0.2 * unit
    if strategy == "auto":  # which keeps nothing of its own
        assert within.peak_bytes < 2.5 * unit
        assert beside.peak_bytes > 2.9 * unit
    plain = measured(lambda x: residual(x, norm, mlp), x)
    assert plain.peak_bytes > 15 * unit


def test_what_a_further_position_takes_of_a_block() -> None:
    """In units of its features: keys, values, their gradients, those of `x`."""
    block = DecoderBlock(32, 2, chunk_size=4).double()

    def of_each(f: Callable[[Tensor], Tensor]) -> float:
        few, many = (measured(f, rows(2, n, 32)).peak_bytes for n in (64, 256))
        return (many - few) / (256 - 64) / (2 * 32 * 8)

    assert of_each(block) < 10
    assert of_each(lambda x: plain_block(block, x)) > 20
