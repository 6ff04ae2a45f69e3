"""Tests of `diagnostics.tune`: the chunk size by memory and time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory, tune
from reference import rows


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)).double()


def peak(f: Any, x: Tensor, size: int | None) -> int:
    def step() -> None:
        y = chunk_and_checkpoint(f, x, chunk_size=size)
        leaves = [x, *f.parameters()]
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    step()
    return measure_memory(step).peak_bytes


@pytest.mark.parametrize("share", [0.1, 0.5, 2])
def test_what_is_chosen_fits(share: float) -> None:
    f, x = mlp(), rows(500, 16)
    least, most = peak(f, x, 2), peak(f, x, None)
    budget = int(least + share * (most - least))
    size = tune(f, x, memory_budget=budget)
    assert peak(f, x, size) <= 1.02 * budget
    assert size > 1  # single rows are slow


class Slow(nn.Module):
    """Takes a time per call and one per row, so that it is known what is fast."""

    def __init__(self, per_call: float, per_row: float) -> None:
        super().__init__()
        self.times = per_call, per_row

    def forward(self, x: Tensor) -> Tensor:
        per_call, per_row = self.times
        time.sleep(per_call + per_row * len(x))
        return x.sin()


def test_the_fastest_is_chosen() -> None:
    x = rows(64, 4)
    assert tune(Slow(4e-3, 0), x) == 64
    assert tune(Slow(0, 1e-3), x) < 64  # all are as fast: less memory is better


def test_the_least_memory_within_a_slowdown() -> None:
    f, x = Slow(1e-3, 0.25e-3), rows(64, 4000)
    # Plain takes 17 ms, n chunks take 2 (n + 16) ms with the recompute.
    sizes = [tune(f, x, max_slowdown=slowdown) for slowdown in (2.3, 3.5)]
    assert sizes[0] > sizes[1]
    assert 4 <= sizes[1] <= 32
    with pytest.raises(ValueError, match=r"max_slowdown=1\.2 asks for: the fastest"):
        tune(f, x, max_slowdown=1.2)


def test_keywords_and_no_trace() -> None:
    norm = nn.BatchNorm1d(4).double()

    def f(x: Tensor, *, scale: Tensor) -> Tensor:
        y: Tensor = norm(x) * scale * torch.rand(1)
        return y

    x, scale = rows(40, 4), rows(4)
    state = torch.get_rng_state()
    size = tune(
        f,
        x,
        kwargs={"scale": scale},
        batch_dim={"x": 0, "scale": None},
        memory_budget=0.5,
    )
    assert 1 <= size <= 40
    assert torch.equal(torch.get_rng_state(), state)
    assert norm.num_batches_tracked == 0
    assert x.grad is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_budget": "2 GX"}, ValueError, "memory must be"),
        ({"memory_budget": None, "max_slowdown": "2"}, TypeError, "must be a factor"),
        ({"max_slowdown": True}, TypeError, "found True of type bool"),
        ({"max_slowdown": 0}, ValueError, "positive and finite, found 0"),
        (
            {"memory_budget": 3},
            ValueError,
            r"not even chunks of one row fit into memor",
        ),
        ({"strategy": "none at all"}, ValueError, "is none of"),
        ({"batch_dim": 5}, ValueError, "no dim 5"),
    ],
    ids=str,
)
def test_what_cannot_be_tuned(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(mlp(), rows(20, 16), **options)
