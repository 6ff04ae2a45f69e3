"""The two forms of the main job, with their defaults and their documentation.

Knows which backend a call belongs to, and nothing of how it runs.
"""

from __future__ import annotations

import difflib
import functools
import logging
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Generic, Never, Protocol, cast

from chunkcheck._arguments import Call, batch_entries
from chunkcheck._leaves import Library, classify, is_array
from chunkcheck._plan import Plan, check_out_dim, checked_size, plan_arguments
from chunkcheck._sizes import ChunkSizePolicy
from chunkcheck._strategies import Fused, Strategy, StrategyName, resolve_strategy
from chunkcheck._typing import BatchDim, OutDim, P, R, Ts

_log = logging.getLogger("chunkcheck.plan")


def chunk_and_checkpoint(
    f: Callable[[*Ts], R],
    /,
    *args: *Ts,
    chunk_size: int | ChunkSizePolicy | None,
    batch_dim: BatchDim = 0,
    out_dim: OutDim = "auto",
    strategy: Strategy | StrategyName = "auto",
    **not_options: Never,
) -> R:
    """Return `f(*args)`, computed a few rows at a time and recomputed in backward.

    For an `f` that treats the rows along `batch_dim` independently, the result and
    every gradient are those of `f(*args)` up to rounding, and peak memory is that of
    the arguments, the result, their gradients and one chunk. Random numbers and buffer
    updates are those of a loop over the chunks.

    Args:
        f: The function. It may capture modules and tensors; they get their gradients.
        *args: Its positional arguments: tensors, nested tuples, lists, dicts,
            namedtuples and registered containers of tensors, and anything else, which
            passes by identity. `f` gets fresh containers, and must not write into its
            tensors.
        chunk_size: Rows per chunk; the last chunk may have fewer. `None`, or the size
            of the batch or more: one chunk, still recomputed in backward. Or a policy
            that chooses, such as `NumChunks(8)` or `MemoryBudget("2GiB")`.
        batch_dim: The dim to chunk along: an int for all tensors of one dim or more,
            a tuple with an entry per argument, or a mapping by parameter name; an entry
            may be nested as its argument is. Negative dims count from the end. `None`
            passes tensors whole, with gradients: write it for weights, since any tensor
            whose size is that of the batch is cut. So does a size of 1 along the dim.
        out_dim: How the result is put together: an int joins along that dim; `"sum"`
            adds up what the chunks give, such as sums over rows and counts; `"mean"`
            averages it weighted by rows, which is exact for a mean over all rows of a
            chunk; `None` is for a leaf that is the same in all chunks. Or a tree of
            these with the shape of the result. `"auto"` is the batch dim that all
            chunked arguments share.
        strategy: How a chunk is run so that backward can redo it: an instance such as
            `NonReentrant(preserve_rng_state=False)`, the name of one, or a callable
            `(f, *tensors) -> tuple of tensors`. Not used where no gradient is needed.
        **not_options: None. A keyword of `f`'s own needs `chunked`.

    Returns:
        The result of `f`, with its structure and types; joined tensors are fresh.

    Raises:
        TypeError: An argument is of the wrong kind; raised before `f` has run.
        ValueError: Sizes or dims do not fit, or the result of a chunk cannot be joined.
        RuntimeError: `f` wrote into a tensor that it was given.

    Example:
        >>> import torch
        >>> from chunkcheck import chunk_and_checkpoint
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
        ... )
        >>> x = torch.randn(10, 8, requires_grad=True)
        >>> y = chunk_and_checkpoint(mlp, x, chunk_size=4)
        >>> y.shape
        torch.Size([10, 8])
        >>> y.sum().backward()
        >>> torch.allclose(y, mlp(x), atol=1e-6), x.grad.shape
        (True, torch.Size([10, 8]))

    """
    if not_options:
        chosen = {
            "chunk_size": chunk_size,
            "batch_dim": batch_dim,
            "out_dim": out_dim,
            "strategy": strategy,
        }
        raise TypeError(_keyword_message(f, chosen, not_options))
    run = _backend().untraced(_run)
    result = run(f, args, {}, chunk_size, batch_dim, out_dim, strategy)
    return cast("R", result)


def chunked(
    f: Callable[P, R],
    /,
    *,
    chunk_size: int | ChunkSizePolicy | None,
    batch_dim: BatchDim = 0,
    out_dim: OutDim = "auto",
    strategy: Strategy | StrategyName = "auto",
) -> Callable[P, R]:
    """Return a function that calls `chunk_and_checkpoint` on `f`, keywords included.

    The curried form: it has the signature of `f`, takes its keyword arguments, and is a
    decorator through `functools.partial`.

    Args:
        f: The function.
        chunk_size: As in `chunk_and_checkpoint`.
        batch_dim: As there. An int holds for keyword arguments too; with a tuple, a
            keyword that holds a tensor is an error; a mapping by parameter name covers
            both, and names every argument that holds a tensor. `*args` go under their
            own name, as a tuple.
        out_dim: As there.
        strategy: As there.

    Returns:
        A function of the signature of `f`.

    Raises:
        TypeError: `chunk_size`, `strategy` or `f` is of the wrong type.
        ValueError: `chunk_size` is not positive, or no strategy has this name.

    Example:
        >>> import functools
        >>> import torch
        >>> from chunkcheck import chunked
        >>> @functools.partial(chunked, chunk_size=2, batch_dim={"x": 0, "scale": None})
        ... def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale
        >>> scaled(torch.ones(5, 3), scale=torch.tensor([1.0, 2.0, 3.0])).shape
        torch.Size([5, 3])

    """
    _check_callable(f)
    _checked_size(chunk_size)
    chosen = resolve_strategy(strategy)
    return _Chunked(f, chunk_size, batch_dim, out_dim, chosen)


class _Chunked(Generic[P, R]):
    """What `chunked` returns: an object, so that copies and pickles have their own `f`.

    A module whose forward it has become is copied with that of the copy in it.
    """

    def __init__(
        self,
        f: Callable[P, R],
        chunk_size: object,
        batch_dim: object,
        out_dim: object,
        strategy: Strategy,
    ) -> None:
        self._f = f
        self._options = chunk_size, batch_dim, out_dim, strategy
        # A module's __dict__ is its parameters, so only name and docstring are taken.
        functools.update_wrapper(self, f, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        run = _backend().untraced(_run)
        return cast("R", run(self._f, args, kwargs, *self._options))

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind it, where it is a method."""
        return self if owner is None else types.MethodType(self, owner)


class _Backend(Library, Protocol):
    """What this module asks of a backend."""

    def untraced(self, function: Callable[P, R], /) -> Callable[P, R]: ...

    def decide(
        self,
        policy: ChunkSizePolicy,
        call: Call,
        leaves: list[object],
        plan: Plan,
        out_dim: object,
        strategy: Strategy,
    ) -> int: ...

    def run(
        self,
        call: Call,
        leaves: list[object],
        plan: Plan,
        out_dim: object,
        strategy: Strategy,
    ) -> object: ...


def _run(
    f: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    chunk_size: object,
    batch_dim: object,
    out_dim: object,
    strategy: object,
) -> object:
    chosen = resolve_strategy(strategy)
    call, values, plan = planned(f, args, kwargs, chunk_size, batch_dim, out_dim)
    backend = _backend()
    if isinstance(chunk_size, ChunkSizePolicy):
        chose = backend.decide(chunk_size, call, values, plan, out_dim, chosen)
        plan = plan.in_chunks_of(chose)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", plan.summary(call.paths))
    return backend.run(call, values, plan, out_dim, chosen)


def planned(
    f: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    chunk_size: object,
    batch_dim: object,
    out_dim: object,
) -> tuple[Call, list[object], Plan]:
    """Return a call taken apart, its leaves, and how they are to be cut.

    Raises:
        TypeError, ValueError: An argument or an option is of the wrong kind.

    """
    _check_callable(f)
    size = _checked_size(chunk_size)
    call, values = Call.split(f, args, kwargs)
    entries = batch_entries(call, batch_dim, [is_array(value) for value in values])
    backend = _backend()
    plan = plan_arguments(
        [
            classify(path, value, entry, backend)
            for path, value, entry in zip(call.paths, values, entries, strict=True)
        ],
        size,
    )
    check_out_dim(out_dim, plan)
    return call, values, plan


def _backend() -> _Backend:
    # Imported here, since it imports torch. The only one so far.
    from chunkcheck import _torch  # noqa: PLC0415

    return _torch


def _checked_size(chunk_size: object) -> int | None:
    """Return rows per chunk; a policy is to be asked later."""
    return None if isinstance(chunk_size, ChunkSizePolicy) else checked_size(chunk_size)


def _check_callable(f: object) -> None:
    if not callable(f):
        raise TypeError(
            f"f must be callable, found a {type(f).__name__}: the function comes first,"
            " then its arguments"
        )


def _keyword_message(
    f: Callable[..., Any], options: Mapping[str, object], keywords: Mapping[str, object]
) -> str:
    """Say where keywords belong that are no options."""
    names = ", ".join(map(repr, keywords))
    found = (
        f"chunk_and_checkpoint has no option {names} (it has {', '.join(options)}); "
    )
    of_strategy = {field.name for field in fields(Fused)}.intersection(keywords)
    if of_strategy:
        given = ", ".join(f"{key}={keywords[key]!r}" for key in sorted(of_strategy))
        return f"{found}write strategy=Fused({given})"
    for key in keywords:
        if close := difflib.get_close_matches(key, options, n=1):
            found += f"did you mean {close[0]}? "
    defaults = {"out_dim": "auto", "strategy": "auto"}
    shown = ", ".join(
        f"{key}={value!r}"
        for key, value in options.items()
        if key not in defaults or value != defaults[key]
    )
    name = getattr(f, "__name__", "f")
    given = ", ".join(f"{key}={key}" for key in keywords)
    return (
        f"{found}if it is a keyword argument of f, use the curried form:"
        f" chunked({name}, {shown})(..., {given})"
    )
