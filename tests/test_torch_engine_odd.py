"""Tests of the engine on functions that do something odd, each once found broken."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import assert_same_as_plain, loop, net, rows

CPU = torch.device("cpu")


def in_chunks(f: Any, *args: Tensor, **options: Any) -> Tensor:
    """Run `f` in chunks of three rows."""
    y: Tensor = chunk_and_checkpoint(f, *args, chunk_size=3, **options)
    return y


def test_backwards_of_several_threads_take_turns_in_what_they_replay() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    dropout, norm = nn.Dropout(0.5), module[1]
    for _ in range(5):
        xs = [rows(30, 5, dtype=torch.float32) for _ in range(3)]
        ys = [in_chunks(dropout, x) for x in xs]
        zs = [in_chunks(module, rows(30, 5, dtype=torch.float32)) for _ in xs]
        before = {key: t.clone() for key, t in norm.state_dict().items()}
        state = torch.get_rng_state()
        threads = [threading.Thread(target=t.sum().backward) for t in (*ys, *zs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for x, y in zip(xs, ys, strict=True):
            assert x.grad is not None
            assert torch.equal(x.grad != 0, y != 0)
        assert torch.equal(torch.get_rng_state(), state)
        for key, value in norm.state_dict().items():
            assert torch.equal(value, before[key]), key


class Once(torch.autograd.Function):
    """A product whose backward has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


once: Any = Once.apply


@both_paths
def test_what_has_no_second_derivative_says_so(*, history: bool) -> None:
    _, shift = capture(CPU, history=history)
    w, x = rows(4), rows(8, 4)
    y = in_chunks(lambda x: once(x.sin(), w) * shift, x)
    (got,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice.*once_differentiable"):
        got.sum().backward()


@both_paths
def test_a_flag_that_f_leaves_changed(*, history: bool) -> None:
    _, shift = capture(CPU, history=history)
    dropout = nn.Dropout(0.5)

    def f(x: Tensor) -> Tensor:
        y: Tensor = dropout(x) * shift
        dropout.eval()
        return y

    x = torch.ones(9, 4, dtype=torch.float64, requires_grad=True)
    y = in_chunks(f, x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach())  # whose mask it has, as x is one
    assert not dropout.training


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_fresh_scripted_module() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * torch.sigmoid(x) + torch.relu(x)

    plain = Gated()
    x = torch.randn(8, 5, requires_grad=True)
    scripted = torch.jit.script(plain)
    in_chunks(scripted, x).sum().backward()
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


@both_paths
def test_a_reentrant_checkpoint_inside(*, history: bool) -> None:
    leaf, shift = capture(CPU, history=history)
    module = net()
    assert_same_as_plain(
        lambda x: checkpoint(module, x.tanh() * shift, use_reentrant=True),
        (rows(8, 4),),
        chunk_size=3,
        strategy="auto",
        captured=[module, leaf],
    )


@both_paths
@pytest.mark.parametrize("which", ["chunked", "whole"])
@pytest.mark.parametrize("required", [True, False])
def test_an_argument_is_frozen_or_not_before_backward(
    which: str, *, required: bool, history: bool
) -> None:
    leaf, shift = capture(CPU, history=history)

    def gradients(run: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w, other = rows(8, 4), rows(4), rows(8, 4)
        changed = x if which == "chunked" else w
        changed.requires_grad_(required)
        y = run(x, w, other)
        changed.requires_grad_(not required)
        leaf.grad = None
        y.sum().backward()
        return [x.grad, w.grad, other.grad, leaf.grad]

    def f(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        return (x * w + other * shift).sin()

    expected = gradients(f)
    got = gradients(lambda *args: in_chunks(f, *args, batch_dim=(0, None, 0)))
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@both_paths
def test_f_that_seeds(*, history: bool) -> None:
    _, shift = capture(CPU, history=history)

    def f(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return x * torch.rand_like(x) * shift

    x = rows(8, 4)
    y = in_chunks(f, x)
    torch.testing.assert_close(y, loop(f, x, chunk_size=3))
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@both_paths
def test_an_empty_batch_differentiated_twice(*, history: bool) -> None:
    _, shift = capture(CPU, history=history)
    x = rows(0, 4)
    y = in_chunks(lambda x: (x * shift).sin(), x)
    (got,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    got.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


def test_sparse_gradients_differentiated_twice() -> None:
    table = nn.Embedding(7, 4, sparse=True).double()
    index = torch.randint(7, (8,))
    y = in_chunks(lambda i: table(i).sin(), index)
    (got,) = torch.autograd.grad(y.sum(), [table.weight], create_graph=True)
    (expected,) = torch.autograd.grad(table(index).sin().sum(), [table.weight])
    torch.testing.assert_close(got, expected.to_dense())


@pytest.mark.parametrize("wrong", [None, 3, (torch.no_grad(), 3)], ids=str)
def test_a_context_fn_that_returns_something_else(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"must return two context managers, .* found"):
        in_chunks(torch.sin, rows(8, 4), strategy=Fused(context_fn=lambda: wrong))


@both_paths
def test_captures_that_trade_places(*, history: bool) -> None:
    """Which ones are used is the same, but not where."""
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    model = nn.Sequential(first, nn.Tanh(), second)
    _, scale = capture(CPU, 4, history=history)
    y = chunk_and_checkpoint(lambda x: model(x) * scale, rows(5, 4), chunk_size=2)
    model[0], model[2] = second, first
    with pytest.raises(RuntimeError, match="used other tensors that require a grad"):
        y.sum().backward()


@both_paths
def test_captured_activations_that_trade_places(*, history: bool) -> None:
    pair = [capture(CPU, 4, history=history)[1] for _ in range(2)]
    y = chunk_and_checkpoint(
        lambda x: (x * pair[0]).sin() * pair[1], rows(5, 4), chunk_size=2
    )
    pair.reverse()
    with pytest.raises(RuntimeError, match="used other tensors that require a grad"):
        y.sum().backward()


@pytest.mark.parametrize("count", range(1, 13))
def test_data_that_is_assigned_again_and_again(count: int) -> None:
    """Whatever address the new memory has."""
    w, x = rows(6, 6), rows(9, 6)
    y = chunk_and_checkpoint(lambda x: (x @ w).tanh(), x, chunk_size=4)
    for _ in range(count):
        w.data = w.data * 1.1
    with pytest.raises(RuntimeError, match="was given other data"):
        y.sum().backward()


@both_paths
@pytest.mark.parametrize("which", [0, 1], ids=["chunked", "whole"])
def test_an_argument_that_is_given_other_data(which: int, *, history: bool) -> None:
    _, scale = capture(CPU, 4, history=history)
    args = [rows(5, 4), rows(4)]

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() * scale

    y = chunk_and_checkpoint(f, args[0], args[1], chunk_size=2, batch_dim=(0, None))
    args[which].data = args[which].data * 2
    with pytest.raises(RuntimeError, match=rf"args\[{which}\] was given other data"):
        y.sum().backward()


@both_paths
@pytest.mark.parametrize("size", [2, 100], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_f_itself_writes_to(
    size: int, *, frozen: bool, history: bool
) -> None:
    """A norm that is kept, an average: recompute would not see what forward saw."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(4).double(), requires_grad=not frozen
            )

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data / 2
            return (x * (self.weight * 1.0).detach() + self.weight).sin()

    _, scale = capture(CPU, 4, history=history)
    module = Kept()
    y = chunk_and_checkpoint(lambda x: module(x) * scale, rows(5, 4), chunk_size=size)
    with pytest.raises(RuntimeError, match=r"Kept.weight.*if f itself changes it"):
        y.sum().backward()
