"""Causal attention a few queries at a time, in a block of a decoder in two calls.

For scores of your own: a cap, a bias, dropout, a mask that no fused kernel has. Where
`torch.nn.functional.scaled_dot_product_attention` does all you need, call that: it
keeps no scores either. `batch`, `heads`, `length` and `size` (of a head) are the dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from chunkcheck import StrategyName, chunk_and_checkpoint


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn pairs of features by an angle that grows with the position (RoPE).

    Args:
        x: `(..., rows, size)`, of which feature i pairs with feature i + size / 2.
        position: `(rows,)`, the place of each row in the *whole* sequence.
        base: Of the wavelengths.
    """
    half = x.shape[-1] // 2
    # A position in bfloat16 would be wrong from 257 on.
    exact = torch.promote_types(x.dtype, torch.float32)
    power = torch.arange(half, device=x.device, dtype=exact) / half
    angle = position.to(x.device, exact)[:, None] * base**-power
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q: Tensor, position: Tensor, k: Tensor, v: Tensor, cap: float | None = None
) -> Tensor:
    """Attend from some queries to the keys up to the position of each.

    Args:
        q: `(..., rows, size)`.
        position: `(rows,)`, the place of each query in the *whole* sequence, ascending;
            on the CPU, where its last entry can be read without waiting for a device.
        k: `(..., length, size)`.
        v: `(..., length, size)`.
        cap: The most that a score can be, through a tanh; by default no limit.
    """
    end = int(position[-1]) + 1  # no query of this chunk sees further
    k, v = k[..., :end, :], v[..., :end, :]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    hidden = torch.arange(end, device=position.device) > position[:, None]
    weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
    return weights @ v


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int | None,
    cap: float | None = None,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return causal attention, `(..., length, size)` each, `chunk_size` queries a time.

    Keys and values pass whole, with gradients. Which queries a chunk has cannot be told
    from their shape, so that the positions are an argument, cut as the queries are.
    """
    position = torch.arange(q.shape[-2], device="cpu")
    return chunk_and_checkpoint(
        attend,
        q,
        position,
        k,
        v,
        cap,
        chunk_size=chunk_size,
        batch_dim=(-2, 0, None, None, None),
        out_dim=q.ndim - 2,
        strategy=strategy,
    )


def attention_by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequences: int | None,
    chunk_size: int | None,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return `causal_attention` of a few sequences at a time: two batch dims.

    The outer chunks cut queries, keys and values along the batch, the inner ones the
    queries alone. It recomputes twice: only for keys and values that are themselves too
    much for one call.
    """

    def some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, chunk_size=chunk_size, strategy=strategy)

    return chunk_and_checkpoint(some, q, k, v, chunk_size=sequences, strategy=strategy)


def residual(x: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
    """Return `x + mlp(norm(x))`."""
    update: Tensor = mlp(norm(x))
    return x + update


def feed_forward(
    x: Tensor,
    norm: nn.Module,
    mlp: nn.Module,
    *,
    chunk_size: int | None,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return `x + mlp(norm(x))` for tokens, `(batch, length, dim)`.

    The sum is inside: outside, it would take the update of the whole sequence beside
    the result, and in backward a second gradient of `x`. Batch and length are made one
    dim of tokens, so that one chunk size serves sequences of any number and length.
    """
    tokens = chunk_and_checkpoint(
        residual,
        x.flatten(0, 1),
        norm,
        mlp,
        chunk_size=chunk_size,
        strategy=strategy,
    )
    return tokens.reshape(x.shape)


class DecoderBlock(nn.Module):
    """Attention and an MLP, each with a residual connection around it.

    The first call makes keys and values, which every query needs. All else depends on
    one position alone: query, attention, output, MLP and both sums are the second.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        chunk_size: int | None,
        strategy: StrategyName = "auto",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.chunk_size = chunk_size
        self.strategy = strategy
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def split(self, x: Tensor) -> Tensor:
        """Turn `(batch, rows, dim)` into `(batch, heads, rows, size)`."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def keys_and_values(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return both for some positions, `(batch, heads, rows, size)`."""
        k, v = self.key_value(self.norm(x)).chunk(2, -1)
        return rotate(self.split(k), position), self.split(v)

    def positions(self, x: Tensor, position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the block's result for some positions, `(batch, rows, dim)`."""
        q = rotate(self.split(self.query(self.norm(x))), position)
        x = x + self.out(attend(q, position, k, v).transpose(1, 2).flatten(2))
        return residual(x, self.mlp_norm, self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on `x`, `(batch, length, dim)`."""
        position = torch.arange(x.shape[1], device="cpu")
        k, v = chunk_and_checkpoint(
            self.keys_and_values,
            x,
            position,
            chunk_size=self.chunk_size,
            batch_dim=(1, 0),
            out_dim=2,
            strategy=self.strategy,
        )
        return chunk_and_checkpoint(
            self.positions,
            x,
            position,
            k,
            v,
            chunk_size=self.chunk_size,
            batch_dim=(1, 0, None, None),
            out_dim=1,
            strategy=self.strategy,
        )
