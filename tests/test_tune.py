"""Tests of `diagnostics.tune`: the chunk size by memory and time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import NoCheckpoint, chunk_and_checkpoint
from chunkcheck._api import planned
from chunkcheck._torch.measure import Probe
from chunkcheck.diagnostics import _tune, measure_memory, tune
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


class Known:
    """Stands for a probe: memory and time are known, and no clock is asked."""

    device = torch.device("cpu")

    def __init__(self, *options: object) -> None:
        self.plain = isinstance(options[-1], NoCheckpoint)

    def peak(self, size: int) -> float:
        return 1000 + 10 * size

    def seconds(self, size: int) -> float:
        return 1.0 if self.plain else 2 + 8 / size if size < 16 else 2.4


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tune, "Probe", Known)


@pytest.mark.usefixtures("known")
def test_the_fastest_is_chosen() -> None:
    x = rows(64, 4)
    assert tune(torch.sin, x) == 16  # 64 takes as long and more memory
    assert tune(torch.sin, x, memory_budget=1100) == 10


@pytest.mark.usefixtures("known")
def test_the_least_memory_within_a_slowdown() -> None:
    x = rows(64, 4)
    assert tune(torch.sin, x, max_slowdown=6.5) == 2
    assert tune(torch.sin, x, max_slowdown=5) == 4
    assert tune(torch.sin, x, max_slowdown=2.5) == 16
    with pytest.raises(ValueError, match=r"max_slowdown=1\.2 asks for: the fastest"):
        tune(torch.sin, x, max_slowdown=1.2)
    with pytest.raises(ValueError, match=r"takes 2\.80 times as long as plain f"):
        tune(torch.sin, x, max_slowdown=2.5, memory_budget=1100)


def test_the_time_of_a_row() -> None:
    x = rows(64, 4)

    def slow(x: Tensor) -> Tensor:
        time.sleep(2e-3)
        return x.sin()

    call, leaves, plan = planned(slow, (x,), {}, None, 0, "auto")
    probe = Probe(call, leaves, plan, "auto", NoCheckpoint())
    assert probe.seconds(1) >= 2e-3
    assert 2e-3 / 32 <= probe.seconds(32) < 2e-3


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
