"""Direct preference optimisation, chunked over tokens, against whole sequences."""

from __future__ import annotations

import pytest
import torch
from examples.recipes.preference import Model, Preference, dpo_loss
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import StrategyName
from chunkcheck.diagnostics import measure_memory
from reference import assert_same_runs, rows, run

PAIRS, SEQUENCE, WIDTH, CLASSES, BETA = 3, 5, 4, 7, 0.3
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def model(width: int = WIDTH, *, bias: bool = True) -> Model:
    return Model(
        rows(PAIRS, 2, SEQUENCE, width),
        rows(CLASSES, width),
        rows(CLASSES) if bias else None,
    )


def answers() -> tuple[Tensor, Tensor]:
    """Return targets and a mask of answers of several lengths, one of them empty."""
    shape = (PAIRS, 2, SEQUENCE)
    target = torch.randint(CLASSES, shape)
    mask = torch.rand(shape) < 0.6
    mask[0, 0] = True
    mask[1, 1] = False
    target[~mask] = 10_000  # padding need not be a class
    return target, mask


def plain(
    policy: Model, reference: Model, target: Tensor, mask: Tensor, beta: float = BETA
) -> Preference:
    def likely(model: Model) -> Tensor:
        logits = F.linear(model.hidden, model.weight, model.bias)
        index = target.where(mask, 0)[..., None]
        picked = logits.log_softmax(-1).gather(-1, index)[..., 0]
        return (picked * mask).sum(-1)

    chosen, rejected = (beta * (likely(policy) - likely(reference).detach())).unbind(1)
    loss = -torch.log(torch.sigmoid(chosen - rejected)).mean()
    return Preference(loss, chosen.detach(), rejected.detach())


@strategies
@pytest.mark.parametrize("size", [1, 4, 7, 100, None])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_loss_of_whole_sequences(
    strategy: StrategyName, size: int | None, *, bias: bool
) -> None:
    """Chunks end within answers and go over from one to the next."""
    policy, reference = model(bias=bias), model(6, bias=bias)
    target, mask = answers()
    leaves = (policy, reference)
    got = run(
        lambda: dpo_loss(
            policy,
            reference,
            target,
            mask,
            chunk_size=size,
            beta=BETA,
            strategy=strategy,
        ),
        leaves,
    )
    assert_same_runs(got, run(lambda: plain(policy, reference, target, mask), leaves))
    of_reference = [g for name, g in got.gradients.items() if name.startswith("[1]")]
    assert of_reference == [None] * len(of_reference)


@strategies
def test_a_policy_that_shares_the_reference(strategy: StrategyName) -> None:
    """A policy of low-rank updates: its head has a history and the reference's is it.

    At the start both agree: the loss is log 2, and its gradient is not 0.
    """
    base, (low, high) = model(), (rows(CLASSES, 2), rows(2, WIDTH))
    target, mask = answers()

    def call(*, chunked: bool) -> Tensor:
        policy = base._replace(weight=base.weight + low @ (high * 0))
        if not chunked:
            return plain(policy, base, target, mask).loss
        return dpo_loss(
            policy, base, target, mask, chunk_size=4, beta=BETA, strategy=strategy
        ).loss

    leaves = (base, low, high)
    got = run(lambda: call(chunked=True), leaves)
    assert isinstance(got.result, Tensor)
    torch.testing.assert_close(got.result.exp(), got.result.new_tensor(2.0))
    assert_same_runs(got, run(lambda: call(chunked=False), leaves))
    assert any(g is not None and g.abs().max() > 0 for g in got.gradients.values())


@strategies
def test_the_reference_is_not_recomputed(strategy: StrategyName) -> None:
    """Nothing of it is kept, and frozen or not it is left alone."""
    policy, reference = model(), model()
    target, mask = answers()
    loss = dpo_loss(
        policy, reference, target, mask, chunk_size=4, strategy=strategy
    ).loss
    for tensor in reference:
        assert tensor is not None
        tensor.data = torch.full_like(tensor, torch.nan)
    loss.backward()
    assert policy.hidden.grad is not None
    assert policy.hidden.grad.isfinite().all()
    assert all(t is not None and t.grad is None for t in reference)


@strategies
def test_what_is_masked_has_a_gradient_of_zero(strategy: StrategyName) -> None:
    policy, (target, mask) = model(), answers()
    dpo_loss(
        policy, model(), target, mask, chunk_size=4, strategy=strategy
    ).loss.backward()
    assert policy.hidden.grad is not None
    assert policy.hidden.grad[~mask].eq(0).all()
    assert policy.hidden.grad[mask].abs().min() > 0


def test_grad_in_forward_wants_one_number() -> None:
    with pytest.raises(RuntimeError, match="use strategy='auto'"):
        dpo_loss(model(), model(), *answers(), chunk_size=4, strategy="grad_in_forward")


@strategies
def test_memory_does_not_grow_with_the_sequence(strategy: StrategyName) -> None:
    def excess(sequence: int, *, chunked: bool) -> int:
        def new(*, grad: bool) -> Model:
            hidden, weight = torch.randn(2, 2, sequence, 8), torch.randn(2048, 8)
            return Model(hidden.requires_grad_(grad), weight.requires_grad_(grad))

        policy, reference = new(grad=True), new(grad=False)
        target = torch.randint(2048, (2, 2, sequence))
        mask = torch.rand(target.shape) < 0.7

        def step() -> None:
            policy.hidden.grad = policy.weight.grad = None
            if chunked:
                found = dpo_loss(
                    policy, reference, target, mask, chunk_size=64, strategy=strategy
                )
            else:
                found = plain(policy, reference, target, mask)
            found.loss.backward()

        step()
        peak = measure_memory(step).peak_bytes
        return peak - policy.hidden.nbytes - policy.weight.nbytes

    few, many = excess(64, chunked=True), excess(256, chunked=True)
    one_buffer = 64 * 2048 * 4
    # torch's own checkpoint holds the parts of a gradient and the whole at once.
    assert many - few < one_buffer / (5 if strategy == "non_reentrant" else 10)
    assert excess(256, chunked=False) > 3.9 * excess(64, chunked=False)
    assert excess(256, chunked=False) > 10 * many
