"""Cross-entropy of a language model, chunked, against `F.cross_entropy` on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from examples.recipes.language_model import (
    IGNORED,
    cross_entropy_,
    language_model_loss,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import NonReentrant, StrategyName, chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory
from reference import assert_close, assert_same_runs, rows, run

ROWS, WIDTH, CLASSES = 11, 4, 7
STRATEGIES: list[StrategyName] = ["auto", "non_reentrant", "grad_in_forward"]
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
sizes = pytest.mark.parametrize("size", [1, 4, None])
both = pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
smoothings = pytest.mark.parametrize("smoothing", [0.0, 0.1])


class Batch(NamedTuple):
    hidden: Tensor
    target: Tensor
    weight: Tensor
    bias: Tensor

    def plain(self, **options: Any) -> Tensor:
        logits = F.linear(self.hidden.flatten(0, -2), self.weight, self.bias)
        return F.cross_entropy(logits, self.target.flatten(), **options)


def batch(*shape: int, ignored: str = "some") -> Batch:
    """Return hidden states, targets and a head."""
    shape = shape or (ROWS,)
    target = torch.randint(CLASSES, shape)
    if ignored == "some":  # all of the first chunks, and others
        target.flatten()[:4] = IGNORED
        target.flatten()[6::3] = IGNORED
    elif ignored == "all":
        target[:] = IGNORED
    return Batch(rows(*shape, WIDTH), target, rows(CLASSES, WIDTH), rows(CLASSES))


def gradients(loss: Tensor, leaves: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            loss, [t for t in leaves if t.requires_grad], retain_graph=True, **options
        )
    )


@strategies
@both
@sizes
@smoothings
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_equals_torchs_cross_entropy(
    strategy: StrategyName,
    size: int | None,
    smoothing: float,
    ignored: str,
    *,
    fast: bool,
    weighted: bool,
) -> None:
    """Also where all rows of a chunk, or all there are, are ignored."""
    data = batch(ignored=ignored)
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    got = run(
        lambda: language_model_loss(
            *data,
            chunk_size=size,
            class_weight=weight,
            fast=fast,
            label_smoothing=smoothing,
            strategy=strategy,
        ),
        data,
    )
    expected = run(lambda: data.plain(weight=weight, label_smoothing=smoothing), data)
    assert_same_runs(got, expected)


@strategies
@both
@pytest.mark.parametrize("dim", [0, 1, "flat"])
def test_tokens_of_a_batch_of_sequences(
    strategy: StrategyName, dim: Any, *, fast: bool
) -> None:
    data = batch(3, 5)
    hidden, target = data.hidden, data.target

    def call() -> Tensor:
        flat = dim == "flat"
        return language_model_loss(
            hidden.flatten(0, 1) if flat else hidden,
            target.flatten() if flat else target,
            data.weight,
            data.bias,
            chunk_size=2,
            dim=0 if flat else dim,
            fast=fast,
            strategy=strategy,
        )

    assert_same_runs(run(call, data), run(data.plain, data))


@strategies
@both
def test_a_head_that_is_computed_and_has_no_bias(
    strategy: StrategyName, *, fast: bool
) -> None:
    """As with low-rank updates: the weight has a history."""
    data = batch()
    low = rows(CLASSES, 2), rows(2, WIDTH)

    def call(*, chunked: bool) -> Tensor:
        weight = data.weight + low[0] @ low[1]
        if not chunked:
            return F.cross_entropy(F.linear(data.hidden, weight), data.target)
        return language_model_loss(
            data.hidden,
            data.target,
            weight,
            chunk_size=4,
            fast=fast,
            strategy=strategy,
        )

    leaves = (data.hidden, data.weight, low)
    assert_same_runs(
        run(lambda: call(chunked=True), leaves),
        run(lambda: call(chunked=False), leaves),
    )


@strategies
@both
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(
    strategy: StrategyName, frozen: str, *, fast: bool
) -> None:
    """DeepSpeed's fused loss trains nothing where the hidden states are frozen."""
    data = batch()
    getattr(data, frozen).requires_grad_(requires_grad=False)
    call = language_model_loss
    assert_same_runs(
        run(lambda: call(*data, chunk_size=4, fast=fast, strategy=strategy), data),
        run(data.plain, data),
    )


@strategies
@both
def test_without_gradients(strategy: StrategyName, *, fast: bool) -> None:
    data = batch()
    with torch.no_grad():
        got = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
    assert not got.requires_grad
    assert all(t.grad is None for t in data)
    assert_close(got, data.plain(), "loss")


# What other libraries get wrong, each by the place where it was reported.


@strategies
@both
def test_deepspeed_8587_a_mean_of_means(strategy: StrategyName, *, fast: bool) -> None:
    """With uneven masks a mean of the chunks' means is another loss."""
    data = batch()
    means = [
        F.cross_entropy(F.linear(h, data.weight, data.bias), t)
        for h, t in zip(data.hidden.split(4), data.target.split(4), strict=True)
    ]
    expected = data.plain()
    wrong = torch.stack(means).nanmean()
    assert (wrong - expected).detach().abs() > 1e-3
    got = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
    assert_close(got, expected, "loss")
    leaves = (data.hidden, data.weight, data.bias)
    for found, want in zip(
        gradients(got, leaves), gradients(expected, leaves), strict=True
    ):
        assert_close(found, want, "gradient")


@strategies
@both
def test_deepspeed_and_torchtitan_ignore_what_is_done_with_the_loss(
    strategy: StrategyName, *, fast: bool
) -> None:
    """A scale, and a sum with another loss, reach every gradient."""
    data = batch()

    def further(loss: Tensor) -> Tensor:
        return 0.25 * loss + loss.square() + data.weight.square().sum()

    def call() -> Tensor:
        loss = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
        return further(loss)

    assert_same_runs(run(call, data), run(lambda: further(data.plain()), data))


@strategies
@both
def test_deepspeed_scales_the_callers_gradient_in_place(
    strategy: StrategyName, *, fast: bool
) -> None:
    data = batch()
    scale = torch.tensor(0.25, dtype=torch.float64)
    loss = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
    loss.backward(scale)
    assert scale == 0.25
    found = data.hidden.grad
    assert found is not None
    (expected,) = torch.autograd.grad(data.plain(), [data.hidden], scale)
    assert_close(found, expected, "hidden.grad")


@strategies
@both
def test_ms_swift_10129_saved_logits_are_overwritten(
    strategy: StrategyName, *, fast: bool
) -> None:
    """A second backward through the same graph gives the same gradients."""
    data = batch()
    loss = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
    leaves = (data.hidden, data.weight, data.bias)
    first = [g.clone() for g in gradients(loss, leaves)]
    for again in gradients(loss, leaves), gradients(loss, leaves):
        for found, want in zip(again, first, strict=True):
            assert torch.equal(found, want)


@strategies
@both
@pytest.mark.parametrize("count", [1, 2, 9])
def test_mini_s_drops_the_last_rows(
    strategy: StrategyName, count: int, *, fast: bool
) -> None:
    """The last chunk is short, or the only one; its rows count like the others."""
    data = batch(count, ignored="none")
    call = language_model_loss
    got = run(lambda: call(*data, chunk_size=4, fast=fast, strategy=strategy), data)
    assert_same_runs(got, run(data.plain, data))
    last = got.gradients["[0]"]
    assert last is not None
    assert last[-1].abs().min() > 0


@strategies
@both
def test_automodel_3803_the_mean_grows_with_the_number_of_chunks(
    strategy: StrategyName, *, fast: bool
) -> None:
    data = batch()
    losses = [
        language_model_loss(*data, chunk_size=size, fast=fast, strategy=strategy)
        for size in (1, 2, 5, 11, 50, None)
    ]
    for loss in losses:
        assert_close(loss, data.plain(), "loss")


@strategies
@both
def test_torchtune_all_ignored_gives_a_constant(
    strategy: StrategyName, *, fast: bool
) -> None:
    """Nan as in torch, but with a graph, and with gradients that hurt no step."""
    data = batch(ignored="all")
    loss = language_model_loss(*data, chunk_size=4, fast=fast, strategy=strategy)
    assert loss.isnan()
    loss.backward()
    for leaf in (data.hidden, data.weight, data.bias):
        assert leaf.grad is not None
        assert leaf.grad.eq(0).all()


# The cross-entropy in the memory of the logits, by itself.


@smoothings
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [1, 3 * CLASSES, 2**18])
def test_in_place_equals_torchs_row_by_row(
    smoothing: float,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    weighted: bool,
) -> None:
    """With a gradient of its own for each row, whatever is worked on at a time."""
    monkeypatch.setattr("examples.recipes.language_model.BLOCK", block)
    data = batch()
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None

    def call(loss: Callable[[Tensor], Tensor]) -> Tensor:
        return loss(F.linear(data.hidden, data.weight, data.bias) * 30)

    got = run(
        lambda: call(
            lambda x: cross_entropy_(x, data.target, weight, IGNORED, smoothing)
        ),
        data,
    )
    expected = run(
        lambda: call(
            lambda x: F.cross_entropy(
                x, data.target, weight, reduction="none", label_smoothing=smoothing
            )
        ),
        data,
    )
    assert_same_runs(got, expected)


def test_in_place_masked_classes_and_infinite_gradients() -> None:
    """A class of probability 0, and a row that is ignored with a gradient of inf."""
    x = rows(3, CLASSES)
    mask = torch.zeros(CLASSES, dtype=torch.float64).index_fill(
        0, torch.tensor([0, 2]), -torch.inf
    )
    target = torch.tensor([1, IGNORED, 3])
    upstream = torch.tensor([1.0, torch.inf, -2.0], dtype=torch.float64)
    expected = F.cross_entropy(x + mask, target, reduction="none")
    got = cross_entropy_(x + mask, target)
    assert_close(got, expected, "loss")
    (want,) = torch.autograd.grad(expected, [x], upstream)
    (found,) = torch.autograd.grad(got, [x], upstream)
    assert_close(found, want, "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_place_half_precision_computes_in_float32(dtype: torch.dtype) -> None:
    x, target = (3 * rows(5, 50, grad=False)).to(dtype), torch.randint(50, (5,))
    exact = x.double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    x.requires_grad_()
    got = cross_entropy_(x.clone(), target).mean()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
    (found,) = torch.autograd.grad(got, [x])
    (want,) = torch.autograd.grad(expected, [exact])
    assert found.dtype == dtype
    assert_close(found, want.to(dtype), "gradient")


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_in_place_a_second_backward_raises(scale: float) -> None:
    """ms-swift #10129: an error, never the gradient of overwritten logits."""
    x, target = rows(5, CLASSES), torch.randint(CLASSES, (5,))
    loss = cross_entropy_(x * 1, target).sum() * scale
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_a_second_backward_raises_where_hooks_keep_the_logits() -> None:
    x, target = rows(5, CLASSES), torch.randint(CLASSES, (5,))
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy_(x * 1, target).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward"):
        loss.backward()


@pytest.mark.parametrize("how", ["plain", "auto", "non_reentrant"])
def test_in_place_a_second_derivative_raises(how: Any) -> None:
    x, target = rows(5, CLASSES), torch.randint(CLASSES, (5,))

    def f(x: Tensor) -> Tensor:
        return cross_entropy_(x * 1, target[: len(x)])

    loss = (
        f(x)
        if how == "plain"
        else chunk_and_checkpoint(f, x, chunk_size=2, strategy=how)
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss.sum(), [x], create_graph=True)


def test_in_place_logits_have_no_further_use() -> None:
    x, target = rows(5, CLASSES), torch.randint(CLASSES, (5,))
    logits = x * 1
    loss = cross_entropy_(logits, target).sum() + logits.square().sum()
    with pytest.raises(RuntimeError, match="the logits were used after"):
        loss.backward()
    capped = x.tanh()  # saves its result
    loss = cross_entropy_(capped, target).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"leaf Variable .* in-place"):
        cross_entropy_(x, target)
    with pytest.raises(RuntimeError, match=r"view .*in-?place"):
        cross_entropy_((x * 1)[:, 1:], target % (CLASSES - 1))


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_in_place_a_target_that_is_no_class_raises(wrong: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy_(torch.zeros(2, CLASSES), torch.tensor([0, wrong]))


# Memory.

MB = 2**20


def excess(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], count: int, copies: int = 1
) -> float:
    """Return the peak beyond the gradients, in MiB, in a batch of `count` rows."""
    hidden = torch.randn(count, 8, requires_grad=True)
    weight = torch.randn(2048, 8, requires_grad=True)
    target = torch.randint(2048, (count,))
    target[::3] = IGNORED

    def step() -> None:
        hidden.grad = weight.grad = None
        call(hidden, target, weight).backward()

    step()
    peak = measure_memory(step).peak_bytes
    return (peak - copies * (hidden.nbytes + weight.nbytes)) / MB


@strategies
@both
def test_memory_does_not_grow_with_the_rows(
    strategy: StrategyName, *, fast: bool
) -> None:
    def call(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return language_model_loss(
            hidden, target, weight, chunk_size=64, fast=fast, strategy=strategy
        )

    def plain(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    # The strategy holds the gradients before and after they are scaled.
    copies = 2 if strategy == "grad_in_forward" else 1
    few, many = (excess(call, count, copies) for count in (256, 1024))
    # torch's own checkpoint holds the parts of a gradient and the whole at once.
    assert many <= few + (0.05 if strategy == "non_reentrant" else 0.01)
    one_buffer = 64 * 2048 * 4 / MB
    assert many <= one_buffer * (1.25 if fast else 3.25)
    assert excess(plain, 1024) > 3.9 * excess(plain, 256)
    assert excess(plain, 1024) > 15 * many


def test_memory_a_smoothed_loss_takes_no_more() -> None:
    def call(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return language_model_loss(
            hidden,
            target,
            weight,
            chunk_size=64,
            fast=True,
            label_smoothing=0.1,
            class_weight=torch.ones(2048),
        )

    assert excess(call, 256) < 1.2 * 64 * 2048 * 4 / MB


def test_strategy_instances_are_for_the_call_itself() -> None:
    """The recipe takes names; with options, the call is one's own."""
    data = batch()
    got = chunk_and_checkpoint(
        lambda h, t: F.cross_entropy(
            F.linear(h, data.weight, data.bias), t, reduction="sum"
        ),
        data.hidden,
        data.target,
        chunk_size=4,
        out_dim="sum",
        strategy=NonReentrant(early_stop=True),
    )
    assert_close(got, data.plain(reduction="sum"), "loss")
