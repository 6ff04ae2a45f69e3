"""Pitfalls I: ways of calling backward, second derivatives, forward mode."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward, forward_ad

from chunkcheck import chunk_and_checkpoint
from reference import (
    Strategy,
    assert_close,
    assert_same,
    assert_same_as_plain,
    assert_same_gradients,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
twice = strategies(without=("reentrant",))
# torch's own, once per process.
warned_of_cycles = pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph=True:UserWarning"
)
# torch's forward mode scripts its decompositions at the first use.
warned_of_script = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 3), dtype=torch.float64, device=device, requires_grad=True
    )


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(
        device, torch.float64
    )


@strategies()
@sizes
def test_pytorch_102223_autograd_grad_inside_f(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """`f` may call autograd.grad: energies and forces, and losses made of both."""
    mlp = _mlp(device)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        energy = mlp(x).pow(2).sum(1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=mlp
    )


@strategies()
@sizes
def test_pytorch_102223_autograd_grad_of_an_inner_leaf(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """So it may under its own enable_grad, on a leaf that it makes itself."""
    mlp = _mlp(device)

    def f(x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(mlp(inner).exp().sum(), inner)
        result: Tensor = mlp(x) * slope[:, :2]
        return result

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=mlp
    )


def _cubic(weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ weight).tanh() * y[:, :2], x.pow(3).sum(1) * y[:, 0]


@twice
@sizes
def test_pytorch_33999_mixed_second_derivatives(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Second derivatives across arguments and captured weights are those of plain."""
    weight, x, y = _x(device, 3, 2), _x(device), _x(device)
    leaves = [x, y, weight]
    f = functools.partial(_cubic, weight)

    def second(results: tuple[Tensor, Tensor]) -> dict[str, Tensor | None]:
        loss = results[0].pow(2).sum() + results[1].sin().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        mixed = [g.pow(2).sum() * (i + 1) for i, g in enumerate(first)]
        found = torch.autograd.grad(sum(mixed, torch.zeros(())), leaves)
        return dict(zip(("x", "y", "weight"), found, strict=True))

    got = chunk_and_checkpoint(f, x, y, chunk_size=chunk_size, strategy=strategy)
    assert_same_gradients(second(got), second(f(x, y)))


@twice
def test_pytorch_33999_gradgradcheck(strategy: Strategy) -> None:
    """The numerical check of first and second derivatives agrees."""
    x, weight = _x(torch.device("cpu"), 3, 2), _x(torch.device("cpu"), 2, 2)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return chunk_and_checkpoint(
            lambda x, w: (x @ w).sin() * x,
            x,
            weight,
            chunk_size=2,
            batch_dim=(0, None),
            strategy=strategy,
        )

    assert torch.autograd.gradcheck(f, (x, weight))
    assert torch.autograd.gradgradcheck(f, (x, weight))


@warned_of_cycles
@twice
@sizes
def test_pytorch_33999_backward_create_graph(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """backward(create_graph=True) leaves gradients that can be differentiated."""
    weight, x, y = _x(device, 3, 2), _x(device), _x(device)
    f = functools.partial(_cubic, weight)

    def second(results: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        backward(results[0].pow(2).sum(), create_graph=True)
        assert x.grad is not None
        assert weight.grad is not None
        mixed = x.grad.pow(2).sum() + weight.grad.sin().sum()
        x.grad = y.grad = weight.grad = None  # or a cycle stays
        assert mixed.requires_grad
        return torch.autograd.grad(mixed, (x, y, weight))

    got = chunk_and_checkpoint(f, x, y, chunk_size=chunk_size, strategy=strategy)
    assert_same(second(got), second(f(x, y)))


@warned_of_cycles
@sizes
def test_pytorch_33999_reentrant_refuses_create_graph(
    chunk_size: int | None, device: torch.device
) -> None:
    """Reentrant raises under create_graph, rather than detach the gradients."""
    x = _x(device)
    y = chunk_and_checkpoint(torch.sin, x, chunk_size=chunk_size, strategy="reentrant")
    with pytest.raises(RuntimeError, match="non_reentrant"):
        backward(y.sum(), create_graph=True)
    assert x.grad is None


@twice
@sizes
def test_higher_22_meta_gradient_through_an_inner_step(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """The gradient through an inner gradient step is that of plain."""
    x, target = _x(device).detach(), _x(device, 5, 2).detach()
    weight, rate = _x(device, 3, 2), _x(device, 1)

    def meta(predict: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        inner = (predict(weight) - target).pow(2).mean()
        (g,) = torch.autograd.grad(inner, weight, create_graph=True)
        outer = (predict(weight - rate * g) - target).pow(2).mean()
        return torch.autograd.grad(outer, (weight, rate))

    def plain(weight: Tensor) -> Tensor:
        return (x @ weight).tanh()

    def in_chunks(weight: Tensor) -> Tensor:
        return chunk_and_checkpoint(
            lambda x: (x @ weight).tanh(), x, chunk_size=chunk_size, strategy=strategy
        )

    assert_same(meta(in_chunks), meta(plain))


@strategies()
@sizes
def test_guided_diffusion_144_retain_graph_two_backwards(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Two backwards with retain_graph add up; a third without it ends the graph."""
    mlp, x = _mlp(device), _x(device)

    def three(y: Tensor) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for leaf in (x, *mlp.parameters()):
            leaf.grad = None
        for index in range(3):
            backward(y.sin().sum() * (index + 1), retain_graph=index < 2)
            for name, leaf in {"x": x, **dict(mlp.named_parameters())}.items():
                assert leaf.grad is not None
                found[f"{name} after {index}"] = leaf.grad.clone()
        with pytest.raises(RuntimeError, match="second time"):
            backward(y.sin().sum())
        return found

    got = chunk_and_checkpoint(mlp, x, chunk_size=chunk_size, strategy=strategy)
    assert_same_gradients(three(got), three(mlp(x)))


@twice
@sizes
def test_pytorch_encoding_76_retain_graph_with_captured_history(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """A captured tensor with a history gets its gradient, with retain_graph too."""
    base, x = _x(device, 3, 3), _x(device)

    def two(*, whole: bool) -> dict[str, Tensor | None]:
        base.grad = x.grad = None
        weight = base.exp() * 0.5

        def f(x: Tensor) -> Tensor:
            return (x @ weight).sigmoid() * x

        y = (
            f(x)
            if whole
            else chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        )
        backward(y.sum(), retain_graph=True)
        backward(y.pow(2).sum())
        return {"base": base.grad, "x": x.grad}

    expected = two(whole=True)
    assert_same_gradients(two(whole=False), expected)


def test_pytorch_encoding_76_reentrant_refuses_captured_history(
    device: torch.device,
) -> None:
    """Reentrant raises if two chunks capture a tensor with a history."""
    weight = _x(device, 3, 3).exp()
    y = chunk_and_checkpoint(
        lambda x: x @ weight, _x(device), chunk_size=2, strategy="reentrant"
    )
    with pytest.raises(RuntimeError, match="second time"):
        backward(y.sum())


def _two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * x, y.exp() * y


@twice
@sizes
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pytorch_63524_outputs_backward_one_after_other(
    strategy: Strategy,
    chunk_size: int | None,
    order: tuple[int, int],
    device: torch.device,
) -> None:
    """Results of independent graphs may be backwarded one after another."""
    x, y = _x(device), _x(device)

    def each(results: tuple[Tensor, Tensor]) -> dict[str, Tensor | None]:
        x.grad = y.grad = None
        backward(results[order[0]].sum())
        assert (x.grad is None, y.grad is None) == (order[0] == 1, order[0] == 0)
        backward(results[order[1]].sum())
        return {"x": x.grad, "y": y.grad}

    got = chunk_and_checkpoint(
        _two_results, x, y, chunk_size=chunk_size, strategy=strategy
    )
    assert_same_gradients(each(got), each(_two_results(x, y)))


@sizes
def test_pytorch_63524_reentrant_needs_retain_graph(
    chunk_size: int | None, device: torch.device
) -> None:
    """Under reentrant the results share one node: retain_graph, or an error."""
    x, y = _x(device), _x(device)

    def each(*, retain: bool) -> dict[str, Tensor | None]:
        x.grad = y.grad = None
        results = chunk_and_checkpoint(
            _two_results, x, y, chunk_size=chunk_size, strategy="reentrant"
        )
        backward(results[0].sum(), retain_graph=retain)
        backward(results[1].sum())
        return {"x": x.grad, "y": y.grad}

    plain = torch.autograd.grad([t.sum() for t in _two_results(x, y)], (x, y))
    assert_same_gradients(each(retain=True), dict(zip(("x", "y"), plain, strict=True)))
    with pytest.raises(RuntimeError, match="second time"):
        each(retain=False)


@warned_of_script
@strategies(without=["fused"])  # which raises
@sizes
def test_meanflow_4_func_jvp(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """torch.func.jvp gives the value and the tangent of plain, under any strategy."""
    mlp = _mlp(device)
    x, t, dx, dt = (_x(device).detach() for _ in range(4))

    def f(x: Tensor, t: Tensor) -> Tensor:
        result: Tensor = mlp(x * t.cos()) * t[:, :2]
        return result

    def in_chunks(x: Tensor, t: Tensor) -> Tensor:
        return chunk_and_checkpoint(f, x, t, chunk_size=chunk_size, strategy=strategy)

    expected = torch.func.jvp(f, (x, t), (dx, dt))
    got = torch.func.jvp(in_chunks, (x, t), (dx, dt))
    assert_same(got, expected)
    assert bool((expected[1] != 0).all())
    # The loss of a mean flow: a target of value and tangent, then an ordinary backward.
    leaves = list(mlp.parameters())
    for found, wanted in zip(
        torch.autograd.grad((got[0] - got[1].detach()).pow(2).sum(), leaves),
        torch.autograd.grad((expected[0] - expected[1].detach()).pow(2).sum(), leaves),
        strict=True,
    ):
        assert_close(found, wanted, "parameter.grad")


@warned_of_script
@strategies(without=["fused"])  # which raises
@sizes
@pytest.mark.parametrize("place", ["argument", "captured"])
def test_meanflow_4_forward_mode_tangents(
    strategy: Strategy, chunk_size: int | None, place: str, device: torch.device
) -> None:
    """Tangents of arguments and of captured tensors pass through, none is dropped."""
    x, weight, tangent = _x(device), _x(device, 3, 3), _x(device).detach()

    def tangent_of(*, whole: bool) -> Tensor:
        with forward_ad.dual_level():
            given, w = x, weight
            if place == "argument":
                given = forward_ad.make_dual(x, tangent)
            else:
                w = forward_ad.make_dual(weight, tangent[:3])

            def f(x: Tensor) -> Tensor:
                return (x @ w).sin() * x

            y = (
                f(given)
                if whole
                else chunk_and_checkpoint(
                    f, given, chunk_size=chunk_size, strategy=strategy
                )
            )
            found = forward_ad.unpack_dual(y).tangent
            assert isinstance(found, Tensor)
            return found.detach().clone()

    assert_close(tangent_of(whole=False), tangent_of(whole=True), "tangent")


@warned_of_script
def test_fused_says_why_it_cannot_take_part_in_a_transform(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def f(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(torch.sin, x, chunk_size=2, strategy=strategy)

    x = _x(device).detach()
    strategy: Strategy = "fused"
    for transform in (
        lambda: torch.func.jvp(f, (x,), (x,)),
        lambda: torch.func.vmap(f)(x),
    ):
        with pytest.raises(RuntimeError, match=r"torch.func transform .*'auto'"):
            transform()
    strategy = "auto"
    with caplog.at_level(logging.INFO, "chunkcheck"):
        torch.func.vmap(f)(x)
    assert "without recompute, since a torch.func transform" in caplog.text
