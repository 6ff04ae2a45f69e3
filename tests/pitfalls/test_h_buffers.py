"""Pitfalls H: batch norm and other buffers that `f` writes to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.utils import parametrizations, spectral_norm

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_same,
    assert_same_as_loop,
    loop,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [3, None], ids=["ragged", "single"])
# torch's checkpoint knows nothing of buffers: recompute updates them once more.
replaying = strategies(without=("non_reentrant", "reentrant", "own_checkpoint"))
fused = pytest.mark.parametrize("strategy", ["auto", "fused"])


def _x(device: torch.device) -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, device=device, requires_grad=True)


def _buffers(module: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return copies of all buffers, also of those that a state dict leaves out."""
    return [_copies(child._buffers) for child in module.modules()]


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {k: None if b is None else b.detach().clone() for k, b in buffers.items()}


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Return what gives all buffers the values back that they have now."""
    state = _buffers(module)

    def restore() -> None:
        for child, buffers in zip(module.modules(), state, strict=True):
            child._buffers.clear()
            child._buffers.update(_copies(buffers))

    return restore


class _Average(nn.Module):
    """Scales by a moving average that it keeps, in place or by a new tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how
        self.average: Tensor
        self.register_buffer("average", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.average.clone()
        mean = x.detach().mean(0)
        if self._how == "in_place":
            self.average.mul_(0.9).add_(mean)
        else:
            self.average = self.average * 0.9 + mean
        return y


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
    ),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "old_spectral_norm": lambda: spectral_norm(nn.Linear(4, 3)),
    "in_place": lambda: _Average("in_place"),
    "replaced": lambda: _Average("replaced"),
}


@replaying
@both_paths
@sizes
@pytest.mark.parametrize("norm", NORMS)
def test_pytorch_96136_buffers_updated_once_per_chunk(
    strategy: Strategy,
    chunk_size: int | None,
    norm: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Buffers are the loop's after backward, and recompute sees what forward saw."""
    layers = nn.Sequential(nn.Linear(4, 4), NORMS[norm](), nn.Flatten())
    layers.to(device, torch.float64)
    leaf, shift = capture(device, 1, history=history)
    assert_same_as_loop(
        lambda x: (layers(x) * shift).tanh(),
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=[layers, leaf],
        state=lambda: _buffers(layers),
        reset=_restorer(layers),
    )


@replaying
@both_paths
def test_pytorch_62471_statistics_are_those_of_forward_before_backward(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Backward changes no buffer, called once or twice, nor one's identity."""
    norm = nn.BatchNorm1d(4).to(device, torch.float64)
    _, shift = capture(device, history=history)
    y = chunk_and_checkpoint(
        lambda x: norm(x) * shift, _x(device), chunk_size=3, strategy=strategy
    )
    before, same = _buffers(norm), dict(norm.named_buffers())
    for retain_graph in (True, False):
        backward(y.sum(), retain_graph=retain_graph)
        assert_same(_buffers(norm), before)
        assert all(same[name] is buffer for name, buffer in norm.named_buffers())


@fused
@sizes
def test_efficient_densenet_73_a_second_start_updates_once(
    strategy: Any, chunk_size: int | None, device: torch.device
) -> None:
    """Where one node for all turns out not to do, the update of the try is undone."""
    norm = nn.BatchNorm1d(4).to(device, torch.float64)
    leaf = _x(device)
    history = -leaf
    hidden = weakref.ref(history)  # which no search finds before `f` runs

    def f(x: Tensor) -> Tensor:
        captured = hidden()
        assert captured is not None
        result: Tensor = norm(x) * captured[0]
        return result

    assert_same_as_loop(
        f,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=[norm, leaf],
        state=lambda: _buffers(norm),
        reset=_restorer(norm),
    )


@replaying
@both_paths
@pytest.mark.parametrize("momentum", [0.1, None])
def test_pytorch_pfn_extras_117_batches_are_counted_once(
    strategy: Strategy,
    momentum: float | None,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """`num_batches_tracked` is the number of chunks, so no momentum need be scaled."""
    norm = nn.BatchNorm1d(4, momentum=momentum).to(device, torch.float64)
    _, shift = capture(device, history=history)
    assert norm.num_batches_tracked is not None
    for step in (1, 2):
        y = chunk_and_checkpoint(
            lambda x: norm(x) * shift, _x(device), chunk_size=3, strategy=strategy
        )
        assert int(norm.num_batches_tracked) == 3 * step
        backward(y.sum())
        assert int(norm.num_batches_tracked) == 3 * step


@replaying
@both_paths
@pytest.mark.parametrize("keep_chunks", [0, 1, 3])
def test_yolo_master_262_state_after_training(
    strategy: Any, keep_chunks: int, *, history: bool, device: torch.device
) -> None:
    """After some steps all state is the loop's, parameters and buffers."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 6)),
        nn.BatchNorm1d(6, momentum=None),
        nn.GELU(),
        nn.Dropout(0.2),
        _Average("replaced"),
    )
    model[4].average = torch.ones(6)
    model.to(device, torch.float64)
    leaf, _ = capture(device, 1, history=history)
    model.register_parameter("leaf", nn.Parameter(leaf.detach()))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = _x(device)
    if strategy != "none":
        strategy = Fused(keep_chunks=keep_chunks, fall_back=strategy == "auto")

    def train(call: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> object:
        torch.manual_seed(3)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name])
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            shift = parameters["leaf"].exp() if history else parameters["leaf"]
            backward(call(_Shifted(model, shift)).square().mean())
            optimizer.step()
        return _buffers(model), list(model.parameters()), torch.get_rng_state()

    restore = _restorer(model)
    expected = train(lambda f: loop(f, x, chunk_size=3))
    restore()
    got = train(lambda f: chunk_and_checkpoint(f, x, chunk_size=3, strategy=strategy))
    assert_same(got, expected)


class _Shifted:
    def __init__(self, module: nn.Module, shift: Tensor) -> None:
        self._module, self._shift = module, shift

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._module(x) + self._shift
        return result


class _Lazy(nn.Module):
    """Makes its buffer at the first call, on another path than later calls take."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.peak: Tensor | None
        if how == "declared":
            self.register_buffer("peak", None)

    def forward(self, x: Tensor) -> Tensor:
        peak = self._buffers.get("peak")
        new = x.detach().abs().amax()
        if peak is None:
            self.register_buffer("peak", new)
            return x.sin()
        self.peak = torch.maximum(peak, new)
        return (x / peak).cos()


@replaying
@both_paths
@sizes
@pytest.mark.parametrize("how", ["declared", "undeclared"])
def test_automodel_3247_buffer_created_in_the_first_chunk(
    strategy: Strategy,
    chunk_size: int | None,
    how: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Recompute of the first chunk finds no buffer again, that of others finds one."""
    lazy = _Lazy(how)
    leaf, shift = capture(device, history=history)
    assert_same_as_loop(
        lambda x: lazy(x) * shift,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
        state=lambda: _buffers(lazy),
        reset=_restorer(lazy),
    )


class _Recurrent(nn.Module):
    """Keeps its state from one call to the next, attached to the graph or not."""

    def __init__(self, *, attached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._attached = attached
        self.state: Tensor
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.linear(x) + self.state).tanh()
        state = y.mean(0)
        self.state = state if self._attached else state.detach()
        return y


@replaying
@both_paths
@sizes
def test_transformers_43203_state_between_calls(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A detached state in a buffer goes from chunk to chunk, and from call to call."""
    module = _Recurrent(attached=False).to(device, torch.float64)
    leaf, shift = capture(device, history=history)
    x = _x(device)
    restore = _restorer(module)

    def twice(call: Callable[[], Tensor]) -> object:
        restore()
        found = []
        for _ in range(2):
            y = call()
            leaves = [x, leaf, *module.parameters()]
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
        return found, _buffers(module)

    def f(x: Tensor) -> Tensor:
        result: Tensor = module(x) * shift
        return result

    expected = twice(lambda: loop(f, x, chunk_size=chunk_size))
    got = twice(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    )
    assert_same(got, expected)


@replaying
@sizes
def test_transformers_43203_state_attached_to_the_graph(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """An attached state, which recompute finds detached, is the loop's or an error."""
    module = _Recurrent(attached=True).to(device, torch.float64)
    try:
        assert_same_as_loop(
            lambda x: module(x) + module(x),
            (_x(device),),
            chunk_size=chunk_size,
            strategy=strategy,
            captured=module,
            reset=lambda: setattr(module, "state", torch.zeros(4, dtype=torch.float64)),
        )
    except RuntimeError as error:
        assert "used other tensors that require a gradient" in str(error)  # noqa: PT017
        assert chunk_size is not None
