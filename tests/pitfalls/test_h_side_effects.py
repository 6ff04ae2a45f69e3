"""Pitfalls H, continued: caches, recurrent state, grad mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import backward

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Counted,
    Strategy,
    assert_same,
    assert_same_as_plain,
    loop,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])


def _x(device: torch.device) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)


@strategies()
@both_paths
@sizes
def test_memoryvla_18_a_cache_grows_in_recompute_too(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """As documented, what `f` appends to a list of its own, it appends twice."""
    _, shift = capture(device, history=history)
    cache: list[int] = []

    def f(x: Tensor) -> Tensor:
        cache.append(len(x))
        return x.sin() * shift

    y = chunk_and_checkpoint(f, _x(device), chunk_size=chunk_size, strategy=strategy)
    chunks = 3 if chunk_size else 1
    assert len(cache) == chunks
    backward(y.sum())
    assert len(cache) == chunks * (1 if strategy == "none" else 2)


class _Attention:
    def __init__(self, shift: Tensor) -> None:
        self._shift = shift
        self._cache: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self._cache.append(x.detach())
        keys = torch.cat(self._cache)
        return (x @ keys.mT).tanh() @ keys * self._shift


# The reentrant one checks nothing.
@strategies(without=("reentrant", "none"))
@both_paths
@sizes
def test_transformers_30320_a_cache_that_f_reads_is_reported(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """That recompute saves other shapes, as of a grown cache, is an error."""
    f, x = _Attention(capture(device, history=history)[1]), _x(device)
    y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    with pytest.raises(RuntimeError, match="recompute"):
        backward(y.sum())


@both_paths
@sizes
def test_longlive_16_other_values_are_reported_on_request(
    chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """`determinism_check="values"` sees whatever changes a result."""
    f, x = _Attention(capture(device, history=history)[1]), _x(device)
    strategy = Fused(determinism_check="values")
    y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    with pytest.raises(RuntimeError, match="recompute"):
        backward(y.sum())


@strategies()
@both_paths
@sizes
@pytest.mark.parametrize("attached", [True, False])
def test_transformers_43203_forward_with_a_state_in_an_attribute(
    strategy: Strategy,
    chunk_size: int | None,
    caplog: pytest.LogCaptureFixture,
    *,
    attached: bool,
    history: bool,
) -> None:
    """Forward runs `f` once per chunk: its values are the loop's, or a warning tells.

    One node for all chunks sees that a state is attached when `f` has run with it.
    """
    cpu = torch.device("cpu")
    _, shift = capture(cpu, history=history)
    states = [torch.zeros(4, dtype=torch.float64)]

    def f(x: Tensor) -> Tensor:
        y = (x + states[-1]).tanh() * shift
        states.append(y.mean(0) if attached else y.mean(0).detach())
        return y

    x = _x(cpu)
    expected = loop(f, x, chunk_size=chunk_size)
    del states[1:]
    got = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    if "f runs once more on the first" in caplog.text:
        assert attached
        assert strategy in ("auto", "fused")
        assert chunk_size is not None
        return
    assert_same(got, expected)


@strategies()
@both_paths
@sizes
def test_bitsandbytes_1927_grad_mode_of_forward_and_recompute(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """`f` that branches on grad mode takes the branch of plain in every run."""
    leaf, shift = capture(device, history=history)
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return (x.sin() if torch.is_grad_enabled() else x.cos()) * shift

    counted = Counted(f)
    assert_same_as_plain(
        counted,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
    )
    assert all(seen)
    chunks = 3 if chunk_size else 1
    assert len(counted.rows) == 1 + chunks * (1 if strategy == "none" else 2)
