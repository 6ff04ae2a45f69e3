"""Pitfalls E: contexts, modes, default dtype and flags between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from chunkcheck import Fused, NonReentrant, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_same,
    assert_same_gradients,
    loop,
    strategies,
    without_gc,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
# torch's checkpoint replays none of it, but for autocast and, after 2.9, the device
# context of a non-reentrant one.
replaying = strategies(without=("non_reentrant", "reentrant", "own_checkpoint"))
fused = pytest.mark.parametrize("strategy", ["auto", "fused"])
CPU = torch.device("cpu")
Context = Callable[[], AbstractContextManager[object]]


def _x(device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, dtype=dtype, device=device, requires_grad=True)


def _gradients(
    call: Callable[[], Tensor],
    leaves: dict[str, Tensor],
    *,
    forward: Context = nullcontext,
    before: Callable[[], object] = lambda: None,
    recompute: Context = nullcontext,
) -> dict[str, Tensor | None]:
    """Run forward and backward, each in its own surroundings, and collect gradients."""
    for leaf in leaves.values():
        leaf.grad = None
    with forward():
        y = call()
    before()
    gradient = torch.ones_like(y)
    with recompute():
        backward(y, gradient)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    assert any(g is not None for g in gradients.values())
    return {"result": y.detach(), **gradients}


class _Precision:
    """A library's own precision mode, such as fp8: a global that `f` reads."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.entered: list[str] = []

    @contextmanager
    def mode(self, name: str) -> Iterator[None]:
        self.entered.append(name)
        before, self.factor = self.factor, 3.0
        try:
            yield
        finally:
            self.factor = before


@pytest.mark.parametrize("option", [Fused, NonReentrant])
@both_paths
@sizes
def test_transformer_engine_787_contexts_of_a_user(
    option: Any, chunk_size: int | None, *, history: bool
) -> None:
    """`context_fn` gives each chunk its own two contexts, for forward and recompute."""
    precision = _Precision()
    leaf, shift = capture(CPU, history=history)
    x = _x()

    def f(x: Tensor) -> Tensor:
        return (x * precision.factor).sin() * shift

    def context_fn() -> tuple[
        AbstractContextManager[object], AbstractContextManager[object]
    ]:
        return precision.mode("forward"), precision.mode("recompute")

    leaves = {"x": x, "leaf": leaf}
    strategy = option(context_fn=context_fn)
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
        before=lambda: precision.entered.append("backward"),
    )
    chunks = 3 if chunk_size else 1
    runs = ["forward"] * chunks, ["recompute"] * chunks
    assert precision.entered == [*runs[0], "backward", *runs[1]]
    expected = _gradients(lambda: f(x), leaves, forward=lambda: precision.mode("plain"))
    assert_same_gradients(got, expected)


@replaying
@both_paths
@sizes
def test_pytorch_124788_device_context_replayed(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Recompute makes its tensors on the device on which forward made them."""
    leaf, shift = capture(device, history=history)
    x = _x(device)
    made: list[str] = []

    def f(x: Tensor) -> Tensor:
        made.append(torch.ones(()).device.type)
        return x.sin() * shift

    leaves = {"x": x, "leaf": leaf}
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
        forward=lambda: torch.device("meta"),
    )
    times = 1 if strategy == "none" else 2
    assert made == ["meta"] * (3 if chunk_size else 1) * times
    assert_same_gradients(got, _gradients(lambda: f(x), leaves))


@replaying
@both_paths
def test_pytorch_172802_device_context_of_backward_is_not_fs(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """A device context around backward alone does not reach `f`."""
    _, shift = capture(device, history=history)
    x = _x(device)
    made: list[str] = []

    def f(x: Tensor) -> Tensor:
        made.append(torch.ones(()).device.type)
        return x.sin() * shift

    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    gradient = torch.ones_like(y)
    with torch.device("meta"):
        backward(y, gradient)
    assert set(made) == {"cpu"}


@strategies(without=("reentrant",))
@both_paths
def test_pytorch_180423_device_context_is_not_kept(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """After backward nothing holds the context that forward ran in."""
    _, shift = capture(device, history=history)
    x = _x(device)

    def once() -> weakref.ref[object]:
        context = DeviceContext(torch.device("meta"))
        with context:
            y = chunk_and_checkpoint(
                lambda x: x.sin() * shift, x, chunk_size=2, strategy=strategy
            )
        backward(y.sum())
        return weakref.ref(context)

    once()  # the first call of torch's checkpoint keeps one frame
    with without_gc():
        assert once()() is None


class _CosForSin(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.sin, Tensor.sin):
            func = torch.cos
        return func(*args, **(kwargs or {}))


@replaying
@both_paths
@sizes
@pytest.mark.parametrize("where", ["forward", "recompute"])
def test_pytorch_147995_torch_function_mode_replayed(
    strategy: Strategy, chunk_size: int | None, where: str, *, history: bool
) -> None:
    """The function modes of forward, and they alone, act in recompute."""
    leaf, shift = capture(CPU, history=history)
    x = _x()

    def f(x: Tensor) -> Tensor:
        return torch.sin(x).exp() * shift

    def with_cos(x: Tensor) -> Tensor:
        return torch.cos(x).exp() * shift

    leaves = {"x": x, "leaf": leaf}
    modes: dict[str, Context] = {where: _CosForSin}
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
        **modes,
    )
    plain = with_cos if where == "forward" else f
    assert_same_gradients(got, _gradients(lambda: plain(x), leaves))


class _ShiftedExp(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.exp.default else result


@replaying
@both_paths
@sizes
def test_pytorch_84864_dispatch_mode_replayed_or_refused(
    strategy: Strategy, chunk_size: int | None, *, history: bool
) -> None:
    """A dispatch mode that changes what forward saves is replayed, or an error."""
    leaf, shift = capture(CPU, history=history)
    x = _x()

    def f(x: Tensor) -> Tensor:
        return x.exp() * shift  # whose backward is that of its result

    leaves = {"x": x, "leaf": leaf}
    expected = _gradients(lambda: f(x), leaves, forward=_ShiftedExp)
    try:
        got = _gradients(
            lambda: chunk_and_checkpoint(
                f, x, chunk_size=chunk_size, strategy=strategy
            ),
            leaves,
            forward=_ShiftedExp,
        )
    except RuntimeError:
        return
    assert_same_gradients(got, expected)


@replaying
@both_paths
@sizes
def test_finding_6_default_dtype_replayed(
    strategy: Strategy, chunk_size: int | None, *, history: bool
) -> None:
    """Recompute makes its tensors in the default dtype of forward, and leaves ours."""
    leaf, shift = capture(CPU, history=history)
    x = _x()
    made: list[torch.dtype] = []

    def f(x: Tensor) -> Tensor:
        third = torch.tensor(1 / 3)
        made.append(third.dtype)
        return (x * third).sin() * shift

    @contextmanager
    def in_float64() -> Iterator[None]:
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    leaves = {"x": x, "leaf": leaf}
    expected = _gradients(lambda: f(x), leaves, forward=in_float64)
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
        forward=in_float64,
    )
    assert torch.get_default_dtype() == torch.float32
    assert set(made) == {torch.float64}
    assert_same_gradients(got, expected)


class _Flags(nn.Module):
    """What behaves otherwise in training, and what is trained."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)
        ).double()
        self.shift = [shift]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * self.shift[0]
        return result


def _flip(model: _Flags, what: str) -> None:
    if what == "training":
        model.train(not model.training)
    elif what == "one_module":
        model.layers[1].train(not model.training)
    else:
        for parameter in model.layers[0].parameters():
            parameter.requires_grad_(not parameter.requires_grad)


@replaying
@both_paths
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("what", ["training", "one_module", "requires_grad"])
def test_finding_6_flags_flipped_before_backward(
    strategy: Strategy, what: str, *, start: bool, history: bool
) -> None:
    """Recompute sees the flags of forward; what they are afterwards stays.

    What requires a gradient may also be an error.
    """
    leaf, shift = capture(CPU, history=history)
    model = _Flags(shift)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, "leaf": leaf, **dict(model.named_parameters())}

    def found(call: Callable[[], Tensor]) -> tuple[Any, ...]:
        torch.manual_seed(3)
        model.load_state_dict(state)
        model.train(start)
        model.requires_grad_(start)
        gradients, error = None, None
        try:
            gradients = _gradients(call, leaves, before=lambda: _flip(model, what))
        except RuntimeError as raised:
            error = raised
        flags = [m.training for m in model.modules()]
        flags += [p.requires_grad for p in model.parameters()]
        return flags, {n: b.clone() for n, b in model.named_buffers()}, gradients, error

    flags, buffers, expected, _ = found(lambda: loop(model, x, chunk_size=2))
    got = found(lambda: chunk_and_checkpoint(model, x, chunk_size=2, strategy=strategy))
    assert got[0] == flags
    assert_same(got[1], buffers)
    if what != "requires_grad" or got[3] is None:
        assert_same_gradients(got[2], expected)


@replaying
@both_paths
@pytest.mark.parametrize("start", [True, False])
def test_finding_6_argument_frozen_or_not_before_backward(
    strategy: Strategy, *, start: bool, history: bool
) -> None:
    """If an argument is flipped, gradients are plain's, or there is an error."""
    leaf, shift = capture(CPU, history=history)
    x = _x()
    leaves = {"x": x, "leaf": leaf}

    def f(x: Tensor) -> Tensor:
        return x.sin() * shift

    def found(call: Callable[[], Tensor]) -> dict[str, Tensor | None]:
        x.requires_grad_(start)
        return _gradients(call, leaves, before=lambda: x.requires_grad_(not start))

    expected = found(lambda: f(x))
    try:
        got = found(lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy))
    except RuntimeError:
        return
    finally:
        assert x.requires_grad != start
    assert_same_gradients(got, expected)
