"""Pitfalls K: a recompute that differs, early stop, exceptions, compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture, skip_torchs_own_under_tracing
from reference import (
    Strategy,
    assert_same,
    assert_same_as_loop,
    assert_same_as_plain,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
# What torch's own say of a recompute that differs is not ours.
engine = strategies(without=("non_reentrant", "reentrant", "none", "own_checkpoint"))


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(
        device, torch.float64
    )


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 4), dtype=torch.float64, device=device, requires_grad=True
    )


Changed = Callable[[Tensor], dict[str, Any]]
ANOTHER_RESULT: dict[str, tuple[Changed, str]] = {
    "structure": (lambda y: {"y": y, "z": y}, r"result"),
    "name": (lambda y: {"z": y}, r"result"),
    "shape": (lambda y: {"y": y[:, :3]}, r"result\['y'\]"),
    "rows": (lambda y: {"y": y.repeat(2, 1)}, r"result\['y'\]"),
    "dtype": (lambda y: {"y": y.float()}, r"result\['y'\]"),
    "no_tensor": (lambda _: {"y": 3.0}, r"result\['y'\]"),
    "nested": (lambda y: {"y": (y, y)}, r"result\['y'\]"),
}


@engine
@both_paths
@pytest.mark.parametrize("what", ANOTHER_RESULT)
def test_pytorch_155171_recompute_that_differs_names_chunk_and_leaf(
    strategy: Strategy, what: str, *, history: bool, device: torch.device
) -> None:
    """A recompute of another structure, shape or dtype raises: which chunk and leaf."""
    x = _x(device)
    leaf, shift = capture(device, history=history)
    change, path = ANOTHER_RESULT[what]
    calls = 0

    def f(x: Tensor) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        y = (x + shift).sin()
        again = calls > 3 and bool((x == given[2:4]).all())  # rows 2:4 again
        return change(y) if again else {"y": y}

    given = torch.cat([x.detach(), x.detach()[:1]])
    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)["y"]
    with pytest.raises(RuntimeError, match=rf"rows 2:4 of 5.*{path}"):
        backward(y.sum())
    assert x.grad is None
    assert leaf.grad is None


@engine
@both_paths
@pytest.mark.parametrize("what", ["another_capture", "no_gradient", "other_saved"])
def test_llamafactory_6438_recompute_of_another_graph_raises(
    strategy: Strategy, what: str, *, history: bool, device: torch.device
) -> None:
    """So does one whose graph differs, or what it saves."""
    x, other = _x(device), _x(device, 4)
    _, shift = capture(device, history=history)
    calls = 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = (x + shift).sin()
        if calls <= 3:
            return y
        if what == "no_gradient":
            return y.detach()
        return y * other.exp() if what == "another_capture" else y.exp().log()

    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    if what == "other_saved" and not history:  # one node takes another graph as good
        backward(y.sum())
        return
    with pytest.raises(RuntimeError, match=r"recompute of rows \d:\d of 5"):
        backward(y.sum())
    assert x.grad is None


@engine
@both_paths
def test_torchtitan_1117_check_can_be_left_out(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """determinism_check='none' takes what comes, here a drift of equal shapes."""
    x = _x(device)
    _, shift = capture(device, history=history)
    calls = 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (x + shift).sin() * (2 if calls > 3 else 1)

    options = Fused(determinism_check="none", fall_back=strategy == "auto")
    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=options)
    backward(y.sum())
    assert x.grad is not None


@sizes
@both_paths
@pytest.mark.parametrize("check", ["default", "values"])
def test_automodel_2635_drift_of_values(
    check: Any, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Drift of equal shapes goes unnoticed by default; the value check names it."""
    x = _x(device)
    _, shift = capture(device, history=history)
    drift = 0.0

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x + shift).sin()
        return y, y.topk(2).values + drift

    strategy = Fused(determinism_check=check)
    y, top = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    drift = 0.5
    loss = y.sum() + top.sum()
    if check == "default":
        backward(loss)
        return
    with pytest.raises(RuntimeError, match=r"recompute of rows .*result\[1\]"):
        backward(loss)
    assert x.grad is None


@sizes
@both_paths
def test_automodel_3140_value_check_passes_what_agrees(
    chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """The value check accepts dropout, NaN, non-tensors and out_dim None and 'sum'."""
    x = _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> tuple[Tensor, Tensor, str, Tensor]:
        hidden = nn.functional.dropout(x + shift, 0.5)
        return hidden.sin(), x.detach() * float("nan"), "kept", shift.exp()

    y, nan, name, whole = chunk_and_checkpoint(
        f,
        x,
        chunk_size=chunk_size,
        out_dim=(0, 0, None, None),
        strategy=Fused(determinism_check="values"),
    )
    backward(y.sum() + whole.sum())
    assert bool(nan.isnan().all())
    assert name == "kept"
    for tensor in (x, leaf):
        assert tensor.grad is not None


class SavingMore(torch.autograd.Function):
    """Saves more where nobody is looking, as a fused kernel's Function may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(*(x + i for i in range(count)))
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0].exp(), None


@strategies()
@sizes
@both_paths
def test_tinyllama_152_function_that_saves_otherwise_without_grad(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A Function that saves other tensors where grad mode is off is no problem."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        count = 1 if torch.is_grad_enabled() else 3
        result: Tensor = SavingMore.apply(mlp(x) + shift, count)  # type: ignore[no-untyped-call]
        return result

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=(mlp, leaf)
    )


# torch's own non-reentrant stops the recompute early, by an exception inside `f`;
# "non_reentrant" leaves that out.
@strategies(without=("own_checkpoint",))
@sizes
@both_paths
@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_pytorch_96866_f_with_broad_except(
    strategy: Strategy,
    chunk_size: int | None,
    kind: type[BaseException],
    *,
    history: bool,
    device: torch.device,
) -> None:
    """`f` may catch whatever there is: no exception of ours passes through it."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)
    caught: list[BaseException] = []

    def f(x: Tensor) -> Tensor:
        try:
            result: Tensor = (mlp(x) + shift).sin().exp() * x
        except kind as error:
            caught.append(error)
            return x
        return result

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=(mlp, leaf)
    )
    assert caught == []


@strategies(without=("own_checkpoint",))  # which stops early
@both_paths
def test_pytorch_90105_f_runs_to_its_end_in_recompute(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """What `f` sets back at its end is set back in recompute as well."""
    mlp = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to(device, torch.float64)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        mlp.eval()
        result: Tensor = mlp(x) + shift
        mlp.train()
        return result

    assert_same_as_loop(
        f,
        (_x(device),),
        chunk_size=2,
        strategy=strategy,
        captured=(mlp, leaf),
        state=lambda: [module.training for module in mlp.modules()],
    )


@engine
@both_paths
@pytest.mark.parametrize("failing", [4, 5, 6])
def test_pytorch_90105_exception_in_recompute_leaves_all_as_it_was(
    strategy: Strategy, failing: int, *, history: bool, device: torch.device
) -> None:
    """Random state, buffers, modes, flags: as before. And backward can be run again."""
    mlp = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-2), nn.Dropout())
    mlp.to(device, torch.float64)
    x = _x(device, 6, 4)
    leaf, shift = capture(device, history=history)
    calls = 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = mlp(x) + shift
        if calls == failing:
            raise ZeroDivisionError
        result: Tensor = y.sin()
        return result

    def state() -> list[Tensor]:
        return [torch.get_rng_state(), *(b.clone() for b in mlp.buffers())]

    leaves = (mlp, leaf, x)
    start = state()

    def call() -> Tensor:
        nonlocal calls
        torch.set_rng_state(start[0])
        with torch.autocast("cpu", enabled=False):
            return chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)

    calls = 10  # which does not fail
    expected = run(call, leaves)
    calls = 0
    y = call()
    before = state()
    with pytest.raises(ZeroDivisionError):
        backward(y.sum(), retain_graph=True)
    assert_same(state(), before)
    assert all(t.grad is None for t in (x, leaf, *mlp.parameters()))
    assert torch.is_grad_enabled()
    got = run(lambda: y, leaves)
    assert_same(got.gradients, expected.gradients)


# torch's own, while it traces: it looks at `.grad` of a chunk, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@strategies()
@both_paths
def test_pytorch_166926_compiled_f_with_a_ragged_tail(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """A compiled `f` sees the shorter last chunk, and its recompute, as a plain one."""
    skip_torchs_own_under_tracing(strategy)
    torch._dynamo.reset()
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    compiled = torch.compile(f, backend="aot_eager")
    leaves = (x := _x(device, 7, 4), mlp, leaf)
    expected = run(lambda: f(x), leaves)
    for _ in range(2):
        got = run(
            lambda: chunk_and_checkpoint(compiled, x, chunk_size=3, strategy=strategy),
            leaves,
        )
        assert_same_runs(got, expected)
