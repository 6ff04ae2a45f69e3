"""Distillation, chunked, against the divergence of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from examples.recipes.distillation import Head, distillation_loss, divergence
from torch import Tensor

from chunkcheck import StrategyName
from chunkcheck.diagnostics import measure_memory
from reference import assert_close, assert_same_runs, rows, run

ROWS, CLASSES = 11, 7
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant", "grad_in_forward"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


class Batch(NamedTuple):
    student_hidden: Tensor
    teacher_hidden: Tensor
    mask: Tensor
    student: Head
    teacher: Head

    def plain(self, temperature: float = 1.0) -> Tensor:
        def log_p(hidden: Tensor, head: Head) -> Tensor:
            logits = hidden[self.mask] @ head.weight.T
            logits = logits if head.bias is None else logits + head.bias
            return (logits / temperature).log_softmax(-1)

        p = log_p(self.teacher_hidden, self.teacher).detach()
        q = log_p(self.student_hidden, self.student)
        return (p.exp() * (p - q)).sum(-1).mean() * temperature**2


def batch(*shape: int, masked: str = "some", bias: bool = True) -> Batch:
    """Return hidden states of two widths, a mask and both heads."""
    shape = shape or (ROWS,)
    mask = torch.ones(shape, dtype=torch.bool)
    if masked == "some":  # all of the first chunks, and others
        mask.flatten()[:4] = False
        mask.flatten()[6::3] = False
    elif masked == "all":
        mask[:] = False
    return Batch(
        rows(*shape, 4),
        rows(*shape, 6),
        mask,
        Head(rows(CLASSES, 4), rows(CLASSES) if bias else None),
        Head(rows(CLASSES, 6), rows(CLASSES) if bias else None),
    )


@strategies
@pytest.mark.parametrize("size", [1, 4, None])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_divergence_of_all_rows(
    strategy: StrategyName,
    size: int | None,
    temperature: float,
    masked: str,
    *,
    bias: bool,
) -> None:
    """DeepSpeed PR #8587 and Automodel #3803: the mean is exact under any mask.

    The teacher gets no gradient, though its tensors require one.
    """
    data = batch(masked=masked, bias=bias)
    got = run(
        lambda: distillation_loss(
            *data, chunk_size=size, temperature=temperature, strategy=strategy
        ),
        data,
    )
    assert_same_runs(got, run(lambda: data.plain(temperature), data))
    for name in ("[1]", "[4][0]"):
        assert got.gradients[name] is None
    assert isinstance(got.result, Tensor)
    assert bool(got.result.isnan()) == (masked == "all")


@strategies
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_of_a_batch_of_sequences(strategy: StrategyName, dim: int) -> None:
    data = batch(3, 5)
    got = run(
        lambda: distillation_loss(*data, chunk_size=2, dim=dim, strategy=strategy), data
    )
    assert_same_runs(got, run(data.plain, data))


@strategies
def test_what_is_done_with_the_loss_reaches_every_gradient(
    strategy: StrategyName,
) -> None:
    """As a part of a training loss, and with a second backward through the graph."""
    data = batch()

    def further(loss: Tensor) -> Tensor:
        return 0.25 * loss + data.student.weight.square().sum()

    def call() -> Tensor:
        loss = distillation_loss(*data, chunk_size=4, strategy=strategy)
        loss.backward(retain_graph=True)
        data.student_hidden.grad = data.student.weight.grad = None
        if data.student.bias is not None:
            data.student.bias.grad = None
        return further(loss)

    assert_same_runs(run(call, data), run(lambda: further(data.plain()), data))


@strategies
def test_a_student_that_agrees_has_no_loss(strategy: StrategyName) -> None:
    """The teacher's own tensors: 0, and gradients of 0."""
    data = batch()
    data = data._replace(student_hidden=data.teacher_hidden, student=data.teacher)
    loss = distillation_loss(*data, chunk_size=4, temperature=2, strategy=strategy)
    assert_close(loss + 1, torch.ones_like(loss), "loss")
    loss.backward()
    assert data.student_hidden.grad is not None
    assert data.student_hidden.grad.abs().max() < 1e-12


@strategies
def test_memory_does_not_grow_with_the_rows(strategy: StrategyName) -> None:
    def excess(loss: Callable[[Batch], Tensor], count: int, copies: int = 1) -> int:
        data = Batch(
            torch.randn(count, 8, requires_grad=True),
            torch.randn(count, 6),
            torch.rand(count) < 0.7,
            Head(torch.randn(2048, 8, requires_grad=True)),
            Head(torch.randn(2048, 6)),
        )
        hidden, weight = data.student_hidden, data.student.weight

        def step() -> None:
            hidden.grad = weight.grad = None
            loss(data).backward()

        step()
        peak = measure_memory(step).peak_bytes
        return peak - copies * (hidden.nbytes + weight.nbytes)

    def chunked(data: Batch) -> Tensor:
        return distillation_loss(*data, chunk_size=64, strategy=strategy)

    def plain(data: Batch) -> Tensor:
        hidden, teacher_hidden, mask, student, teacher = data
        each = divergence(hidden, teacher_hidden, student, teacher, 1.0)
        return each[mask].mean()

    # The strategy holds the gradients before and after they are scaled.
    copies = 2 if strategy == "grad_in_forward" else 1
    few, many = (excess(chunked, count, copies) for count in (256, 1024))
    one_buffer = 64 * 2048 * 4
    # torch's own checkpoint holds the parts of a gradient and the whole at once.
    assert many - few < one_buffer / (10 if strategy == "non_reentrant" else 20)
    assert excess(plain, 1024) > 3.9 * excess(plain, 256)
    assert excess(plain, 1024) > 14 * many
