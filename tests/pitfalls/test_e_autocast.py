"""Pitfalls E, continued: autocast between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import Strategy, assert_same_gradients, loop, strategies

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
fused = pytest.mark.parametrize("strategy", ["auto", "fused"])
CPU = torch.device("cpu")
# torch disables the autocast of CUDA where there is none.
KINDS = ["cpu", "xpu", "privateuseone", *["cuda"] * torch.cuda.is_available()]
Context = Callable[[], AbstractContextManager[object]]


def _x(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, dtype=dtype, requires_grad=True)


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
    with recompute():
        y.backward(torch.ones_like(y))
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    assert any(g is not None for g in gradients.values())
    return {"result": y.detach(), **gradients}


def _bf16(*, cache_enabled: bool = True) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)


def _anew(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `f`, run in a scope of its own: for the loop as it should be.

    Then the chunks' gradients of a weight are summed in float32, not in bf16.
    """

    def in_own_scope(x: Tensor) -> Tensor:
        torch.clear_autocast_cache()
        return f(x)

    return in_own_scope


class _Casts:
    """`f`, noting what autocast was, and what it made of a product, in every run."""

    def __init__(self, *, history: bool) -> None:
        self.leaf, self._shift = capture(CPU, history=history, dtype=torch.float32)
        self.weight = torch.randn(4, 4, requires_grad=True)
        self.seen: list[tuple[object, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).tanh() @ self.weight
        cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.seen.append((y.dtype, *cast, torch.is_autocast_cache_enabled()))
        return y * self._shift


@strategies()
@both_paths
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_pytorch_71124_autocast_bf16_backward_outside(
    strategy: Strategy, *, history: bool, cache_enabled: bool
) -> None:
    """Recompute outside of autocast casts as forward did: dtype and cache flag."""
    f, x = _Casts(history=history), _x(dtype=torch.float32)
    leaves = {"x": x, "weight": f.weight, "leaf": f.leaf}
    expected = _gradients(
        lambda: loop(_anew(f), x, chunk_size=2),
        leaves,
        forward=lambda: _bf16(cache_enabled=cache_enabled),
    )
    f.seen.clear()
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy),
        leaves,
        forward=lambda: _bf16(cache_enabled=cache_enabled),
    )
    times = 1 if strategy == "none" else 2
    state = (torch.bfloat16, True, torch.bfloat16, cache_enabled)
    assert f.seen == [state] * 3 * times
    if strategy in ("auto", "fused") or not cache_enabled:
        assert_same_gradients(got, expected)
    else:  # the chunks share the cast of a weight, and sum its gradients in bf16
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=5e-2)


@fused
@both_paths
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_forward", [True, False])
def test_pytorch_71169_autocast_of_every_device_type(
    strategy: Any, kind: str, *, in_forward: bool, history: bool
) -> None:
    """The autocast of any device type is replayed, on or off, also without tensors."""
    _, shift = capture(CPU, history=history)
    seen: list[tuple[bool, torch.dtype]] = []

    def f(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        return x.sin() * shift

    @contextmanager
    def cast() -> Iterator[None]:
        dtype = torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_dtype(kind, dtype)

    x = _x()
    _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy),
        {"x": x},
        forward=cast if in_forward else nullcontext,
        recompute=nullcontext if in_forward else cast,
    )
    assert [enabled for enabled, _ in seen] == [in_forward] * 6
    if in_forward:
        assert {dtype for _, dtype in seen} == {torch.bfloat16}


@strategies()
@both_paths
def test_fairscale_1199_autocast_dtype_changed_before_backward(
    strategy: Strategy, *, history: bool
) -> None:
    """Recompute has forward's dtype, whatever autocast's default is by then."""
    f, x = _Casts(history=history), _x(dtype=torch.float32)
    default = torch.get_autocast_dtype("cpu")
    leaves = {"x": x, "weight": f.weight, "leaf": f.leaf}
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        got = _gradients(
            lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy),
            leaves,
            forward=lambda: torch.autocast("cpu"),
            before=lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
            recompute=_bf16,
        )
    finally:
        torch.set_autocast_dtype("cpu", default)
    assert {dtype for dtype, *_ in f.seen} == {torch.float16}
    assert {dtype for _, _, dtype, _ in f.seen} == {torch.float16}
    expected = _gradients(lambda: f(x), leaves)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2, check_dtype=False)


@strategies()
@both_paths
@sizes
def test_pytorch_141896_weight_used_without_and_with_grad(
    strategy: Strategy, chunk_size: int | None, *, history: bool
) -> None:
    """`f` may use a weight under no_grad first: no error, and the loop's gradients.

    Up to 2.9 torch itself loses some, since it caches the cast without a graph.
    """
    leaf, shift = capture(CPU, history=history, dtype=torch.float32)
    weight = torch.randn(4, 4, requires_grad=True)
    x = _x(dtype=torch.float32)

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = x @ weight
        return (x @ weight).tanh() * shift + target

    leaves = {"x": x, "weight": weight, "leaf": leaf}
    expected = _gradients(
        lambda: loop(_anew(f), x, chunk_size=chunk_size), leaves, forward=_bf16
    )
    got = _gradients(
        lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy),
        leaves,
        forward=_bf16,
    )
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=5e-2)


@fused
@both_paths
@sizes
def test_flow_factory_186_no_stale_cast_of_a_weight(
    strategy: Any, chunk_size: int | None, *, history: bool
) -> None:
    """A weight changed within one autocast block is cast anew, in both runs."""
    leaf, shift = capture(CPU, history=history, dtype=torch.float32)
    weight = torch.randn(4, 4, requires_grad=True)
    start = weight.detach().clone()
    x = _x(dtype=torch.float32)

    def f(x: Tensor) -> Tensor:
        return (x @ weight).tanh() @ weight * shift

    def steps(call: Callable[[], Tensor]) -> list[dict[str, Tensor | None]]:
        found = []
        weight.data.copy_(start)
        for _ in range(2):
            leaves = {"x": x, "weight": weight, "leaf": leaf}
            found.append(_gradients(call, leaves))
            f(x)  # leaves a cast of the weight in the cache of the block
            with torch.no_grad():
                weight.mul_(-2)
        return found

    with _bf16():
        expected = steps(lambda: loop(_anew(f), x, chunk_size=chunk_size))
    with _bf16():
        got = steps(
            lambda: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        )
    for step, wanted in zip(got, expected, strict=True):
        assert_same_gradients(step, wanted)
