"""Pitfalls O: types of tensors, threads, very many chunks, odd shapes and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_close,
    assert_same_as_plain,
    assert_same_gradients,
    assert_same_runs,
    run,
    strategies,
    tensors,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
# Reentrant has one lock for all backwards, and deep recursion is torch's to see to.
engine = strategies(without=("reentrant", "non_reentrant", "none", "own_checkpoint"))


def _mlp(device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(device, dtype)


def _x(device: torch.device, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape or (5, 4), dtype=dtype, device=device, requires_grad=True)


def _in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """Run in that many threads, which start at once."""
    barrier = threading.Barrier(count)

    def start(index: int) -> object:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


@strategies()
@both_paths
def test_pytorch_96764_four_threads_at_once(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Forward and backward in four threads do not disturb each other."""
    models = [_mlp(device) for _ in range(4)]
    xs = [_x(device, 5 + i, 4) for i in range(4)]
    captured = [capture(device, history=history) for _ in range(4)]

    def f(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: (models[index](x) + captured[index][1]).sin()

    def leaves(index: int) -> object:
        return models[index], xs[index], captured[index][0]

    def work(index: int) -> None:
        for _ in range(5):
            got = run(
                lambda: chunk_and_checkpoint(
                    f(index), xs[index], chunk_size=2, strategy=strategy
                ),
                leaves(index),
            )
            assert_same_runs(got, expected[index])

    expected = [run(lambda i=i: f(i)(xs[i]), leaves(i)) for i in range(4)]  # type: ignore[misc]
    _in_threads(4, work)


@engine
@both_paths
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pytorch_96764_one_module_from_two_threads(
    strategy: Strategy, dtype: torch.dtype, *, history: bool, device: torch.device
) -> None:
    """So it is if the threads share a module, whose gradients are asked for apart."""
    mlp = _mlp(device, dtype)
    leaf, shift = capture(device, history=history, dtype=dtype)
    xs = [_x(device, 64, 4, dtype=dtype) for _ in range(2)]

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    def gradients(index: int) -> tuple[Tensor, ...]:
        y = chunk_and_checkpoint(f, xs[index], chunk_size=4, strategy=strategy)
        return torch.autograd.grad(y.sum(), (xs[index], leaf, *mlp.parameters()))

    expected = [gradients(index) for index in range(2)]
    for _ in range(5):
        for got, wanted in zip(_in_threads(2, gradients), expected, strict=True):
            assert isinstance(got, tuple)
            for found, other in zip(got, wanted, strict=True):
                assert torch.equal(found, other)


@strategies()
@sizes
@both_paths
def test_pytorch_96764_backward_in_another_thread(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Backward may run in another thread than forward, and one call's in two."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    leaves = (mlp, x, leaf)

    def f(x: Tensor) -> Tensor:
        result: Tensor = (mlp(x) + shift).sin()
        return result

    expected = run(lambda: f(x), leaves)

    def call() -> Tensor:
        y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        gradient = torch.ones_like(y)
        # A retained backward of the same call, in a thread of its own.
        _in_threads(1, lambda _: backward(y, gradient, retain_graph=True))
        for _, tensor in tensors(leaves):
            assert tensor.grad is not None
            tensor.grad = None
        return y

    assert_same_runs(run(call, leaves), expected)


@engine
@both_paths
def test_pytorch_96764_two_threads_go_backward_through_one_call(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Two backwards at once through one retained graph do not mix."""
    mlp, x = _mlp(device), _x(device, 40, 4)
    leaf, shift = capture(device, history=history)
    y = chunk_and_checkpoint(
        lambda x: (mlp(x) + shift).sin(), x, chunk_size=2, strategy=strategy
    )
    wanted = (x, leaf, *mlp.parameters())

    def gradients(index: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.sum() * (index + 1), wanted, retain_graph=True)

    (expected,) = [gradients(0)]
    for _ in range(5):
        for index, got in enumerate(_in_threads(2, gradients)):
            assert isinstance(got, tuple)
            for found, other in zip(got, expected, strict=True):
                assert_close(found, other * (index + 1), f"thread {index}")


@engine
@both_paths
def test_pytorch_18566_two_thousand_chunks(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Very many chunks need no deep recursion."""
    leaf, shift = capture(device, history=history)
    assert_same_as_plain(
        lambda x: (x * shift).sin(),
        (_x(device, 2000, 4),),
        chunk_size=1,
        strategy=strategy,
        captured=leaf,
    )


@engine
@both_paths
def test_pytorch_18566_two_hundred_calls_one_after_another(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Nor do very many calls, each on the result of the one before."""
    x = _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        return (x + shift * 0.01).tanh()

    def many(*, whole: bool) -> Tensor:
        y = x
        for _ in range(200):
            y = (
                f(y)
                if whole
                else chunk_and_checkpoint(f, y, chunk_size=2, strategy=strategy)
            )
        return y

    expected = run(lambda: many(whole=True), (x, leaf))
    assert_same_runs(run(lambda: many(whole=False), (x, leaf)), expected)


@strategies()
@sizes
@both_paths
@pytest.mark.parametrize("kind", ["sum", "expanded", "transposed", "divisible"])
def test_pytorch_195813_stride_0_gradients(
    strategy: Strategy,
    chunk_size: int | None,
    kind: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Gradients of any strides are right, and not written to; no chunk is empty."""
    rows = 4 if kind == "divisible" else 5
    mlp, x = _mlp(device), _x(device, rows, 4)
    leaf, shift = capture(device, history=history)
    seen: list[int] = []

    def f(x: Tensor) -> Tensor:
        seen.append(len(x))
        result: Tensor = (mlp(x) + shift).sin()
        return result

    given = {
        "expanded": torch.ones(1, 1, dtype=torch.float64, device=device).expand(5, 4),
        "transposed": torch.randn(4, 5, dtype=torch.float64, device=device).mT,
    }.get(kind)
    before = None if given is None else given.clone()

    def gradients(y: Tensor) -> dict[str, Tensor | None]:
        x.grad = leaf.grad = None
        mlp.zero_grad()
        if given is None:
            backward(y.sum())
        else:
            backward(y, given)
        named = {"x": x, "leaf": leaf, **dict(mlp.named_parameters())}
        return {name: t.grad for name, t in named.items()}

    expected = gradients(f(x))
    got = gradients(
        chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    )
    assert_same_gradients(got, expected)
    assert 0 not in seen
    if given is not None and before is not None:
        assert torch.equal(given, before)


@strategies()
@both_paths
def test_pytorch_181574_scalar_results(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """A 0-d result is an error that says what to do; one entry per row is right."""
    x, y = _x(device), _x(device)
    leaf, shift = capture(device, history=history)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((x + shift).sin() - y).square().sum(1)

    with pytest.raises(ValueError, match="sum"):
        chunk_and_checkpoint(
            lambda x, y: loss(x, y).sum(), x, y, chunk_size=2, strategy=strategy
        )
    assert_same_as_plain(loss, (x, y), chunk_size=2, strategy=strategy, captured=leaf)


@strategies()
@sizes
@both_paths
def test_complex_numbers(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Complex tensors, of which some results are real, have their gradients."""
    leaf, shift = capture(device, history=history, dtype=torch.complex128)
    assert_same_as_plain(
        lambda x: ((x * shift).exp(), (x + shift).abs()),
        (_x(device, dtype=torch.complex128),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
    )


@strategies()
@sizes
@both_paths
def test_sparse_parameter_gradient(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A sparse embedding gets a sparse gradient, the rows of all chunks in it."""
    table = nn.Embedding(9, 4, sparse=True, device=device, dtype=torch.float64)
    leaf, shift = capture(device, history=history)
    tokens = torch.tensor([1, 2, 1, 7, 2], device=device)

    def gradients(y: Tensor) -> list[Tensor | None]:
        table.weight.grad = leaf.grad = None
        backward(y.sin().sum())
        return [table.weight.grad, leaf.grad]

    def f(tokens: Tensor) -> Tensor:
        result: Tensor = table(tokens) + shift
        return result

    expected = gradients(f(tokens))
    got = gradients(
        chunk_and_checkpoint(f, tokens, chunk_size=chunk_size, strategy=strategy)
    )
    for found, wanted in zip(got, expected, strict=True):
        assert found is not None
        assert wanted is not None
        assert found.is_sparse == wanted.is_sparse
        assert_close(found.to_dense(), wanted.to_dense(), "gradient")


@strategies(without=("reentrant",))  # which refuses subclasses of their own mind
@sizes
@both_paths
def test_tensor_subclass_kept(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A subclass comes in and goes out as itself, with a gradient."""
    leaf, shift = capture(device, history=history)
    x = _x(device).detach().as_subclass(Named).requires_grad_()
    assert_same_as_plain(
        lambda x: (x * shift).sin(),
        (x,),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
    )


class Named(Tensor):
    """A subclass as simple as can be."""


@both_paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_liger_1391_low_precision_sums(
    dtype: torch.dtype, *, history: bool, device: torch.device
) -> None:
    """Sums of low precision over very many chunks are as exact as one chunk's."""
    leaf, shift = capture(device, history=history, dtype=dtype)
    x = torch.rand(512, 4, device=device).to(dtype)

    def gradient(chunk_size: int | None) -> Tensor:
        y = chunk_and_checkpoint(
            lambda x: x * shift, x, chunk_size=chunk_size, strategy=Fused()
        )
        (found,) = torch.autograd.grad(y.sum(), leaf)
        return found

    exact = x.double().sum(0) * (-1 if history else 1)
    assert_close(gradient(None), exact.to(dtype), "one chunk")
    assert_close(gradient(1), exact.to(dtype), "512 chunks")
