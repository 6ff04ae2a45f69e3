"""Tests of `_torch.checkpoints`: how torch executes each strategy, and its limits."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from chunkcheck import (
    Fused,
    GradInForward,
    NonReentrant,
    Reentrant,
    chunk_and_checkpoint,
)
from chunkcheck._strategies import NoCheckpoint
from chunkcheck._torch.checkpoints import executor, plain
from reference import (
    Counted,
    Strategy,
    assert_same_as_loop,
    assert_same_as_plain,
    loop,
    net,
    rows,
    strategies,
)

# What every strategy gets and must return.


def test_a_users_strategy_sees_flat_tensors_chunked_ones_first() -> None:
    seen: list[list[tuple[int, ...]]] = []

    def own(f: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        seen.append([tuple(t.shape) for t in tensors])
        results: tuple[Tensor, ...] = f(*tensors)
        assert isinstance(results, tuple)
        assert all(isinstance(t, Tensor) for t in results)
        return results

    def f(table: Tensor, batch: dict[str, Any], k: int) -> tuple[Any, ...]:
        return batch["x"] * k, {"y": batch["y"] + table.sum()}, None

    chunk_and_checkpoint(
        f,
        rows(9, 2),
        {"x": rows(5, 3), "y": rows(5, 1), "flag": True},
        2,
        chunk_size=4,
        batch_dim=(None, 0, None),
        out_dim=0,
        strategy=own,
    )
    assert seen == [[(4, 3), (4, 1), (9, 2)], [(1, 3), (1, 1), (9, 2)]]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            lambda f, *t: list(f(*t)),
            r"a tuple of 1 tensors, found a list of \(Tensor\)",
        ),
        (lambda f, *t: f(*t)[0], "found a Tensor"),
        (lambda f, *t: f(*t) * 2, r"found a tuple of \(Tensor, Tensor\)"),
        (lambda f, *t: (f(*t), None)[1:], r"found a tuple of \(NoneType\)"),
        (lambda _, *t: t, "the strategy did not call f"),
        (
            lambda f, *_: f(),
            "called f with 0 tensors instead of the 1 that it was given",
        ),
    ],
    ids=["list", "tensor", "twice", "none", "no call", "no tensors"],
)
def test_a_users_strategy_that_returns_something_else(own: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        chunk_and_checkpoint(torch.sin, rows(4, 2), chunk_size=2, strategy=own)


@strategies()
def test_f_may_return_no_tensor(strategy: Strategy) -> None:
    f = Counted(lambda _: None)
    assert chunk_and_checkpoint(f, rows(4, 2), chunk_size=2, strategy=strategy) is None
    assert f.rows == [2, 2]


@strategies(without=["auto", "fused"])  # which do not run chunk by chunk
def test_no_strategy_where_nothing_is_saved(strategy: Strategy) -> None:
    from chunkcheck._strategies import resolve_strategy

    resolved = resolve_strategy(strategy)
    assert not isinstance(resolved, Fused | GradInForward)
    with torch.no_grad():
        assert executor(resolved) is plain
    seen: list[bool] = []

    def watch(x: Tensor) -> Tensor:
        seen.append(executor(resolved) is plain)
        return x.sin().sum()

    torch.func.grad(watch)(rows(3, grad=False))
    assert seen == [True]
    assert (executor(resolved) is plain) == isinstance(resolved, NoCheckpoint)


# An error in f leaves everything as it was.


@strategies(without=["own_checkpoint"])
def test_an_error_that_lives_on_does_not_spoil_later_backwards(
    strategy: Strategy,
) -> None:
    def fails(x: Tensor) -> Tensor:
        x = x.sin()
        if len(x) < 4:
            raise torch.OutOfMemoryError("no memory")
        return x

    x = rows(6, 4)
    with pytest.raises(torch.OutOfMemoryError) as kept:
        chunk_and_checkpoint(fails, x, chunk_size=4, strategy=strategy)
    assert_same_as_plain(net(), (x,), chunk_size=2, strategy=strategy)
    (gradient,) = torch.autograd.grad(x.sin().sum(), x)
    torch.testing.assert_close(gradient, x.cos().detach())
    assert kept.value is not None


@strategies(without=["own_checkpoint"])
def test_an_error_is_freed_with_its_frames(strategy: Strategy) -> None:
    class Canary:
        alive = 0

        def __init__(self) -> None:
            Canary.alive += 1

        def __del__(self) -> None:
            Canary.alive -= 1

    def fails(_: Tensor) -> Tensor:
        canary = Canary()
        raise ValueError(canary)

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            chunk_and_checkpoint(fails, rows(4, 2), chunk_size=2, strategy=strategy)
        assert Canary.alive == 0
    finally:
        gc.enable()


@strategies(without=["none"])
def test_an_error_in_the_recompute_says_where_and_leaves_a_second_try(
    strategy: Strategy,
) -> None:
    calls = 0

    def fails_once(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("third call")
        return x.sin()

    x = rows(4, 2)
    state = torch.get_rng_state()
    y = chunk_and_checkpoint(fails_once, x, chunk_size=2, strategy=strategy)
    with pytest.raises(ValueError, match="third call") as caught:
        y.sum().backward(retain_graph=True)
    assert "while running rows" in caught.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), state)
    x.grad = None
    y.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, x.cos().detach())


# The options.


@pytest.mark.parametrize("kind", [NonReentrant, Reentrant])
def test_preserve_rng_state(kind: type[NonReentrant | Reentrant]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def noisy(x: Tensor) -> Tensor:
        return (x * weight * torch.rand_like(x)).square()

    x = rows(7, 4)
    assert_same_as_loop(noisy, (x,), chunk_size=3, strategy=kind(), captured=weight)
    torch.manual_seed(1)
    expected = torch.autograd.grad(loop(noisy, x, chunk_size=3).sum(), x)[0]
    torch.manual_seed(1)
    chunk_and_checkpoint(
        noisy, x, chunk_size=3, strategy=kind(preserve_rng_state=False)
    ).sum().backward()
    assert x.grad is not None
    assert not torch.allclose(x.grad, expected), "the option does not reach torch"


class Drifts:
    """An `f` that saves a tensor of another shape when it runs again."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.repeat(1, self.calls).sin().sum(1)


def test_determinism_check() -> None:
    error = torch.utils.checkpoint.CheckpointError
    checked = NonReentrant()
    y = chunk_and_checkpoint(Drifts(), rows(2, 2), chunk_size=2, strategy=checked)
    with pytest.raises(error, match="different metadata"):
        y.sum().backward()
    unchecked = NonReentrant(determinism_check="none")
    y = chunk_and_checkpoint(Drifts(), rows(2, 2), chunk_size=2, strategy=unchecked)
    with pytest.raises(RuntimeError, match=r"size|shape") as caught:
        y.sum().backward()
    assert not isinstance(caught.value, error)


def test_inference_tensors_pass_as_constants() -> None:
    with torch.inference_mode():
        chunked_constant, whole_constant = (
            torch.ones(5, 4).double(),
            torch.ones(4).double(),
        )

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x.sin() + a).cos() + b

    assert_same_as_plain(
        f,
        (rows(5, 4), chunked_constant, whole_constant),
        chunk_size=2,
        batch_dim=(0, 0, None),
        strategy="non_reentrant",
    )


# Reentrant never drops a gradient silently.


@pytest.mark.parametrize("chunk_size", [2, None])
@pytest.mark.parametrize("grad", [True, False])
def test_reentrant_parameters_alone_and_nested_arguments(
    chunk_size: int | None, *, grad: bool
) -> None:
    module = net()

    def f(batch: dict[str, list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        y = module(batch["x"][0])
        return y, {"detached": y.detach(), "label": y.argmax(-1), "x": batch["x"][0]}

    assert_same_as_plain(
        f,
        ({"x": [rows(5, 4, grad=grad)]},),
        chunk_size=chunk_size,
        strategy=Reentrant(),
        captured=module,
    )


def test_reentrant_without_any_gradient() -> None:
    f = Counted(net().requires_grad_(requires_grad=False))
    y = chunk_and_checkpoint(
        f, rows(4, 4, grad=False), chunk_size=2, strategy="reentrant"
    )
    assert not y.requires_grad
    assert f.rows == [2, 2]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_reentrant_refuses_create_graph() -> None:
    module, x = net(), rows(4, 4)
    y = chunk_and_checkpoint(module, x, chunk_size=2, strategy="reentrant")
    with pytest.raises(
        RuntimeError, match=r"create_graph=True; use strategy='non_reent"
    ):
        y.sum().backward(create_graph=True)


def test_reentrant_refuses_what_torch_refuses() -> None:
    module, x = net(), rows(4, 4)
    y = chunk_and_checkpoint(module, x, chunk_size=2, strategy="reentrant")
    with pytest.raises(RuntimeError, match=r"incompatible with .grad"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"incompatible with .grad"):
        y.sum().backward(inputs=[x])


def test_reentrant_with_a_captured_history_raises_on_the_second_chunk() -> None:
    w = rows(4)
    history = w.exp()
    y = chunk_and_checkpoint(
        lambda x: x * history, rows(4, 4), chunk_size=2, strategy="reentrant"
    )
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_reentrant_refuses_tensor_subclasses() -> None:
    class Own(Tensor):
        pass

    class Overridden(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            wrapped: Any = super().__torch_function__
            return wrapped(*args, **kwargs)

    weight = nn.Parameter(rows(4))
    x = rows(4, 4)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    dims = (0, None)
    chunk_and_checkpoint(
        f, x.as_subclass(Own), weight, chunk_size=2, batch_dim=dims, strategy="none"
    )
    chunk_and_checkpoint(
        f, x, weight, chunk_size=2, batch_dim=dims, strategy="reentrant"
    )
    with pytest.raises(
        TypeError, match=r"got a Overridden: .*strategy='non_reentrant'"
    ):
        chunk_and_checkpoint(
            f,
            x.as_subclass(Overridden),
            weight,
            chunk_size=2,
            batch_dim=dims,
            strategy="reentrant",
        )


@pytest.mark.skipif(not distributed.is_available(), reason="torch built without it")
@pytest.mark.parametrize("ranks", [1, 2])
def test_reentrant_refuses_a_process_group(ranks: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    f, x = Counted(net()), rows(4, 4)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        chunk_and_checkpoint(f, x, chunk_size=2, strategy="non_reentrant")
        with torch.no_grad():
            chunk_and_checkpoint(f, x, chunk_size=2, strategy="reentrant")
        f.rows.clear()
        if ranks == 1:
            chunk_and_checkpoint(f, x, chunk_size=2, strategy="reentrant")
            return
        with pytest.raises(RuntimeError, match=r"of 2 ranks.*strategy='non_reentrant'"):
            chunk_and_checkpoint(f, x, chunk_size=2, strategy="reentrant")
        assert f.rows == []
    finally:
        distributed.destroy_process_group()


# Transforms of torch.func fall back to the loop.


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@strategies(without=["fused"])  # which raises
def test_torch_func(strategy: Strategy) -> None:
    module = net()
    x = rows(5, 4, grad=False)

    def f(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(module, x, chunk_size=2, strategy=strategy)
        return y

    def total(x: Tensor) -> Tensor:
        return f(x).square().sum()

    torch.testing.assert_close(
        torch.func.grad(total)(x),
        torch.func.grad(lambda x: module(x).square().sum())(x),
    )
    torch.testing.assert_close(torch.func.jacrev(f)(x), torch.func.jacrev(module)(x))
    for ours, theirs in zip(
        torch.func.jvp(f, (x,), (x,)), torch.func.jvp(module, (x,), (x,)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    batch = rows(3, 5, 4, grad=False)
    torch.testing.assert_close(torch.func.vmap(f)(batch), module(batch))
