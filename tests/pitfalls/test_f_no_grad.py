"""Pitfalls F: no_grad, inference mode and evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from reference import (
    Counted,
    Strategy,
    assert_close,
    assert_same,
    assert_same_runs,
    run,
    strategies,
    without_gc,
)

modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
Mode = Callable[[], AbstractContextManager[None]]


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(
        device, torch.float64
    )


def _x(device: torch.device) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, device=device)


@strategies()
@modes
@pytest.mark.parametrize(("chunk_size", "rows"), [(2, [2, 2, 1]), (None, [5])])
def test_trl_4636_no_grad_runs_f_once_per_chunk(
    strategy: Strategy,
    mode: Mode,
    chunk_size: int | None,
    rows: list[int],
    device: torch.device,
) -> None:
    """Without grad mode `f` runs once per chunk, with no warning and no graph."""
    mlp = _mlp(device).eval()
    f = Counted(mlp)
    x = _x(device).requires_grad_()
    with mode():
        y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        assert_same(y, mlp(x))
    assert f.rows == rows
    assert not y.requires_grad
    assert y.grad_fn is None


@modes
def test_trl_4636_no_grad_calls_no_strategy(mode: Mode, device: torch.device) -> None:
    """Without grad mode a user's own strategy is not called: the loop alone runs."""
    calls: list[int] = []

    def own(
        f: Callable[..., tuple[Tensor, ...]], /, *args: Tensor
    ) -> tuple[Tensor, ...]:
        calls.append(len(args))
        return f(*args)

    x = _x(device).requires_grad_()
    with mode():
        chunk_and_checkpoint(torch.sin, x, chunk_size=2, strategy=own)
    assert calls == []
    chunk_and_checkpoint(torch.sin, x, chunk_size=2, strategy=own)
    assert calls == [1, 1, 1]


@strategies()
@modes
def test_pysemseg_5_evaluation_keeps_nothing(
    strategy: Strategy, mode: Mode, device: torch.device
) -> None:
    """In evaluation a chunk's activations die before the next chunk begins."""
    alive: list[int] = []
    hidden: list[weakref.ref[object]] = []
    weight = _x(device).mT.requires_grad_()

    def f(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in hidden))
        h = x @ weight
        hidden.append(weakref.ref(h.untyped_storage()))
        return h.tanh()

    with mode(), without_gc():
        chunk_and_checkpoint(f, _x(device), chunk_size=1, strategy=strategy)
        assert alive == [0] * 5
        assert all(ref() is None for ref in hidden)


@strategies()
@pytest.mark.parametrize("chunk_size", [2, None])
def test_unsloth_2434_inference_mode_returns_inference_tensors(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Inference mode gives inference tensors, from inference tensors and others."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x

    ordinary = _x(device).requires_grad_()
    with torch.inference_mode():
        inference = _x(device)
        got = chunk_and_checkpoint(
            f, ordinary, inference, chunk_size=chunk_size, strategy=strategy
        )
        expected = f(ordinary, inference)
        for result, wanted in zip(got, expected, strict=True):
            assert_close(result, wanted, "result")
            assert result.is_inference()
            assert not result.requires_grad


@strategies(without=("own_checkpoint",))
@pytest.mark.parametrize("chunk_size", [2, None])
@pytest.mark.parametrize("whole", [False, True])
def test_unsloth_zoo_805_inference_tensor_as_constant_input(
    strategy: Strategy, chunk_size: int | None, *, whole: bool, device: torch.device
) -> None:
    """An inference tensor that `f` never saves is a fine constant, in training too."""
    with torch.inference_mode():
        constant = _x(device)
    weight = _x(device).requires_grad_()
    x = _x(device).requires_grad_()

    def f(x: Tensor, constant: Tensor) -> Tensor:
        if whole:
            constant = constant[0]
        return (x + constant).sin() * weight.sum()

    def plain() -> Tensor:
        return f(x, constant)

    def in_chunks() -> Tensor:
        return chunk_and_checkpoint(
            f,
            x,
            constant,
            chunk_size=chunk_size,
            batch_dim=(0, None) if whole else 0,
            strategy=strategy,
        )

    assert_same_runs(run(in_chunks, (x, weight)), run(plain, (x, weight)))


@strategies()
def test_fairscale_709_eval_is_not_a_reason_to_keep_activations(
    strategy: Strategy, device: torch.device
) -> None:
    """A model in eval() whose gradient is asked for is recomputed as in train()."""
    mlp = _mlp(device).eval()
    x = _x(device).requires_grad_()
    f = Counted(mlp)
    got = run(
        lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy), (x, mlp)
    )
    assert_same_runs(got, run(lambda: mlp(x), (x, mlp)))
    times = 1 if strategy == "none" else 2
    assert sorted(f.rows) == sorted([2, 2, 1] * times)


@strategies()
def test_fairscale_709_train_alone_is_not_a_reason_to_recompute(
    strategy: Strategy, device: torch.device
) -> None:
    """A model in train() under no_grad runs once per chunk and is not kept."""
    mlp = _mlp(device).train()
    f = Counted(mlp)
    with torch.no_grad():
        y = chunk_and_checkpoint(f, _x(device), chunk_size=2, strategy=strategy)
    assert f.rows == [2, 2, 1]
    assert not y.requires_grad
