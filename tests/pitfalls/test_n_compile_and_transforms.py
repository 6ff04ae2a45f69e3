"""Pitfalls N: torch.compile, torch.func, forward mode.

Under a transform of torch.func nothing can be recomputed: "auto" then runs the plain
loop, "fused" raises. A compiled caller breaks its graph at the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from chunkcheck import chunk_and_checkpoint
from engine_paths import (
    both_paths,
    capture,
    skip_torchs_own_under_tracing,
)
from reference import (
    Strategy,
    assert_same,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
transformed = strategies(without=("fused",))  # which raises
pytestmark = [
    # torch's own, while it traces: it looks at `.grad` of what is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # torch's forward mode scripts its decompositions at the first use.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]

Function = Callable[[Tensor], Tensor]

# Traced, the recompute would be merged with the forward run and save nothing.
BREAKS = (
    "engine: torch.compile breaks its graph at a chunked call; fullgraph forbids it"
)


@pytest.fixture
def dynamo() -> Any:
    """Let torch.compile forget what other tests compiled."""
    torch._dynamo.reset()
    return torch._dynamo


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).to(
        device, torch.float64
    )


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 3), dtype=torch.float64, device=device, requires_grad=True
    )


class Graphs:
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.mark.usefixtures("dynamo")
@pytest.mark.xfail(strict=True, reason=BREAKS)
@strategies(without=("reentrant", "none", "own_checkpoint"))
@both_paths
def test_pytorch_97436_compile_fullgraph(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """The caller compiles as one graph, and gives the same gradients."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, 3, history=history)

    def model(x: Tensor) -> Tensor:
        result: Tensor = chunk_and_checkpoint(
            lambda x: mlp(x) + shift, x, chunk_size=2, strategy=strategy
        )
        return result

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    leaves = (x, mlp, leaf)
    expected = run(lambda: mlp(x) + shift, leaves)
    assert_same_runs(run(lambda: compiled(x), leaves), expected)


@pytest.mark.usefixtures("dynamo")
@strategies()
@sizes
@both_paths
def test_pytorch_121966_compiled_caller_breaks_its_graph_once(
    strategy: Strategy,
    chunk_size: int | None,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """A compiled caller gives the results, gradients and random numbers of eager."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, 3, history=history)
    graphs = Graphs()

    def f(x: Tensor) -> Tensor:
        return nn.functional.dropout(mlp(x) + shift, 0.5).exp()

    def model(x: Tensor) -> Tensor:
        y = chunk_and_checkpoint(f, x * 2, chunk_size=chunk_size, strategy=strategy)
        return y.sin() * 3

    leaves = (x, mlp, leaf)
    torch.manual_seed(5)
    expected = run(lambda: model(x), leaves)
    compiled = torch.compile(model, backend=graphs)
    torch.manual_seed(5)
    assert_same_runs(run(lambda: compiled(x), leaves), expected)
    assert graphs.count == 2


@strategies()
@both_paths
def test_pytorch_139989_graph_break_inside_a_compiled_f(
    strategy: Strategy, *, history: bool, device: torch.device, dynamo: Any
) -> None:
    """`f` may be compiled and break its graph, in forward and in recompute."""
    skip_torchs_own_under_tracing(strategy)
    mlp = _mlp(device)
    leaf, shift = capture(device, 3, history=history)

    def f(x: Tensor) -> Tensor:
        hidden = mlp(x) + shift
        dynamo.graph_break()
        result: Tensor = hidden.sin() * x
        return result

    x = _x(device)
    leaves = (x, mlp, leaf)
    expected = run(lambda: f(x), leaves)
    compiled = torch.compile(f, backend="aot_eager")
    got = run(
        lambda: chunk_and_checkpoint(compiled, x, chunk_size=2, strategy=strategy),
        leaves,
    )
    assert_same_runs(got, expected)


# Compiled autograd does not run reentrant backwards.
@strategies(without=("reentrant",))
@both_paths
def test_pytorch_142862_compiled_autograd(
    strategy: Strategy, *, history: bool, device: torch.device, dynamo: Any
) -> None:
    """A backward that compiled autograd runs gives the same gradients."""
    skip_torchs_own_under_tracing(strategy)
    enable = getattr(dynamo.compiled_autograd, "_enable", None)
    if enable is None:  # torch 2.4
        if strategy in ("auto", "fused") and not history:
            pytest.skip("waits forever for a Function whose backward calls autograd")
        enable = dynamo.compiled_autograd.enable
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, 3, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    def call() -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)

    leaves = (x, mlp, leaf)
    expected = run(lambda: f(x), leaves)
    with enable(lambda graph: graph):
        got = run(call, leaves)
    assert_same_runs(got, expected)


# torch cannot go on after a graph break within a transform, whatever the break is for.
@pytest.mark.usefixtures("dynamo")
@pytest.mark.xfail(strict=True, reason=BREAKS)
@transformed
def test_pytorch_193279_compiled_func_grad(
    strategy: Strategy, device: torch.device
) -> None:
    """torch.compile of torch.func.grad of a chunked call is what it is in eager."""
    mlp, x = _mlp(device), _x(device).detach()

    def loss(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(mlp, x, chunk_size=2, strategy=strategy)
        return y.sin().sum()

    gradient = torch.compile(torch.func.grad(loss), backend="eager")(x)
    assert_same(gradient, torch.func.grad(lambda x: mlp(x).sin().sum())(x))


def _transforms(f: Function, x: Tensor) -> dict[str, Any]:
    """Return what each transform makes of `f` at `x`."""

    def loss(x: Tensor) -> Tensor:
        return f(x).pow(3).sum()

    value, pull_back, *_ = torch.func.vjp(f, x)
    tangent = x.cos()
    return {
        "grad": torch.func.grad(loss)(x),
        "grad_and_value": torch.func.grad_and_value(loss)(x),
        "vjp": (value, pull_back(value.exp())),
        "jvp": torch.func.jvp(f, (x,), (tangent,)),
        "jacrev": torch.func.jacrev(f)(x),
        "jacfwd": torch.func.jacfwd(f)(x),
        "vmap": torch.func.vmap(f)(torch.stack([x, x.sin()])),
    }


@transformed
@sizes
@both_paths
def test_pytorch_122729_func_transforms(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """grad, vjp, jvp, jacrev, jacfwd and vmap are those of plain."""
    mlp = _mlp(device)
    _, shift = capture(device, 3, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin() * x
        return result

    x = _x(device).detach()
    got = _transforms(
        lambda x: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        x,
    )
    assert_same(got, _transforms(f, x))


@transformed
def test_pytorch_146036_per_sample_gradients_of_parameters(
    strategy: Strategy, device: torch.device
) -> None:
    """vmap of grad, over parameters that `f` captures: gradients sample by sample."""
    mlp, x = _mlp(device), _x(device, 4, 5, 3).detach()
    parameters = {name: p.detach() for name, p in mlp.named_parameters()}

    def per_sample(chunked: Callable[[Function, Tensor], Tensor]) -> Any:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            def f(x: Tensor) -> Tensor:
                result: Tensor = torch.func.functional_call(mlp, parameters, (x,))
                return result

            return chunked(f, x).sin().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)

    got = per_sample(
        lambda f, x: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    )
    assert_same(got, per_sample(lambda f, x: f(x)))


@transformed
@sizes
def test_pytorch_129293_forward_over_reverse(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Hessians, and products with them: forward over reverse, and reverse over it."""
    mlp, x, tangent = _mlp(device), _x(device).detach(), _x(device).detach()

    def second(f: Function) -> dict[str, Any]:
        def loss(x: Tensor) -> Tensor:
            return f(x).sin().sum()

        return {
            "hessian": torch.func.hessian(loss)(x),
            "reverse twice": torch.func.jacrev(torch.func.jacrev(loss))(x),
            "product": torch.func.jvp(torch.func.grad(loss), (x,), (tangent,)),
        }

    got = second(
        lambda x: chunk_and_checkpoint(mlp, x, chunk_size=chunk_size, strategy=strategy)
    )
    assert_same(got, second(mlp))


@transformed
def test_pytorch_129293_forward_mode_over_an_ordinary_backward(
    strategy: Strategy, device: torch.device
) -> None:
    """The tangent of a gradient, by a dual number and torch.autograd.grad."""
    mlp, x, tangent = _mlp(device), _x(device), _x(device).detach()

    def product(f: Function) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            (gradient,) = torch.autograd.grad(
                f(dual).sin().sum(), dual, create_graph=True
            )
            found = forward_ad.unpack_dual(gradient).tangent
            assert isinstance(found, Tensor)
            return found.detach().clone()

    got = product(
        lambda x: chunk_and_checkpoint(mlp, x, chunk_size=2, strategy=strategy)
    )
    assert_same(got, product(mlp))


@transformed
@sizes
def test_pytorch_finufft_110_vmap_then_an_outer_backward(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """vmap over a chunked call, and backward through that, parameters included."""
    mlp, x = _mlp(device), _x(device, 2, 5, 3)

    def f(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(
            mlp, x, chunk_size=chunk_size, strategy=strategy
        )
        return y

    leaves = (x, mlp)
    expected = run(lambda: torch.func.vmap(mlp)(x), leaves)
    assert_same_runs(run(lambda: torch.func.vmap(f)(x), leaves), expected)


@strategies(without=("reentrant",))  # torch's refuses autograd.grad
@sizes
@both_paths
def test_pytorch_finufft_95_batched_gradients(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """is_grads_batched and autograd.functional.jacobian are vmap over backward."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, 3, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    def batched(y: Tensor) -> tuple[Tensor, ...]:
        many = torch.eye(15, dtype=torch.float64, device=device).view(15, 5, 3)
        return torch.autograd.grad(
            y, (x, leaf, *mlp.parameters()), many, is_grads_batched=True
        )

    got = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    assert_same(batched(got), batched(f(x)))


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "jacrev", "vmap"])
def test_pytorch_122729_auto_falls_back_and_fused_raises(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """ "fused" says why it raises, and "auto" in the log that it falls back."""
    x = _x(device).detach()
    strategy: Strategy = "auto"

    def f(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(torch.sin, x, chunk_size=2, strategy=strategy)

    transforms: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(lambda x: f(x).sum())(x),
        "vjp": lambda: torch.func.vjp(f, x),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(f)(x),
        "vmap": lambda: torch.func.vmap(f)(x),
    }
    with caplog.at_level(logging.INFO, "chunkcheck"):
        transforms[name]()
    assert "without recompute, since a torch.func transform" in caplog.text
    strategy = "fused"
    with pytest.raises(RuntimeError, match=r"'fused' cannot be exact.*'auto'"):
        transforms[name]()
