"""The way into the torch backend: which engine or loop a call takes.

Knows what torch can do where. How a call is run is the engine's or the loop's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from chunkcheck._arguments import Call
from chunkcheck._plan import Plan
from chunkcheck._strategies import Fused, GradInForward, Strategy
from chunkcheck._torch.checkpoints import executor, plain
from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.compat import transforms_active
from chunkcheck._torch.engine import run_fused
from chunkcheck._torch.in_forward import run_in_forward
from chunkcheck._torch.loop import run_loop
from chunkcheck._typing import P, R

_log = logging.getLogger("chunkcheck")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, such that torch.compile breaks its graph there.

    Traced, the recompute would be merged with the forward run and save nothing.
    """
    if torch.compiler.is_compiling():
        disabled: Callable[P, R] = torch.compiler.disable(function)
        return disabled
    return function


def run(
    call: Call, leaves: list[object], plan: Plan, out_dim: object, strategy: Strategy
) -> object:
    """Return what `call` gives on `leaves`, computed chunk by chunk as `plan` says.

    Raises:
        RuntimeError: `strategy` would give wrong gradients here.

    """
    chunks = Chunks(call, leaves, plan)
    tensors = chunks.tensors(leaves)
    if not isinstance(strategy, Fused | GradInForward):
        return run_loop(executor(strategy), chunks, tensors, out_dim)
    if not torch.is_grad_enabled():
        return run_loop(plain, chunks, tensors, out_dim)
    if not transforms_active():
        if isinstance(strategy, Fused):
            return run_fused(strategy, chunks, tensors, out_dim)
        return run_in_forward(strategy, chunks, tensors, out_dim)
    reason = (
        "a torch.func transform or forward-mode AD is active, which one node for all"
        " chunks cannot take part in"
    )
    if isinstance(strategy, GradInForward) or not strategy.fall_back:
        name = "fused" if isinstance(strategy, Fused) else "grad_in_forward"
        raise RuntimeError(
            f"strategy {name!r} cannot be exact here: {reason}; use strategy='auto',"
            " which then runs the chunks without recompute"
        )
    _log.info("the chunks run without recompute, since %s", reason)
    return run_loop(plain, chunks, tensors, out_dim)
