"""Tests of `_torch.loop`: what the loop keeps, many chunks, threads, torch.compile."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkcheck import chunk_and_checkpoint
from reference import (
    Counted,
    Strategy,
    assert_same_as_plain,
    net,
    rows,
    strategies,
    without_gc,
)


@strategies(without=["none"])
def test_no_activation_outlives_its_chunk(strategy: Strategy) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def f(x: Tensor) -> Tensor:
        nonlocal most
        hidden = x.exp()
        alive.append(weakref.ref(hidden))
        most = max(most, sum(ref() is not None for ref in alive))
        return hidden.sin()

    x = rows(12, 4)
    with without_gc():
        y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
        assert not any(ref() is not None for ref in alive)
        y.sum().backward()
        assert most == 1


@strategies()
def test_two_thousand_chunks(strategy: Strategy) -> None:
    module = net()
    assert_same_as_plain(
        module, (rows(2000, 4),), chunk_size=1, strategy=strategy, captured=module
    )


@strategies()
def test_threads_do_not_disturb_each_other(strategy: Strategy) -> None:
    module = net()
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        x = torch.full((5, 4), float(number), dtype=torch.float64, requires_grad=True)
        y = chunk_and_checkpoint(module, x, chunk_size=2, strategy=strategy)
        y.square().sum().backward()
        expected = torch.autograd.grad(module(x).square().sum(), x)[0]
        found[number] = torch.allclose(x.grad, expected, rtol=1e-10)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
@strategies(without=["own_checkpoint"])
def test_a_compiled_caller_breaks_its_graph_and_keeps_the_saving(
    strategy: Strategy,
) -> None:
    f = Counted(net())

    def caller(x: Tensor) -> Any:
        return (
            chunk_and_checkpoint(f, {"x": x * 2}["x"], chunk_size=3, strategy=strategy)
            + 1
        )

    torch._dynamo.reset()
    x = rows(8, 4)
    y = torch.compile(caller, backend="aot_eager")(x)
    y.sum().backward()
    (expected,) = torch.autograd.grad((f.f(x * 2) + 1).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert len(f.rows) == (3 if strategy == "none" else 6)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
def test_a_compiled_f_with_a_ragged_tail() -> None:
    torch._dynamo.reset()
    module = net()
    compiled = torch.compile(module, backend="aot_eager")
    assert_same_as_plain(compiled, (rows(8, 4),), chunk_size=3, strategy="auto")
