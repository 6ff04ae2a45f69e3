"""Pitfalls B: frozen weights and adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Run,
    Strategy,
    assert_same,
    assert_same_as_plain,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])


class _Lora(nn.Module):
    """A frozen linear layer with a trained adapter of low rank."""

    def __init__(self, *, fresh: bool) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4))
        self.b = nn.Parameter(torch.zeros(4, 2) if fresh else torch.randn(4, 2))
        self.traced: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        self.traced.append(base.requires_grad)
        return base + x @ self.a.T @ self.b.T


def _model(device: torch.device, *, fresh: bool = False) -> nn.Sequential:
    """Return layers with adapters; as PEFT starts them, if fresh."""
    layers = [_Lora(fresh=fresh), nn.GELU(), _Lora(fresh=fresh)]
    return nn.Sequential(*layers).to(device, torch.float64)


def _x(device: torch.device, *, requires_grad: bool = False) -> Tensor:
    x = torch.randn(5, 4, dtype=torch.float64, device=device)
    return x.requires_grad_(requires_grad)


def _loras(model: nn.Sequential) -> list[_Lora]:
    return [layer for layer in model if isinstance(layer, _Lora)]


def _trained(got: Run) -> set[str]:
    return {name for name, gradient in got.gradients.items() if gradient is not None}


@strategies()
@both_paths
@sizes
def test_peft_137_frozen_base_lora(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Adapters of a frozen base train, though no input requires a gradient."""
    model = _model(device)
    leaf, shift = capture(device, history=history)
    got = assert_same_as_plain(
        lambda x: model(x) * shift,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured={"model": model, "leaf": leaf},
    )
    adapters = {f"['captured']['model'].{i}.{name}" for i in "02" for name in "ab"}
    assert _trained(got) == {*adapters, "['captured']['leaf']"}


@strategies()
@both_paths
@sizes
def test_peft_1142_what_comes_before_the_first_adapter_has_no_graph(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """No input is made to require a gradient, which would cost one per frozen layer."""
    embedding = nn.Embedding(9, 4).to(device, torch.float64).requires_grad_(False)
    model = _model(device)
    leaf, shift = capture(device, history=history)
    seen: list[bool] = []

    def f(tokens: Tensor) -> Tensor:
        hidden = embedding(tokens)
        seen.append(hidden.requires_grad)
        result: Tensor = model(hidden) * shift
        return result

    tokens = torch.randint(9, (5,), device=device)
    captured = {"embedding": embedding, "model": model, "leaf": leaf}
    got = assert_same_as_plain(
        f, (tokens,), chunk_size=chunk_size, strategy=strategy, captured=captured
    )
    assert len(_trained(got)) == 5
    assert not any(seen), "in forward or in recompute"
    assert not any(_loras(model)[0].traced)
    assert all(_loras(model)[1].traced)


def _shifted(model: nn.Module, shift: Tensor, x: Tensor) -> Tensor:
    result: Tensor = model(x) + shift
    return result


@strategies()
@both_paths
@sizes
def test_open_unlearning_178_adapters_leave_zero(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """After some steps every adapter is what plain training makes it, and none is 0."""
    model = _model(device, fresh=True)
    leaf, _ = capture(device, history=history)
    start = [t.detach().clone() for t in (*model.parameters(), leaf)]
    xs = [_x(device) for _ in range(3)]

    def train(call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        leaves = [*model.parameters(), leaf]
        for t, value in zip(leaves, start, strict=True):
            t.data.copy_(value)
        optimizer = torch.optim.SGD([t for t in leaves if t.requires_grad], lr=0.1)
        for x in xs:
            optimizer.zero_grad()
            shift = -leaf if history else leaf
            y = call(functools.partial(_shifted, model, shift), x)
            backward(y.pow(2).mean())
            optimizer.step()

    train(lambda f, x: f(x))
    expected = [t.detach().clone() for t in (*model.parameters(), leaf)]
    train(
        lambda f, x: chunk_and_checkpoint(
            f, x, chunk_size=chunk_size, strategy=strategy
        )
    )
    assert_same([t.detach() for t in (*model.parameters(), leaf)], expected)
    for lora, (before_a, *_) in zip(
        _loras(model), (start[:4], start[4:-1]), strict=True
    ):
        assert bool((lora.b != 0).any())
        assert not torch.equal(lora.a, before_a)


@strategies()
@both_paths
@pytest.mark.parametrize("requires_grad", [False, True], ids=["data", "x_trained"])
def test_transformers_26221_any_part_may_be_trained(
    strategy: Strategy, *, history: bool, requires_grad: bool, device: torch.device
) -> None:
    """Whichever parameters train, results and gradients are those of plain."""
    mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    mlp.to(device, torch.float64)
    leaf, shift = capture(device, history=history)
    leaf.requires_grad_(history)
    x = _x(device, requires_grad=requires_grad)
    for flags in product([False, True], repeat=4):
        for parameter, trained in zip(mlp.parameters(), flags, strict=True):
            parameter.requires_grad_(trained)
        got = assert_same_as_plain(
            lambda x: mlp(x) + shift,
            (x,),
            chunk_size=2,
            strategy=strategy,
            captured=[mlp, leaf],
        )
        assert len(_trained(got)) == sum(flags) + history + requires_grad


class _Gathered(nn.Linear):
    """A layer whose weight is there only while it runs, forward or backward.

    As DeepSpeed's ZeRO-3 does it: hooks around forward and around backward.
    """

    def __init__(self, *, how: str) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self._how = how
        self._full = self.weight.detach().clone()
        self.register_forward_pre_hook(lambda *_: self._gather())
        self.register_forward_hook(self._after_forward)
        self._release()

    def _gather(self) -> None:
        if self._how == "swapped":
            self.weight.data = self._full
        else:
            storage = self.weight.untyped_storage()
            storage.resize_(self._full.untyped_storage().size())
            storage.copy_(self._full.untyped_storage())  # which counts as no write

    def _release(self, *_: object) -> None:
        if self._how == "swapped":
            self.weight.data = torch.empty(0, dtype=torch.float64)
        else:
            self.weight.untyped_storage().resize_(0)

    def _after_forward(self, _module: object, _args: object, result: Tensor) -> None:
        self._release()
        assert result.grad_fn is not None
        result.grad_fn.register_prehook(lambda _: self._gather())
        result.grad_fn.register_hook(self._release)


@strategies()
@both_paths
@sizes
@pytest.mark.parametrize(
    ("how", "trained"), [("swapped", False), ("resized", False), ("resized", True)]
)
def test_deepspeed_8148_weight_that_is_there_while_it_runs(
    strategy: Strategy,
    chunk_size: int | None,
    how: str,
    *,
    trained: bool,
    history: bool,
) -> None:
    """A weight may be empty outside of its layer; no shape of it is kept."""
    cpu = torch.device("cpu")
    layer = _Gathered(how=how)
    layer.weight.requires_grad_(trained)
    leaf, shift = capture(cpu, history=history)
    x = _x(cpu, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        result: Tensor = layer(x * 2).tanh() * shift
        return result

    leaves = [x, leaf, layer]
    expected = run(lambda: f(x), leaves)
    got = run(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
    )
    assert_same_runs(got, expected)
    assert layer.weight.untyped_storage().size() == 0
