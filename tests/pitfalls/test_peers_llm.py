"""Reports on the peers of language-model training, each with its right behaviour.

Those on losses by gradients in forward are in test_torch_in_forward.py and in the
recipes, those on DDP in test_m_distributed.py.
"""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import (
    Fused,
    GradInForward,
    MemoryBudget,
    NumChunks,
    chunk_and_checkpoint,
    chunked,
)
from chunkcheck._sizes import largest_that_fits
from reference import (
    Counted,
    Strategy,
    assert_close,
    assert_same_as_plain,
    net,
    rows,
    strategies,
)


@strategies()
@pytest.mark.parametrize(("count", "sizes"), [(5, [2, 2, 1]), (2, [1, 1])])
def test_deepspeed_8434_fewer_chunks_than_asked_for(
    strategy: Strategy, count: int, sizes: list[int]
) -> None:
    """Four chunks of 5 rows are three; one plan holds for both passes."""
    f, x = Counted(net()), rows(count, 4)
    y = chunk_and_checkpoint(f, x, chunk_size=NumChunks(4), strategy=strategy)
    assert f.rows == sizes
    y.sum().backward()
    assert_same_as_plain(
        f.f, (x,), chunk_size=sizes[0], strategy=strategy, captured=f.f
    )


@strategies()
def test_deepspeed_7422_batches_of_several_sequences(strategy: Strategy) -> None:
    """Gradients have the layout of what they are of, and nothing warns of strides."""
    model = net()
    for x in (rows(3, 8, 4), rows(8, 3, 4, grad=False).transpose(0, 1)):
        leaf = x.detach().requires_grad_()
        y = chunk_and_checkpoint(
            model, leaf, chunk_size=3, batch_dim=1, strategy=strategy
        )
        y.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.stride() == leaf.stride()


@strategies()
@pytest.mark.parametrize("given", [False, True])
def test_deepspeed_7437_an_optional_mask(strategy: Strategy, *, given: bool) -> None:
    model = net()

    def f(x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = model(x)
        return y if mask is None else y * mask

    mask = torch.rand(7, 1).round().double() if given else None
    assert_same_as_plain(
        f,
        (rows(7, 4),),
        kwargs={"mask": mask},
        chunk_size=3,
        strategy=strategy,
        captured=model,
    )


def test_deepspeed_8148_parameters_that_are_gone_in_recompute() -> None:
    """ZeRO-3 frees them after forward; without a gather it must not go on with none."""
    model, x = nn.Linear(4, 4).double(), rows(5, 4)
    y = chunk_and_checkpoint(model, x, chunk_size=2)
    model.weight.data = torch.empty(0, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    gathered = torch.ones(4, 4, dtype=torch.float64)

    def gather(module: nn.Module, _: Any) -> None:
        module.weight.data = gathered  # type: ignore[union-attr, unused-ignore]

    def release(module: nn.Module, *_: Any) -> None:
        module.weight.data = torch.empty(0, dtype=torch.float64)  # type: ignore[union-attr, unused-ignore]

    model.register_forward_pre_hook(gather)
    y = chunk_and_checkpoint(model, x, chunk_size=2)
    y.sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.full_like(x, 4.0), "x.grad")


@strategies()
def test_liger_488_none_gives_one_loss_per_row(strategy: Strategy) -> None:
    head, target = nn.Linear(4, 9).double(), torch.randint(9, (7,))
    got = assert_same_as_plain(
        lambda x, target: F.cross_entropy(head(x), target, reduction="none"),
        (rows(7, 4), target),
        chunk_size=3,
        strategy=strategy,
        captured=head,
    )
    assert isinstance(got.result, Tensor)
    assert got.result.shape == (7,)


@pytest.mark.parametrize("strategy", ["auto", "grad_in_forward", "non_reentrant"])
def test_liger_305_dtypes_under_autocast(strategy: Any) -> None:
    """Also #501 and LLaMA-Factory #5583: gradients are of the parameters' dtype."""
    head, target = nn.Linear(4, 9), torch.randint(9, (7,))
    hidden = torch.randn(7, 4, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunk_and_checkpoint(
            lambda x, target: F.cross_entropy(head(x).float(), target),
            hidden,
            target,
            chunk_size=3,
            out_dim="mean",
            strategy=strategy,
        )
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32
    plain = F.cross_entropy(head(hidden.float()), target)
    (want,) = torch.autograd.grad(plain, [head.weight])
    torch.testing.assert_close(head.weight.grad, want, rtol=5e-2, atol=5e-3)


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, as LoRA has."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


@strategies()
def test_liger_1005_adapters_are_trained(strategy: Strategy) -> None:
    """ArcticTraining #334: no list of weights that could leave them out."""
    model = nn.Sequential(Adapted(4, 9), nn.SiLU(), Adapted(9, 4)).double()
    assert_same_as_plain(
        model, (rows(7, 4),), chunk_size=3, strategy=strategy, captured=model
    )


@pytest.mark.parametrize("strategy", ["auto", "grad_in_forward"])
def test_trl_5977_an_adapter_on_the_head_is_trained(strategy: Any) -> None:
    """TRL PR #6372: the head is called as a module, its weight is not read."""
    head, target = Adapted(4, 9).double(), torch.randint(9, (7,))
    assert_same_as_plain(
        lambda x, target: F.cross_entropy(head(x), target),
        (rows(7, 4), target),
        chunk_size=3,
        out_dim="mean",
        strategy=strategy,
        captured=head,
    )


def test_liger_1276_a_model_that_is_there_already() -> None:
    model = nn.Sequential(net(), net())
    x = rows(7, 4)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    keys = list(model.state_dict())
    for block in model:
        block.forward = chunked(block.forward, chunk_size=3)
    found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, "gradient")
    assert list(model.state_dict()) == keys


def test_axolotl_2865_bf16_is_about_as_exact_as_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(512, 16)

    def gradients(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        loss = f(x).float().square().mean()
        return [g.double() for g in torch.autograd.grad(loss, list(model.parameters()))]

    exact = gradients(model.double(), x.double())
    model.bfloat16()
    narrow = x.bfloat16()
    whole = gradients(model, narrow)
    ours = gradients(lambda x: chunk_and_checkpoint(model, x, chunk_size=4), narrow)
    for want, plain, got in zip(exact, whole, ours, strict=True):
        assert (got - want).norm() <= 1.5 * (plain - want).norm()


@strategies()
def test_axolotl_3116_every_result_gets_its_gradient(strategy: Strategy) -> None:
    """Unsloth too uses the first gradient alone; here the second is the router's."""
    experts, router = net(), nn.Linear(4, 3).double()
    assert_same_as_plain(
        lambda x: (experts(x) * router(x).softmax(-1).amax(-1, True), router(x)),
        (rows(7, 4),),
        chunk_size=3,
        strategy=strategy,
        captured=(experts, router),
    )


def test_unsloth_3827_a_budget_for_which_nothing_fits() -> None:
    x = rows(64, 4)
    y = chunk_and_checkpoint(net(), x, chunk_size=MemoryBudget(1))
    assert y.shape == x.shape


def test_unsloth_zoo_946_the_size_grows_with_the_budget() -> None:
    """Also #857 and #1243: measured, not guessed, and rounded so that it fits."""
    sizes = [
        largest_that_fits(10_000, budget, lambda size: 500.0 + 7 * size)
        for budget in range(500, 60_000, 500)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 20
    assert all(500 + 7 * s <= b for s, b in zip(sizes[2:], range(1500, 60_000, 500)))  # noqa: B905
    f = Counted(torch.sin)
    chunk_and_checkpoint(f, torch.ones(129, 2), chunk_size=NumChunks(2))
    assert f.rows == [65, 64]


def test_unsloth_zoo_1218_options_are_keywords() -> None:
    for function in (chunk_and_checkpoint, chunked):
        names = ("chunk_size", "batch_dim", "out_dim", "strategy")
        parameters = inspect.signature(function).parameters
        assert all(parameters[n].kind is inspect.Parameter.KEYWORD_ONLY for n in names)
    kinds: list[Any] = [Fused, GradInForward]
    for kind in kinds:
        with pytest.raises(TypeError, match="positional"):
            kind(True)


@pytest.mark.parametrize("strategy", ["auto", "grad_in_forward"])
def test_unsloth_8261_nothing_is_rescaled(strategy: Any) -> None:
    """The loss of two halves, each by what both count, is that of the whole."""
    head, x, target = nn.Linear(4, 9).double(), rows(12, 4), torch.randint(9, (12,))
    target[1:4] = -100
    count = (target != -100).sum()

    def f(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(x), target, reduction="sum")

    for half in (slice(0, 6), slice(6, 12)):
        total = chunk_and_checkpoint(
            f, x[half], target[half], chunk_size=4, out_dim="sum", strategy=strategy
        )
        (total / count).backward()
    (want,) = torch.autograd.grad(F.cross_entropy(head(x), target), [head.weight])
    assert head.weight.grad is not None
    assert_close(head.weight.grad, want, "gradient")


@strategies()
def test_nemo_rl_2871_one_knob_for_both_paths(strategy: Strategy) -> None:
    """Also Megatron-LM #3644: chunks in training and in evaluation."""
    model, x = net(), rows(7, 4)
    f = Counted(model)
    with torch.no_grad():
        chunk_and_checkpoint(f, x, chunk_size=3, strategy=strategy)
    assert f.rows == [3, 3, 1]
    f.rows.clear()
    chunk_and_checkpoint(f, x, chunk_size=3, strategy=strategy).sum().backward()
    assert set(f.rows) == {3, 1}


def test_torchtune_2554_as_many_calls_on_every_rank() -> None:
    """Their number follows from rows and chunk size alone."""
    for count in range(1, 12):
        for size in range(1, 6):
            f = Counted(torch.sin)
            chunk_and_checkpoint(f, torch.ones(count, 1), chunk_size=size)
            assert len(f.rows) == math.ceil(count / size)


@strategies(without={"reentrant"})
def test_torchtitan_4182_one_gradient_for_each_parameter(strategy: Strategy) -> None:
    model = net()
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    chunk_and_checkpoint(
        model, rows(12, 4), chunk_size=1, strategy=strategy
    ).sum().backward()
    assert len(seen) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
def test_torchtitan_3646_chunks_follow_each_other_when_compiled() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(hidden: Tensor) -> Tensor:
        nonlocal most
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(hidden))
        return hidden

    model, unseen = net(), torch.compiler.disable(watch)

    def step(x: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            y: Tensor = model(unseen(x.sin()))
            return y

        return chunk_and_checkpoint(f, x, chunk_size=1)

    x = rows(6, 4)
    torch.compile(step, backend="eager")(x).sum().backward()
    assert len(alive) == 12
    assert most <= 1


def test_comfyui_15845_a_policy_is_asked_once() -> None:
    """Free memory is another in backward; the chunks of recompute are forward's."""

    class Falling:
        size = 5

        def resolve(self, rows: int, measure: Callable[[int], float]) -> int:
            assert measure(rows) > 0
            self.size -= 1
            return self.size

    policy, f = Falling(), Counted(net())
    x = rows(9, 4)
    y = chunk_and_checkpoint(f, x, chunk_size=policy)
    y.sum().backward()
    assert policy.size == 4
    assert f.rows[-6:] == [4, 4, 1, 1, 4, 4]  # forward, and recompute from the end


@strategies()
def test_unsloth_another_width(strategy: Strategy) -> None:
    """Their result is allocated as wide as the input is."""
    model = nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 2)).double()
    assert_same_as_plain(
        model,
        (rows(2, 7, 4),),
        chunk_size=3,
        batch_dim=1,
        strategy=strategy,
        captured=model,
    )


@strategies()
def test_deepspeed_a_second_differentiable_input(strategy: Strategy) -> None:
    """Theirs gets no gradient, without a word."""
    model = net()
    assert_same_as_plain(
        lambda x, gate: model(x) * gate.sigmoid(),
        (rows(7, 4), rows(7, 4)),
        chunk_size=3,
        strategy=strategy,
        captured=model,
    )
