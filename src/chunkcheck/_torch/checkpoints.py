"""Checkpoints: how torch executes each chunk strategy.

A strategy sees flat tensors only. Knows nothing of chunks, trees or dims.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from chunkcheck._strategies import (
    NoCheckpoint,
    NonReentrant,
    Reentrant,
)
from chunkcheck._torch.compat import transforms_active
from chunkcheck._torch.tensors import detached
from chunkcheck._typing import ChunkStrategy, FlatFunction

_HAS_EARLY_STOP = "early_stop" in inspect.signature(checkpoint).parameters  # 2.9 on


def executor(
    strategy: ChunkStrategy | NonReentrant | Reentrant | NoCheckpoint,
) -> ChunkStrategy:
    """Return the callable that runs one chunk under `strategy`.

    Where nothing can be saved for backward, or a transform forbids the hooks that
    checkpointing needs, that is a plain call.

    Raises:
        RuntimeError: `strategy` would give wrong gradients here.

    """
    if not torch.is_grad_enabled() or transforms_active():
        return plain
    match strategy:
        case NoCheckpoint():
            return plain
        case NonReentrant():
            return functools.partial(_non_reentrant, strategy)
        case Reentrant():
            _refuse_process_group()
            return functools.partial(_reentrant, strategy)
        case _:
            return strategy


def plain(f: FlatFunction, /, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Run `f` as it is."""
    return f(*tensors)


def _non_reentrant(
    options: NonReentrant, f: FlatFunction, /, *tensors: Tensor
) -> tuple[Tensor, ...]:
    f, tensors = _without_inference_tensors(f, tensors)
    given: dict[str, Any] = {}
    if options.context_fn is not None:
        given["context_fn"] = options.context_fn
    if _HAS_EARLY_STOP:
        given["early_stop"] = options.early_stop
        early_stop: AbstractContextManager[None] = nullcontext()
    else:  # a setting of the process, which threads may swap
        early_stop = set_checkpoint_early_stop(options.early_stop)
    guarded = _Guarded(f)
    with early_stop:
        results: tuple[Tensor, ...] = checkpoint(
            guarded,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            determinism_check=options.determinism_check,
            **given,
        )
    guarded.raise_error()
    return results


class _Guarded:
    """`f`, whose error in its first run is raised once torch's checkpoint is left.

    Up to torch 2.9 an error that passes through `checkpoint` leaves its saved-tensor
    hooks on the stack for as long as the error lives, and they corrupt every later
    backward: a retry after an out-of-memory error would raise that error once more.
    """

    __slots__ = ("_error", "_f", "_started")

    def __init__(self, f: FlatFunction) -> None:
        self._f = f
        self._started = False
        self._error: BaseException | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A recompute may come before the first run has ended: `f` may call autograd.
        if self._started:
            return self._f(*tensors)
        self._started = True
        try:
            return self._f(*tensors)
        except BaseException as error:  # noqa: BLE001 (raise_error will)
            self._error = error
            return ()

    def raise_error(self) -> None:
        """Raise the error of the first run, if any; later runs raise their own."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or this frame and the error would hold each other


def _without_inference_tensors(
    f: FlatFunction, tensors: tuple[Tensor, ...]
) -> tuple[FlatFunction, tuple[Tensor, ...]]:
    """Bind inference tensors to `f`: torch cannot save them, and need not.

    As constants they are right in plain `f`, as long as it does not save them either.
    """
    constant = {i: t for i, t in enumerate(tensors) if t.is_inference()}
    if not constant:
        return f, tensors

    count = len(tensors)  # not `tensors`, which torch may free before this closure

    def bound(*saved: Tensor) -> tuple[Tensor, ...]:
        rest = iter(saved)
        return f(*(constant[i] if i in constant else next(rest) for i in range(count)))

    return bound, tuple(t for t in tensors if not t.is_inference())


def _reentrant(
    options: Reentrant, f: FlatFunction, /, *tensors: Tensor
) -> tuple[Tensor, ...]:
    _refuse_subclasses(tensors)
    f, tensors = _without_inference_tensors(f, tensors)
    differentiable: list[bool] = []
    unused: list[bool] = []  # results that get no gradient

    def forward_or_recompute(_anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled():
            return detached(f(*tensors), unused)
        # torch runs the forward without grad mode and then lets every result require
        # a gradient. With it, each result tells whether it does.
        with torch.enable_grad():
            results = f(*tensors)
        differentiable[:] = [t.requires_grad for t in results]
        return detached(results, [True] * len(results))

    def before_backward(gradients: tuple[Tensor | None, ...]) -> None:
        # Grad mode in a backward is on exactly under create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "strategy 'reentrant' cannot be differentiated twice: its gradients"
                " would be silently detached under create_graph=True; use"
                " strategy='non_reentrant'"
            )
        # torch fills in zeros for these, and then gives zeros where plain `f` gives
        # None. It needs one result to run backward from.
        missing = [gradient is None for gradient in gradients]
        unused[:] = [] if all(missing) else missing

    # torch connects the results to the graph only if an argument requires a gradient,
    # so that parameters alone would get none. The anchor does.
    anchor = torch.empty(0, requires_grad=True)
    results = checkpoint(
        forward_or_recompute,
        anchor,
        *tensors,
        use_reentrant=True,
        preserve_rng_state=options.preserve_rng_state,
    )
    connected = detached(results, [not wanted for wanted in differentiable])
    node = next((t.grad_fn for t in connected if t.grad_fn is not None), None)
    if node is not None:
        node.register_prehook(before_backward)
    return connected


def _refuse_subclasses(tensors: tuple[Tensor, ...]) -> None:
    plain_types = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
    for t in tensors:
        if type(t) is not Tensor and type(t).__torch_function__ not in plain_types:
            raise TypeError(
                f"strategy 'reentrant' got a {type(t).__name__}: its"
                " __torch_function__ would not act in recompute, and gradients would be"
                " silently wrong; use strategy='non_reentrant'"
            )


def _refuse_process_group() -> None:
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise RuntimeError(
            f"strategy 'reentrant' in a process group of {distributed.get_world_size()}"
            " ranks: parameter hooks would run once per chunk, and under"
            " DistributedDataParallel gradients would be silently wrong; use"
            " strategy='non_reentrant'"
        )
