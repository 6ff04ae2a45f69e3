"""The two parts of a Llama layer that take the memory, such that rows can be cut.

Without norms and rotary embeddings, which change neither the memory nor the time much.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, silu


class Layer(nn.Module):
    """A layer as a function of rows, here tokens of a sequence.

    Attributes:
        name: What to call it.
        dims: Of the arguments of `rows`, the dim of the tokens; None for one that is
            passed whole.
    """

    name: str
    dims: tuple[int | None, ...]

    @abstractmethod
    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of `rows` for all tokens."""

    @abstractmethod
    def rows(self, *arguments: Tensor) -> Tensor:
        """Return the result for some tokens, which stand in dim 1."""


class GatedMLP(Layer):
    """The gated MLP: each token is on its own."""

    name = "gated MLP"
    dims = (1,)

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return `x` alone."""
        return (x,)

    def rows(self, *arguments: Tensor) -> Tensor:
        """Return the result for some tokens."""
        (x,) = arguments
        y: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return y


class Attention(Layer):
    """Causal attention, cut over the positions of the queries.

    A query needs the keys and values of all tokens before it, so these are computed
    once, outside, and passed whole. With them, the queries are independent.
    """

    name = "attention"
    dims = (1, 0, None, None)

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv_width = width // heads * kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return `x`, the positions (on the CPU: they are read), keys and values."""
        positions = torch.arange(x.shape[1], device="cpu")
        return x, positions, self.k(x), self.v(x)

    def rows(self, *arguments: Tensor) -> Tensor:
        """Return the result for consecutive queries."""
        x, positions, keys, values = arguments
        stop = int(positions[-1]) + 1
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            kv[:, :stop]
            .unflatten(-1, (self.kv_heads, -1))
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.kv_heads, dim=1)
            for kv in (keys, values)
        )
        mask = causal_lower_right(q.shape[2], stop)  # the last query sees all keys
        y = scaled_dot_product_attention(q, k, v, mask)
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result
