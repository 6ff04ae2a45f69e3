"""What both checkers must accept and infer; checked by `nox -s types`, never run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
    assert_type,
    overload,
)

import torch
from torch import Tensor, nn

from chunkcheck import (
    ChunkStrategy,
    Fused,
    NoCheckpoint,
    NonReentrant,
    Reentrant,
    StrategyName,
    chunk_and_checkpoint,
    chunked,
)

T = TypeVar("T")
Pair: TypeAlias = tuple[Tensor, Tensor]
Flat: TypeAlias = Callable[..., tuple[Tensor, ...]]


class Out(NamedTuple):
    y: Tensor
    aux: dict[str, Tensor]


def named(x: Tensor, aux: dict[str, Tensor]) -> Out:
    return Out(x, aux)


def scaled(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    return x * y * scale


def keyword_only(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


def many(*xs: Tensor) -> Tensor:
    return sum(xs, torch.zeros(()))


def same(x: T) -> T:
    return x


def swapped(x: Tensor, n: int) -> tuple[int, Tensor]:
    return n, x


@overload
def overloaded(x: Tensor) -> Tensor: ...
@overload
def overloaded(x: int) -> int: ...
def overloaded(x: Tensor | int) -> Tensor | int:
    return x


class Block(nn.Module):
    def attend(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x, x if mask is None else mask

    @functools.partial(chunked, chunk_size=4)
    def method(self, x: Tensor, scale: float = 1.0) -> Out:
        return Out(x * scale, {})


@functools.partial(chunked, chunk_size=4, batch_dim={"x": 0, "bias": None})
def decorated(x: Tensor, bias: Tensor, scale: float = 1.0) -> Out:
    return Out(x * scale + bias, {})


def immediate(x: Tensor, aux: dict[str, Tensor], xs: list[Tensor], m: Block) -> None:
    assert_type(chunk_and_checkpoint(named, x, aux, chunk_size=4), Out)
    assert_type(chunk_and_checkpoint(scaled, x, x, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(scaled, x, x, 2.0, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(swapped, x, 2, chunk_size=4), tuple[int, Tensor])
    assert_type(
        chunk_and_checkpoint(lambda a, n: (n, a), x, 2, chunk_size=4),
        tuple[int, Tensor],
    )
    assert_type(chunk_and_checkpoint(same, x, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(same, aux, chunk_size=4), dict[str, Tensor])
    assert_type(chunk_and_checkpoint(overloaded, x, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(overloaded, 3, chunk_size=4), int)
    bound = functools.partial(scaled, scale=2.0)
    assert_type(chunk_and_checkpoint(bound, x, x, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(torch.softmax, x, -1, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(many, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(many, x, x, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(many, *xs, chunk_size=4), Tensor)
    assert_type(chunk_and_checkpoint(m.attend, x, chunk_size=4), Pair)
    assert_type(chunk_and_checkpoint(m.attend, x, None, chunk_size=4), Pair)
    assert_type(chunk_and_checkpoint(m.method, x, chunk_size=4), Out)
    # torch types the call of every module so.
    assert_type(chunk_and_checkpoint(m, x, x, chunk_size=4), Any)
    y: Tensor = chunk_and_checkpoint(m, x, x, chunk_size=4)
    assert_type(chunk_and_checkpoint(same, y, chunk_size=4), Tensor)


def curried(x: Tensor, aux: dict[str, Tensor], xs: list[Tensor], m: Block) -> None:
    assert_type(chunked(named, chunk_size=4)(x, aux), Out)
    assert_type(chunked(named, chunk_size=4)(x, aux=aux), Out)
    assert_type(chunked(scaled, chunk_size=4)(x, x), Tensor)
    assert_type(chunked(scaled, chunk_size=4)(x, y=x, scale=2.0), Tensor)
    assert_type(chunked(keyword_only, chunk_size=4)(x, scale=2.0), Tensor)
    assert_type(chunked(swapped, chunk_size=4)(x, 2), tuple[int, Tensor])
    # A bare lambda has no types for its parameters here.
    swap: Callable[[Tensor, int], tuple[int, Tensor]] = lambda a, n: (n, a)  # noqa: E731
    assert_type(chunked(swap, chunk_size=4)(x, 2), tuple[int, Tensor])
    assert_type(chunked(same, chunk_size=4)(x), Tensor)
    assert_type(chunked(same, chunk_size=4)(aux), dict[str, Tensor])
    assert_type(chunked(overloaded, chunk_size=4)(x), Tensor)
    # Through a ParamSpec, mypy keeps the first overload alone.
    chunked(overloaded, chunk_size=4)(3)  # type: ignore[arg-type]
    bound = functools.partial(scaled, scale=2.0)
    assert_type(chunked(bound, chunk_size=4)(x, x), Tensor)
    assert_type(chunked(torch.softmax, chunk_size=4)(x, -1), Tensor)
    assert_type(chunked(torch.softmax, chunk_size=4)(x, dim=-1), Tensor)
    assert_type(chunked(many, chunk_size=4)(*xs), Tensor)
    assert_type(chunked(m.attend, chunk_size=4)(x), Pair)
    assert_type(chunked(m.attend, chunk_size=4)(x, mask=None), Pair)
    assert_type(chunked(Block.attend, chunk_size=4)(m, x), Pair)
    assert_type(chunked(m, chunk_size=4)(x, mask=x), Any)


def decorators(x: Tensor, m: Block) -> None:
    assert_type(decorated(x, x), Out)
    assert_type(decorated(x, bias=x, scale=2.0), Out)
    assert_type(m.method(x), Out)
    assert_type(m.method(x, scale=2.0), Out)
    assert_type(Block.method(m, x), Out)


class Options(TypedDict):
    chunk_size: int | None
    strategy: StrategyName


def sizes(x: Tensor, options: Options, untyped: dict[str, Any]) -> None:
    assert_type(chunk_and_checkpoint(same, x, chunk_size=None), Tensor)
    # A TypedDict may hold further keys: pyright sees a keyword that may not be given.
    chunk_and_checkpoint(same, x, **options)  # pyright: ignore[reportArgumentType]
    assert_type(chunk_and_checkpoint(same, x, chunk_size=4, **untyped), Tensor)
    assert_type(chunked(same, **options)(x), Tensor)


def batch_dims(
    x: Tensor,
    dims: list[int],
    row: tuple[int, ...],
    by_name: dict[str, tuple[int, None]],
    maybe: int | None,
) -> None:
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=-1)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=None)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=maybe)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=(0, None))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=row)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=(0, (1, (None, 2))))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=([0, None], 0))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=(dims, None))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=({"a": 0}, {3: None}))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim={"x": 0, "y": (1, None)})
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim={"x": {"a": [0, None]}})
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, batch_dim=by_name)
    chunked(scaled, chunk_size=4, batch_dim={"x": 0, "y": None})
    chunked(scaled, chunk_size=4, batch_dim=by_name)


def out_dims(
    x: Tensor,
    dims: list[int],
    by_key: dict[str, tuple[int, None]],
    reduction: Literal["sum", "mean"],
) -> None:
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=-1)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=None)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim="auto")
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=reduction)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=(0, "sum", (None, "mean")))
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=[0, "sum"])
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=dims)
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim={"loss": "sum", "y": 0})
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim={0: None, 1: [0, None]})
    chunk_and_checkpoint(scaled, x, x, chunk_size=4, out_dim=by_key)
    chunked(scaled, chunk_size=4, out_dim=(0, "sum"))


def offload(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    with torch.autograd.graph.save_on_cpu():
        return f(*tensors)


def with_option(f: Flat, *xs: Tensor, pin: bool = False) -> tuple[Tensor, ...]:
    with torch.autograd.graph.save_on_cpu(pin):
        return f(*xs)


class Logged:
    def __init__(self, inner: ChunkStrategy) -> None:
        self.inner = inner

    def __call__(self, f: Flat, /, *args: Tensor) -> tuple[Tensor, ...]:
        return self.inner(f, *args)


def contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def strategies(x: Tensor, name: StrategyName, own: ChunkStrategy) -> None:
    chunk_and_checkpoint(same, x, chunk_size=4, strategy="auto")
    chunk_and_checkpoint(same, x, chunk_size=4, strategy="fused")
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=Fused())
    chunk_and_checkpoint(
        same,
        x,
        chunk_size=4,
        strategy=Fused(
            preserve_python_rng_state=True,
            generators=(torch.Generator(),),
            determinism_check="values",
            context_fn=contexts,
            accumulate_dtype=torch.float64,
            keep_chunks=2,
        ),
    )
    chunk_and_checkpoint(same, x, chunk_size=4, strategy="non_reentrant")
    chunk_and_checkpoint(same, x, chunk_size=4, strategy="reentrant")
    chunk_and_checkpoint(same, x, chunk_size=4, strategy="none")
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=name)
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=NonReentrant())
    chunk_and_checkpoint(
        same,
        x,
        chunk_size=4,
        strategy=NonReentrant(
            preserve_rng_state=False,
            determinism_check="none",
            context_fn=contexts,
            early_stop=True,
        ),
    )
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=Reentrant())
    chunk_and_checkpoint(
        same, x, chunk_size=4, strategy=Reentrant(preserve_rng_state=False)
    )
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=NoCheckpoint())
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=own)
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=offload)
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=with_option)
    chunk_and_checkpoint(
        same, x, chunk_size=4, strategy=functools.partial(with_option, pin=True)
    )
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=lambda f, *args: f(*args))
    chunk_and_checkpoint(same, x, chunk_size=4, strategy=Logged(offload))
    chunked(same, chunk_size=4, strategy="none")
    chunked(same, chunk_size=4, strategy=Logged(offload))
    choice: NonReentrant | Reentrant = Reentrant()
    chunked(same, chunk_size=4, strategy=choice)
