"""What the tiled MLPs of other libraries get wrong: section 4 A of the notes on peers.

Tests are named after the item there. Item 2 is in `test_j_hooks` and
`test_m_distributed`, item 5 in `test_peers_captures`; items 6 and 7, on randomness and
autocast, are looked at here from outside `f` alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Counted,
    Strategy,
    assert_close,
    assert_same_as_loop,
    assert_same_as_plain,
    assert_same_gradients,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
twice = strategies(without=("reentrant",))  # which refuses autograd.grad


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(
        device, torch.float64
    )


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 4), dtype=torch.float64, device=device, requires_grad=True
    )


@strategies()
@both_paths
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_1_gradients_match_for_all_leaves(
    strategy: Strategy,
    dim: int,
    chunk_size: int,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Every number of rows and size of chunk, along every dim, non-contiguous too."""
    leaf, shift = capture(device, 1, history=history)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * shift).sin() * y.exp()

    for rows in (0, 1, 2, 5, 7, 12, 13):
        shape = [3, 2, 4]
        shape[dim] = rows
        x = _x(device, *shape[::-1]).detach().permute(2, 1, 0).requires_grad_()
        expanded = _x(device, 1).expand(shape)
        assert_same_as_plain(
            f,
            (x, expanded),
            chunk_size=chunk_size,
            batch_dim=dim,
            out_dim=dim,
            strategy=strategy,
            captured=leaf,
        )


@twice
@sizes
@both_paths
def test_3_autograd_grad_leaves_grad_untouched(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """autograd.grad writes no `.grad`, and backward(inputs=) those of its inputs."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    leaves = {"x": x, "leaf": leaf, **dict(mlp.named_parameters())}

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    def grads(y: Tensor) -> dict[str, Tensor | None]:
        found = torch.autograd.grad(y.sum(), [*leaves.values()])
        return dict(zip(leaves, found, strict=True))

    def call() -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)

    expected = grads(f(x))
    assert_same_gradients(grads(call()), expected)
    assert all(t.grad is None for t in leaves.values())
    for name, tensor in leaves.items():
        backward(call().sum(), inputs=[tensor])
        only = {n: expected[n] if n == name else None for n in leaves}
        assert_same_gradients({n: t.grad for n, t in leaves.items()}, only)
        tensor.grad = None


@strategies()
@sizes
@both_paths
@pytest.mark.parametrize("frozen", ["x", "mlp", "base of LoRA", "x and mlp"])
def test_4_frozen_parts(
    strategy: Strategy,
    chunk_size: int | None,
    frozen: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """What is frozen gets no gradient, everything else its own."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    down, up = _x(device, 4, 2), _x(device, 2, 4)
    x.requires_grad_("x" not in frozen.split())
    mlp.requires_grad_(frozen == "x")

    def f(x: Tensor) -> Tensor:
        result: Tensor = mlp(x) + shift + x @ down @ up
        return result

    got = assert_same_as_plain(
        f,
        (x,),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=(mlp, leaf, down, up),
    )
    trained = [name for name, g in got.gradients.items() if g is not None]
    assert len(trained) == 3 + 4 * (frozen == "x") + (not frozen.startswith("x"))


@strategies()
def test_4_all_frozen_runs_once(strategy: Strategy, device: torch.device) -> None:
    """If nothing requires a gradient, `f` runs once per chunk and nothing is kept."""
    f = Counted(_mlp(device).requires_grad_(requires_grad=False))
    y = chunk_and_checkpoint(f, _x(device).detach(), chunk_size=2, strategy=strategy)
    assert not y.requires_grad
    assert f.rows == [2, 2, 1]


@strategies()
@both_paths
def test_6_dropout_mask_is_that_of_forward(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """With a linear last layer, the sum of the result is the weight's own product."""
    weight, x = _x(device, 4, 4), _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        return functional.dropout(x + shift, 0.5) @ weight

    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    backward(y.sum())
    assert weight.grad is not None
    assert_close((weight * weight.grad).sum(), y.sum(), "sum")
    assert_same_as_loop(
        f, (x,), chunk_size=2, strategy=strategy, captured=(weight, leaf)
    )


@strategies(without=("own_checkpoint",))  # which stops its recompute early
@both_paths
def test_7_autocast_is_that_of_forward(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Backward outside of autocast recomputes in bf16, its exceptions kept."""
    linear = nn.Linear(4, 4, device=device)
    leaf, shift = capture(device, history=history, dtype=torch.float32)
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def f(x: Tensor) -> Tensor:
        hidden = linear(x)
        with torch.autocast(device.type, enabled=False):
            exact = x.float() @ linear.weight
        seen.append((hidden.dtype, exact.dtype))
        result: Tensor = hidden + exact + shift
        return result

    x = torch.randn(5, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    backward(y.sum())
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert len(seen) == (3 if strategy == "none" else 6)
    assert linear.weight.grad is not None
    assert leaf.grad is not None


@strategies()
@sizes
@both_paths
def test_8_nothing_is_written_to(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Inputs, captures and the incoming gradient stay as they are, bit by bit."""
    mlp, x, table = _mlp(device), _x(device), _x(device, 4, 4)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor, table: Tensor) -> Tensor:
        result: Tensor = mlp(x @ table + shift)
        return result

    def grads(y: Tensor) -> dict[str, Tensor | None]:
        found = {}
        for count in range(2):
            for t in (x, table, leaf, *mlp.parameters()):
                t.grad = None
            backward(
                [(y * 0.25).sum() + x.sum(), y],
                [torch.ones_like(y.sum()), given],
                retain_graph=count == 0,
            )
            for name, t in {"x": x, "table": table, "leaf": leaf}.items():
                found[f"{count} {name}"] = t.grad
            for name, t in mlp.named_parameters():
                found[f"{count} {name}"] = t.grad
        return found

    given = torch.randn(5, 4, dtype=torch.float64, device=device)
    watched = [given, x, table, shift, *mlp.parameters()]
    before = [(t.detach().clone(), t._version) for t in watched]
    expected = grads(f(x, table))
    y = chunk_and_checkpoint(
        f, x, table, chunk_size=chunk_size, batch_dim=(0, None), strategy=strategy
    )
    got = grads(y)
    assert_same_gradients(got, expected)
    for t, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(t, value)
        assert t._version == version
    for name, gradient in got.items():
        if name.startswith("0"):
            assert torch.equal(gradient, got["1" + name[1:]])  # type: ignore[arg-type]


class Pair(NamedTuple):
    wide: Tensor
    label: Tensor


@strategies()
@sizes
@both_paths
def test_9_results_of_any_kind(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Trees, None, integers, other widths, another dim, and a result left unused."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> dict[str, Any]:
        hidden = mlp(x) + shift
        return {
            "pair": Pair(torch.cat([hidden, x], 1), hidden.argmax(1)),
            "rest": [None, "name", 3],
            "turned": hidden.mT.exp(),
        }

    out_dim = {"pair": 0, "rest": None, "turned": 1}
    assert_same_as_plain(
        f,
        (x,),
        chunk_size=chunk_size,
        out_dim=out_dim,
        strategy=strategy,
        captured=(mlp, leaf),
    )


@twice
@sizes
@both_paths
def test_9_unused_result_costs_no_zeros(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """What only an unused result needs gets None, and no buffer of zeros is made."""
    a, b = _x(device), _x(device)
    leaf, shift = capture(device, history=history)
    seen: list[Tensor | None] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            ctx.set_materialize_grads(False)
            return a * 2, b * 3

        @staticmethod
        def backward(_: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
            seen.append(given[1])
            return given

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        first, second = Watch.apply(a, b)  # type: ignore[no-untyped-call]
        return first + shift, second

    used, _ = chunk_and_checkpoint(f, a, b, chunk_size=chunk_size, strategy=strategy)
    backward(used.sum())
    assert a.grad is not None
    assert leaf.grad is not None
    assert b.grad is None
    assert seen
    assert all(gradient is None for gradient in seen)


@twice
def test_issue_gradgradcheck_with_captures(strategy: Strategy) -> None:
    """Double backward, numerically: cut, whole, captured leaf, captured history."""
    cpu = torch.device("cpu")
    x, table, leaf, other = _x(cpu, 3, 2), _x(cpu, 2, 2), _x(cpu, 2), _x(cpu, 2)

    def f(x: Tensor, table: Tensor, leaf: Tensor, other: Tensor) -> Tensor:
        history = other.exp()
        return chunk_and_checkpoint(
            lambda x, table: (x @ table).sin() * leaf + history * x,
            x,
            table,
            chunk_size=2,
            batch_dim=(0, None),
            strategy=strategy,
        )

    assert torch.autograd.gradgradcheck(f, (x, table, leaf, other))
