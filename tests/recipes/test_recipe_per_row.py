"""A loss per token, chunked, under whatever gradient comes in for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from examples.recipes.per_row import (
    IGNORED,
    losses_of_tokens,
    token_losses,
    weighted_loss,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import StrategyName
from chunkcheck.diagnostics import measure_memory
from reference import assert_close, assert_same_runs, rows, run

WIDTH, CLASSES = 4, 7
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant", "grad_in_forward"]
of_rows = pytest.mark.parametrize("strategy", STRATEGIES[:2])
of_a_sum = pytest.mark.parametrize("strategy", STRATEGIES)
sizes = pytest.mark.parametrize("size", [1, 4, 50, None])


class Batch(NamedTuple):
    hidden: Tensor
    target: Tensor
    weight: Tensor
    bias: Tensor

    def plain(self) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        # torch has the classes in dim 1.
        return F.cross_entropy(logits.movedim(-1, 1), self.target, reduction="none")


def batch(*shape: int) -> Batch:
    """Return hidden states, targets and a head."""
    shape = shape or (11,)
    target = torch.randint(CLASSES, shape)
    target.flatten()[[0, 5]] = IGNORED
    return Batch(rows(*shape, WIDTH), target, rows(CLASSES, WIDTH), rows(CLASSES))


@of_rows
@sizes
def test_every_row_has_a_gradient_of_its_own(
    strategy: StrategyName, size: int | None
) -> None:
    """`run` gives backward a random one for each."""
    data = batch()
    got = run(lambda: token_losses(*data, chunk_size=size, strategy=strategy), data)
    assert_same_runs(got, run(data.plain, data))


@of_rows
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_of_a_batch_of_sequences(strategy: StrategyName, dim: int) -> None:
    data = batch(3, 5)
    got = run(
        lambda: token_losses(*data, chunk_size=2, dim=dim, strategy=strategy), data
    )
    assert_same_runs(got, run(data.plain, data))


FURTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "first row unused": lambda losses: losses[1:].sum(),
    "most rows unused": lambda losses: losses[6],
    "largest rows": lambda losses: losses.topk(3).values.sum(),
    "surrogate": lambda losses: (losses - losses.detach()).exp().clamp(max=1).mean(),
    "higher power": lambda losses: losses.pow(3).sum(),
    "both signs": lambda losses: losses @ torch.linspace(-1, 1, 11).to(losses),
}


@of_rows
@pytest.mark.parametrize("further", FURTHER.values(), ids=FURTHER)
def test_liger_968_all_rows_get_the_gradient_of_the_first(
    strategy: StrategyName, further: Callable[[Tensor], Tensor]
) -> None:
    data = batch()
    data.target[0] = 3
    got = run(
        lambda: further(token_losses(*data, chunk_size=4, strategy=strategy)), data
    )
    assert_same_runs(got, run(lambda: further(data.plain()), data))


@of_rows
def test_liger_678_no_gradient_if_the_first_row_is_ignored(
    strategy: StrategyName,
) -> None:
    data = batch()
    data.target[:] = torch.arange(11) % CLASSES
    data.target[:5] = IGNORED  # and more than all of the first chunk
    got = run(lambda: token_losses(*data, chunk_size=4, strategy=strategy).mean(), data)
    assert_same_runs(got, run(lambda: data.plain().mean(), data))
    found = got.gradients["[0]"]
    assert found is not None
    assert found[:5].eq(0).all()
    assert found[5:].abs().min() > 0


@of_rows
@pytest.mark.parametrize("count", [1, 4, 9])
def test_automodel_3803_the_rows_of_chunks_are_added(
    strategy: StrategyName, count: int
) -> None:
    """A loss per row stays one per row, the last ones included."""
    data = batch(11)._replace(hidden=rows(count, WIDTH))
    data = data._replace(target=torch.randint(CLASSES, (count,)))
    losses = token_losses(*data, chunk_size=4, strategy=strategy)
    assert losses.shape == (count,)
    assert_close(losses, data.plain(), "losses")


@of_rows
def test_ms_swift_10129_a_second_backward(strategy: StrategyName) -> None:
    data = batch()
    losses = token_losses(*data, chunk_size=4, strategy=strategy)
    plain = data.plain()
    leaves = [data.hidden, data.weight, data.bias]
    for upstream in rows(11, grad=False), rows(11, grad=False):
        kept = upstream.clone()
        got = torch.autograd.grad(losses, leaves, upstream, retain_graph=True)
        assert torch.equal(upstream, kept)
        expected = torch.autograd.grad(plain, leaves, upstream, retain_graph=True)
        for found, want in zip(got, expected, strict=True):
            assert_close(found, want, "gradient")


@of_rows
def test_second_derivatives(strategy: StrategyName) -> None:
    """A penalty on the gradient of each row."""
    data = batch()

    def penalty(losses: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(losses.sum(), [data.hidden], create_graph=True)
        return losses.mean() + first.square().sum()

    got = run(
        lambda: penalty(token_losses(*data, chunk_size=4, strategy=strategy)), data
    )
    assert_same_runs(got, run(lambda: penalty(data.plain()), data))


@of_a_sum
@sizes
def test_weighted(strategy: StrategyName, size: int | None) -> None:
    """The weights of the rows get a gradient, too."""
    data, row_weight = batch(), rows(11)

    def call() -> Tensor:
        return weighted_loss(
            data.hidden,
            data.target,
            row_weight,
            data.weight,
            data.bias,
            chunk_size=size,
            strategy=strategy,
        )

    def plain() -> Tensor:
        return (data.plain() * row_weight).sum()

    leaves = (data, row_weight)
    assert_same_runs(run(call, leaves), run(plain, leaves))


def test_grad_in_forward_wants_one_number() -> None:
    with pytest.raises(RuntimeError, match="use strategy='auto'"):
        token_losses(*batch(), chunk_size=4, strategy="grad_in_forward")


@of_a_sum
def test_memory_does_not_grow_with_the_rows(strategy: StrategyName) -> None:
    """The logits of one chunk; beyond them a few bytes per row."""

    def excess(loss: Callable[..., Tensor], count: int) -> int:
        hidden = torch.randn(count, 8, requires_grad=True)
        weight = torch.randn(2048, 8, requires_grad=True)
        target, upstream = torch.randint(2048, (count,)), torch.randn(count)

        def step() -> None:
            hidden.grad = weight.grad = None
            loss(hidden, target, upstream, weight).backward()

        step()
        copies = 2 if strategy == "grad_in_forward" and loss is chunked else 1
        peak = measure_memory(step).peak_bytes
        return peak - copies * (hidden.nbytes + weight.nbytes)

    def chunked(hidden: Tensor, target: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        if strategy == "grad_in_forward":
            return weighted_loss(hidden, target, up, weight, chunk_size=64)
        losses = token_losses(hidden, target, weight, chunk_size=64, strategy=strategy)
        return losses @ up

    def plain(hidden: Tensor, target: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return losses_of_tokens(hidden, target, weight, None) @ up

    few, many = excess(chunked, 256), excess(chunked, 1024)
    one_buffer = 64 * 2048 * 4
    # torch's own checkpoint holds the parts of a gradient and the whole at once.
    assert many - few < one_buffer / (10 if strategy == "non_reentrant" else 20)
    assert excess(plain, 1024) > 3.9 * excess(plain, 256)
    assert excess(plain, 1024) > 14 * many
