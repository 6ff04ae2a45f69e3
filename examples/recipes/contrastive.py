"""Contrastive losses without the N x N block of logits, and GradCache as a function.

SigLIP after Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2023), CLIP
after Radford et al. (2021), GradCache after Gao et al. (2021). The pairs of a batch are
its diagonal: `image[i]` belongs to `text[i]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint

A = TypeVar("A")
B = TypeVar("B")


def siglip_rows(
    image: Tensor, label: Tensor, text: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    """Return the SigLIP loss of some images against all texts, a mean over the images.

    Args:
        image: `(rows, dim)`.
        label: `(rows,)`, which text belongs to each image: its place in the *batch*.
        text: `(N, dim)`.
        scale: `()`, what the logits are multiplied by.
        bias: `()`, what is added to them.
    """
    logits = scale * image @ text.T + bias
    columns = torch.arange(len(text), device=label.device)
    signed = torch.where(label[:, None] == columns, logits, -logits)
    return -F.logsigmoid(signed).sum(1).mean()


def siglip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    chunk_size: int | None,
    strategy: StrategyName = "grad_in_forward",
) -> Tensor:
    """Return the SigLIP loss of `image` and `text`, both `(N, dim)`.

    At most `chunk_size` rows of logits exist at any time, in backward as well.
    """
    label = torch.arange(len(image), device=image.device)
    return chunk_and_checkpoint(
        siglip_rows,
        image,
        label,
        text,
        scale,
        bias,
        chunk_size=chunk_size,
        batch_dim=(0, 0, None, None, None),
        out_dim="mean",
        strategy=strategy,
    )


def retrieval_rows(query: Tensor, label: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """Return the cross-entropy of finding, for each query, its key among all keys.

    Args:
        query: `(rows, dim)`.
        label: `(rows,)`, which key belongs to each query: its place in the *batch*.
        key: `(N, dim)`.
        scale: `()`, what the logits are multiplied by.
    """
    return F.cross_entropy(scale * query @ key.T, label)


def clip_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    *,
    chunk_size: int | None,
    strategy: StrategyName = "grad_in_forward",
) -> Tensor:
    """Return the CLIP loss of `image` and `text`, both `(N, dim)`.

    A chunk of rows has only a part of each column, over which no softmax can be taken.
    So each direction is chunked over its own queries: texts among images are rows, too.
    """
    label = torch.arange(len(image), device=image.device)

    def direction(query: Tensor, key: Tensor) -> Tensor:
        return chunk_and_checkpoint(
            retrieval_rows,
            query,
            label,
            key,
            scale,
            chunk_size=chunk_size,
            batch_dim=(0, 0, None, None),
            out_dim="mean",
            strategy=strategy,
        )

    return (direction(image, text) + direction(text, image)) / 2


def grad_cache_loss(
    image_encoder: Callable[[A], Tensor],
    images: A,
    text_encoder: Callable[[B], Tensor],
    texts: B,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    chunk_size: int | None,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return `loss(image_encoder(images), text_encoder(texts))`, by GradCache.

    The embeddings of the whole batch are computed `chunk_size` rows at a time, and each
    chunk is encoded again in backward, with the dropout that it had. What comes out is
    an ordinary loss: scale it, add to it, call backward.

    Args:
        image_encoder: From a batch of images to `(N, dim)`.
        images: The batch: a tensor, or any tree of tensors of N rows.
        text_encoder: From a batch of texts to `(N, dim)`.
        texts: The batch, such as `{"input_ids": ..., "attention_mask": ...}`.
        loss: Of all image and all text embeddings.
        chunk_size: Rows that are encoded at a time.
        strategy: For the encoders: not "grad_in_forward", which wants a loss.
    """
    image = chunk_and_checkpoint(
        image_encoder, images, chunk_size=chunk_size, strategy=strategy
    )
    text = chunk_and_checkpoint(
        text_encoder, texts, chunk_size=chunk_size, strategy=strategy
    )
    return loss(image, text)
