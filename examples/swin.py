"""A small Swin-style image classifier: the model that the demo trains.

After Liu et al., "Swin Transformer" (2021): attention within windows, which every
second block shifts by half a window so that information crosses their borders. One
stage, no dropout, and written to be read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cut(x: Tensor, size: int) -> Tensor:
    """Cut `(batch, rows, columns, dim)` into `(batch, windows, tokens, dim)`."""
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


def join(x: Tensor, size: int, rows: int) -> Tensor:
    """Undo `cut`."""
    x = x.unflatten(1, (rows // size, -1)).unflatten(3, (size, size)).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


def shifted_window_mask(rows: int, size: int) -> Tensor:
    """Say which tokens of the shifted windows may not see each other.

    The shift wraps the image around, so that a window at its border holds tokens from
    opposite sides, which are no neighbours.

    Args:
        rows: Rows and columns of tokens in the image.
        size: Rows and columns of tokens in a window, which is shifted by half of them.

    Returns:
        `(windows, tokens, tokens)`, to be added to the attention scores: -100 between
        tokens from opposite sides, 0 elsewhere.
    """
    wrapped = (torch.arange(rows) >= rows - size // 2).float()
    side = wrapped[:, None] + 2 * wrapped  # which of the four corners a token is from
    side = cut(side[None, :, :, None], size)[0, :, :, 0]
    return -100.0 * (side[:, :, None] != side[:, None, :])


class WindowAttention(nn.Module):
    """Self-attention within each window, with a learned bias per relative position."""

    offset: Tensor

    def __init__(self, dim: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(heads, (2 * size - 1) ** 2))
        row, column = (
            torch.arange(size * size) // size,
            torch.arange(size * size) % size,
        )
        rows, columns = row[:, None] - row, column[:, None] - column
        offset = (rows + size - 1) * (2 * size - 1) + columns + size - 1
        self.register_buffer("offset", offset)  # for each two tokens, which bias

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend within the windows of `x`, `(batch, windows, tokens, dim)`."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias[:, self.offset]
        if mask is not None:
            scores = scores + mask[:, None]  # the same for every image and head
        y: Tensor = self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))
        return y


class Block(nn.Module):
    """Window attention and an MLP, each with a residual connection around it."""

    def __init__(self, dim: int, heads: int, size: int, *, shifted: bool) -> None:
        super().__init__()
        self.size = size
        self.shift = size // 2 if shifted else 0
        self.norm = nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads, size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run the block on `x`, `(batch, rows, columns, dim)`."""
        shift = self.shift
        y = cut(self.norm(x).roll((-shift, -shift), (1, 2)), self.size)
        y = join(self.attention(y, mask if shift else None), self.size, x.shape[1])
        x = x + y.roll((shift, shift), (1, 2))
        update: Tensor = self.mlp(x)
        return x + update


class Swin(nn.Module):
    """Embed patches of square images of one channel, mix them in blocks, classify."""

    mask: Tensor

    def __init__(
        self,
        *,
        image: int = 8,
        patch: int = 2,
        window: int = 2,
        dim: int = 40,
        heads: int = 4,
        pairs: int = 2,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patch = patch
        rows = image // patch
        self.position = nn.Parameter(torch.randn(rows, rows, dim) / 2)
        self.embed = nn.Linear(patch * patch, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, window, shifted=shifted)
            for _ in range(pairs)
            for shifted in (False, True)
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        self.register_buffer("mask", shifted_window_mask(rows, window))

    def tokens(self, images: Tensor) -> Tensor:
        """Turn `images`, `(batch, height, width)`, into a token for each patch."""
        patch = (-1, self.patch)
        patches = images.unflatten(2, patch).unflatten(1, patch).transpose(2, 3)
        x: Tensor = self.embed(patches.flatten(3))
        return x + self.position

    def logits(self, x: Tensor) -> Tensor:
        """Turn the tokens of each image into one score per class."""
        y: Tensor = self.head(x.mean((1, 2)))
        return y

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        """Classify `images`; `mask` is this model's own."""
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x, mask)
        return self.logits(x)
