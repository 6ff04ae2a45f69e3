"""What `f` may capture: item 5 of section 4 A of the notes on peers, and the issue."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from engine_paths import OWN_GRAPH, both_paths, capture
from reference import (
    Strategy,
    assert_same_as_plain,
    assert_same_runs,
    run,
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


@strategies(without=("non_reentrant", "reentrant", "none", "own_checkpoint"))
@both_paths
def test_history_decides_the_path(
    strategy: Strategy,
    *,
    history: bool,
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What these tests rely on: a capture with a history takes the general way."""
    _, shift = capture(device, history=history)
    chunk_and_checkpoint(
        lambda x: (x + shift).sin(), _x(device), chunk_size=2, strategy=strategy
    )
    assert (OWN_GRAPH in caplog.text) is history


class Holder:
    """Holds a module and a tensor, in fields and slots."""

    __slots__ = ("mlp", "table")

    def __init__(self, mlp: nn.Module, table: dict[str, list[Tensor]]) -> None:
        self.mlp = mlp
        self.table = table

    def method(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x) + self.table["shift"][0]
        return result

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)


_MLP = nn.Linear(4, 4, dtype=torch.float64)
_SHIFT: list[Tensor] = []


def _of_globals(x: Tensor) -> Tensor:
    result: Tensor = _MLP(x).sin() + _SHIFT[0]
    return result


def _with_default(x: Tensor, shift: list[Tensor] = _SHIFT) -> Tensor:
    return x.sin() * shift[0]


@strategies()
@sizes
@both_paths
@pytest.mark.parametrize(
    "kind", ["method", "object", "partial", "cell", "global", "default", "module"]
)
def test_5_captures_of_any_kind(
    strategy: Strategy,
    chunk_size: int | None,
    kind: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Modules, bound methods, partials, cells, globals: all captures get gradients."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)
    holder = Holder(mlp, {"shift": [shift]})
    _SHIFT[:] = [shift]
    _MLP.to(device)

    def added(shift: Tensor, x: Tensor, *, scale: Tensor) -> Tensor:
        result: Tensor = mlp(x + shift) * scale
        return result

    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "method": holder.method,
        "object": holder,
        "partial": functools.partial(added, shift, scale=shift.cos().detach()),
        "cell": lambda x: added(shift, x, scale=shift),
        "global": _of_globals,
        "default": _with_default,
        "module": nn.Sequential(mlp, Shifted(shift)),
    }
    try:
        assert_same_as_plain(
            kinds[kind],
            (_x(device),),
            chunk_size=chunk_size,
            strategy=strategy,
            captured=(mlp, leaf, _MLP),
        )
    finally:
        _SHIFT.clear()


class Shifted(nn.Module):
    """A module that holds a tensor which is neither parameter nor buffer."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@twice  # reentrant goes through the captured history once per chunk
@sizes
def test_5_captured_activation_is_traversed_once(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """An activation with a history gets one gradient, and passes it on once."""
    leaf, x, buffer = _x(device, 4), _x(device), _x(device, 4).detach()
    calls: list[Tensor] = []

    def model(*, whole: bool) -> Tensor:
        scale = leaf.exp()
        scale.register_hook(calls.append)

        def f(x: Tensor) -> Tensor:
            return (x * scale).sin() + buffer

        if whole:
            return f(x)
        return chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)

    expected = run(lambda: model(whole=True), (leaf, x))
    assert_same_runs(run(lambda: model(whole=False), (leaf, x)), expected)
    assert len(calls) == 2


@strategies()
@both_paths
def test_issue_mixture_of_experts_and_shared_tensors(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Parameters that some chunks use or none; one tensor as two arguments, and whole.

    Each expert is run on the rows of its own only, so a chunk may skip some.
    """
    experts = nn.ModuleList(_mlp(device) for _ in range(4))
    leaf, shift = capture(device, history=history)
    x = _x(device, 6, 4)
    route = torch.tensor([0, 0, 1, 2, 2, 2], device=device)  # the fourth has none

    def f(x: Tensor, same: Tensor, whole: Tensor, route: Tensor) -> Tensor:
        y = x * same + whole.mean(0)
        for index, expert in enumerate(experts):
            rows = (route == index).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return y * shift

    got = assert_same_as_plain(
        f,
        (x, x, x, route),
        chunk_size=2,
        batch_dim=(0, 0, None, 0),
        strategy=strategy,
        captured=(experts, leaf),
    )
    unused = [name for name, gradient in got.gradients.items() if gradient is None]
    assert len([name for name in unused if "[0].3." in name]) == 4
    assert len(unused) == 5  # those of the fourth expert, and `route`
