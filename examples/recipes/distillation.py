"""Distillation over a vocabulary, of which logits exist for a few rows only.

After Hinton et al., "Distilling the Knowledge in a Neural Network" (2015). Student and
teacher are both projected inside the chunk, so that neither has logits of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint


class Head(NamedTuple):
    """What makes logits of hidden states: `(classes, width)` and `(classes,)`."""

    weight: Tensor
    bias: Tensor | None = None


def distillation_loss(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    mask: Tensor,
    student: Head,
    teacher: Head,
    *,
    chunk_size: int | None,
    dim: int = 0,
    temperature: float = 1.0,
    strategy: StrategyName = "grad_in_forward",
) -> Tensor:
    """Return KL(teacher || student), the mean over the rows that count.

    It is scaled by the square of the temperature, which keeps the gradients as large as
    they are at 1. Nan, with gradients of 0, if no row counts.

    Args:
        student_hidden: `(rows, width)` or `(batch, sequence, width)`.
        teacher_hidden: The same; its width may differ. It gets no gradient.
        mask: `(rows,)` or `(batch, sequence)`, true where a row counts.
        student: The student's head.
        teacher: The teacher's head; it gets no gradient either.
        chunk_size: How many rows, samples or positions have logits at a time.
        dim: What to chunk along, counted from the front.
        temperature: What both logits are divided by.
        strategy: As in `chunk_and_checkpoint`.
    """

    def sum_and_count(
        student_hidden: Tensor,
        teacher_hidden: Tensor,
        mask: Tensor,
        student: Head,
        teacher: Head,
    ) -> tuple[Tensor, Tensor]:
        loss = divergence(student_hidden, teacher_hidden, student, teacher, temperature)
        return loss.where(mask, 0).sum(), mask.sum()

    total, count = chunk_and_checkpoint(
        sum_and_count,
        student_hidden,
        teacher_hidden,
        mask,
        student,
        teacher,
        chunk_size=chunk_size,
        batch_dim=(dim, dim, dim, None, None),
        out_dim="sum",
        strategy=strategy,
    )
    empty = count == 0
    return (total / count.masked_fill(empty, 1)).masked_fill(empty, torch.nan)


def divergence(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    student: Head,
    teacher: Head,
    temperature: float,
) -> Tensor:
    """Return the scaled divergence of each row, unchunked, in the shape of the mask."""
    found = F.linear(student_hidden, *student).div(temperature).log_softmax(-1)
    with torch.no_grad():
        wanted = F.linear(teacher_hidden, *teacher).div(temperature).log_softmax(-1)
    each = F.kl_div(found, wanted, reduction="none", log_target=True)
    return each.sum(-1) * temperature**2
