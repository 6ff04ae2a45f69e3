"""The oracles that tests compare with: plain `f`, and the plain loop over the chunks.

Independent of the library: nothing here imports how it cuts, joins or flattens.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunkcheck import (
    ChunkStrategy,
    Fused,
    GradInForward,
    NoCheckpoint,
    NonReentrant,
    Reentrant,
    StrategyName,
    chunk_and_checkpoint,
    chunked,
)

Strategy: TypeAlias = (
    StrategyName
    | Fused
    | GradInForward
    | NonReentrant
    | Reentrant
    | NoCheckpoint
    | ChunkStrategy
)

# Relative to the largest entry of the expected tensor.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def own_checkpoint(
    f: Callable[..., tuple[Tensor, ...]], /, *args: Tensor
) -> tuple[Tensor, ...]:
    """Stand for a user's own strategy."""
    results: tuple[Tensor, ...] = checkpoint(f, *args, use_reentrant=False)
    return results


# Those that can do whatever plain `f` does.
GENERAL = [name for name in get_args(StrategyName) if name != "grad_in_forward"]
STRATEGIES: tuple[Strategy, ...] = (*GENERAL, own_checkpoint)


def strategies(
    *, without: Container[str] = (), xfail: Mapping[str, str] | None = None
) -> pytest.MarkDecorator:
    """Parametrise a test over `strategy`: all of them, by name and a user's own.

    Args:
        without: The names of those to which the rule does not apply.
        xfail: By name, why today's implementation cannot satisfy the rule.

    """
    reasons = xfail or {}
    found = []
    for strategy in STRATEGIES:
        name = strategy if isinstance(strategy, str) else own_checkpoint.__name__
        if name in without:
            continue
        marks = (
            [pytest.mark.xfail(strict=True, reason=reasons[name])]
            if name in reasons
            else []
        )
        found.append(pytest.param(strategy, id=name, marks=marks))
    return pytest.mark.parametrize("strategy", found)


def net() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)).double()


def rows(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random tensor."""
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def tensors(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in containers and modules, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{path}.{name}", parameter
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list | deque):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}[{index}]")


def assert_close(got: Tensor, expected: Tensor, path: str) -> None:
    """Compare shape, dtype, device and values of two tensors."""
    tolerance = TOLERANCES.get(expected.dtype, 0.0)
    largest = 0.0
    if tolerance and expected.numel():
        largest = float(expected.detach().abs().nan_to_num(posinf=0.0).max())
    torch.testing.assert_close(
        got.detach(),
        expected.detach(),
        rtol=tolerance,
        atol=tolerance * largest,
        equal_nan=True,
        msg=lambda message: f"{path}: {message}",
    )


def assert_same(got: object, expected: object, path: str = "result") -> None:
    """Compare two values: structure, types, values and what requires a gradient."""
    assert type(got) is type(expected), f"{path}: {type(got)}, not {type(expected)}"
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert got.requires_grad == expected.requires_grad, (
            f"{path}: requires_grad is {got.requires_grad}"
        )
        assert_close(got, expected, path)
    elif isinstance(expected, Mapping):
        assert isinstance(got, Mapping)
        assert list(got) == list(expected), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, tuple | list | deque):
        assert isinstance(got, tuple | list | deque)
        assert len(got) == len(expected), path
        for index, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    else:
        both_nan = got != got and expected != expected  # noqa: PLR0124
        assert got is expected or got == expected or both_nan, path


def assert_same_gradients(
    got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    """Compare gradients by name; one that is None must be None."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        found = got[name]
        if gradient is None:
            assert found is None, f"{name}.grad is not None, but should be"
        else:
            assert found is not None, f"{name}.grad is None, but should not be"
            assert_close(found, gradient, f"{name}.grad")


def cotangents(results: Sequence[Tensor]) -> list[Tensor]:
    """Return random gradients for some results, the same ones at each call."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)
        for t in results
    ]


@dataclass(frozen=True)
class Run:
    """The result of a call and the gradients that its backward left."""

    result: object
    gradients: dict[str, Tensor | None]


def run(call: Callable[[], object], leaves: object) -> Run:
    """Call, run backward from all that the result holds, and collect `.grad`.

    Args:
        call: What to run.
        leaves: The tensors whose gradients matter: any tree of tensors and modules.

    """
    named = {name: leaf for name, leaf in tensors(leaves) if leaf.is_leaf}
    for leaf in named.values():
        leaf.grad = None
    result = call()
    ends = [t for _, t in tensors(result) if t.requires_grad]
    if ends:
        torch.autograd.backward(ends, cotangents(ends))
    gradients = {name: leaf.grad for name, leaf in named.items()}
    for leaf in named.values():
        leaf.grad = None
    if ends:
        assert any(g is not None for g in gradients.values()), "nothing to compare"
    return Run(result, gradients)


def assert_same_runs(got: Run, expected: Run) -> None:
    """Compare two runs: results, what requires a gradient, and every gradient."""
    assert_same(got.result, expected.result)
    assert_same_gradients(got.gradients, expected.gradients)


def assert_same_as_plain(
    f: Callable[..., Any],
    args: tuple[object, ...],
    *,
    chunk_size: int | None,
    strategy: Strategy,
    batch_dim: Any = 0,
    out_dim: Any = "auto",
    kwargs: Mapping[str, object] | None = None,
    captured: object = (),
) -> Run:
    """Compare a chunked call with `f(*args)`: results and every gradient.

    Args:
        f: The function.
        args: Its arguments. Their containers are not rebuilt: `f` must not change them.
        chunk_size: As in `chunk_and_checkpoint`, and so the next three.
        strategy: See there.
        batch_dim: See there.
        out_dim: See there.
        kwargs: Keyword arguments, for the curried form.
        captured: What else gets gradients: modules, tensors, trees of them.

    Returns:
        The chunked run.

    """
    named = kwargs or {}
    leaves = {"args": args, "kwargs": named, "captured": captured}

    def call() -> object:
        if named:
            return chunked(
                f,
                chunk_size=chunk_size,
                batch_dim=batch_dim,
                out_dim=out_dim,
                strategy=strategy,
            )(*args, **named)
        return chunk_and_checkpoint(
            f,
            *args,
            chunk_size=chunk_size,
            batch_dim=batch_dim,
            out_dim=out_dim,
            strategy=strategy,
        )

    expected = run(lambda: f(*args, **named), leaves)
    got = run(call, leaves)
    assert_same_runs(got, expected)
    return got


def loop(
    f: Callable[..., Any], *args: Tensor, chunk_size: int | None, batch_dim: int = 0
) -> Any:
    """Return what a plain loop over the chunks gives: the oracle of all that is random.

    Each argument is cut along `batch_dim`, and so is each tensor of the result joined.
    """
    rows = args[0].shape[batch_dim]
    pieces = [torch.split(arg, chunk_size or rows, batch_dim) for arg in args]
    results = [f(*piece) for piece in zip(*pieces, strict=True)]

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return torch.cat(list(values), batch_dim)
        if isinstance(first, dict):
            return {key: join([value[key] for value in values]) for key in first}
        if isinstance(first, tuple | list):
            return type(first)(join(column) for column in zip(*values, strict=True))
        return first

    return join(results)


def assert_same_as_loop(
    f: Callable[..., Any],
    args: tuple[Tensor, ...],
    *,
    chunk_size: int | None,
    strategy: Strategy,
    captured: object = (),
    state: Callable[[], object] = lambda: None,
    reset: Callable[[], object] = lambda: None,
) -> None:
    """Compare a chunked call with the plain loop, both from the same random state.

    Args:
        f: The function.
        args: Its arguments, all cut along dim 0.
        chunk_size: As in `chunk_and_checkpoint`.
        strategy: See there.
        captured: What else gets gradients.
        state: Returns what else must agree after backward, such as buffers.
        reset: Restores that before each run.

    """
    leaves = {"args": args, "captured": captured}
    random_state = torch.get_rng_state()
    reset()
    expected = run(lambda: loop(f, *args, chunk_size=chunk_size), leaves)
    state_of_loop, random_of_loop = state(), torch.get_rng_state()
    torch.set_rng_state(random_state)
    reset()
    got = run(
        lambda: chunk_and_checkpoint(
            f, *args, chunk_size=chunk_size, strategy=strategy
        ),
        leaves,
    )
    assert_same_runs(got, expected)
    assert torch.equal(torch.get_rng_state(), random_of_loop), "the random stream moved"
    assert_same(state(), state_of_loop, "state")


@dataclass
class Counted:
    """`f`, counting its calls and noting the rows that each one saw."""

    f: Callable[..., Any]
    rows: list[int] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        """Call `f`."""
        self.rows.append(args[0].shape[0])
        return self.f(*args)


@contextmanager
def without_gc() -> Iterator[None]:
    """Leave cycles alone, so that what dies does so by its reference count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
