"""Tests of `_torch.untouched`: trial runs leave no trace."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from chunkcheck._torch.untouched import untouched
from reference import rows


def test_all_is_set_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    generator = torch.Generator().manual_seed(1)
    x, frozen = rows(5, 4), rows(5, 4, grad=False)
    before = torch.zeros(5, 4, dtype=torch.float64)
    x.grad = before
    parameters = list(model.parameters())
    parameters[0].grad = of_weight = torch.ones_like(parameters[0])

    def f(x: Tensor, y: Tensor) -> Tensor:
        model.train(not model.training)
        model.train()
        noise = torch.rand(5, 4, generator=generator) * random.random()
        found: Tensor = model(x) + y + noise
        return found.sum()

    buffers = {key: t.clone() for key, t in model.state_dict().items()}
    states = (torch.get_rng_state(), generator.get_state(), random.getstate())
    with untouched(f, (x,), {"y": frozen}) as leaves:
        assert [t.grad for t in leaves] == [None] * len(leaves)
        assert {id(t) for t in leaves} == {id(x), *map(id, parameters)}
        for _ in range(2):
            f(x, frozen).backward()
        model.eval()
        assert all(t.grad is not None for t in leaves)
    assert x.grad is before
    assert not before.any()
    assert parameters[0].grad is of_weight
    assert of_weight.eq(1).all()
    assert [p.grad for p in parameters[1:]] == [None] * (len(parameters) - 1)
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, buffers[key]), key
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == states[2]


def test_large_buffers_are_set_back_too() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Tensor
            self.register_buffer("counts", torch.zeros(5_000_000))

        def forward(self, x: Tensor) -> Tensor:
            self.counts += 1
            return x * self.counts[0]

    module, x = Counts(), rows(3, 2)
    with untouched(module, (x,), {}):
        module(x)
    assert not module.counts.any()


def test_all_is_set_back_after_an_error() -> None:
    norm, x = nn.BatchNorm1d(4).double(), rows(5, 4)
    state = torch.get_rng_state()

    def run() -> None:
        with untouched(norm, (x,), {}):
            norm(x + torch.rand(1)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert x.grad is None
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)
