"""Untouched: trial runs of a function that leave no trace.

Knows what a run may change: gradients, buffers, random states and flags. Knows nothing
of why the function is run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from chunkcheck._strategies import Fused
from chunkcheck._torch.buffers import Buffers
from chunkcheck._torch.reach import Reached, reach
from chunkcheck._torch.replay import Replay
from chunkcheck._tree import flatten


@contextmanager
def untouched(
    f: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[list[Tensor]]:
    """Set back afterwards what runs of `f` change.

    Gradients of its arguments and of what it captures, which are None meanwhile,
    buffers, `train()` flags, and the random states of torch on all devices in play, of
    generators that `f` holds, of Python and of NumPy.

    Yields:
        The leaves whose gradients a run may ask for.

    """
    leaves, _ = flatten((args, dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    reached = reach(f, *leaves)
    random = Reached(generators=reached.generators, tensors=reached.tensors)
    replay = Replay(Fused(preserve_python_rng_state=True), random, given)
    replay.run(lambda: None)  # which makes what is there now the first state
    buffers = Buffers(reached.modules)  # large ones as well: there is one copy only
    tensors = {id(t): t for t in (*given, *reached.tensors) if t.is_leaf}
    gradients = [(t, t.grad) for t in tensors.values()]
    flags = [(module, module.training) for module in reached.modules]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield [t for t in tensors.values() if t.requires_grad]
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for module, training in flags:
            module.training = training
        buffers.restore()
        replay.rewind()


@contextmanager
def old_objects_apart() -> Iterator[None]:
    """Keep the garbage collections that come from going through all that is there.

    There is one before each measurement, and all of Python's objects can take as long
    as many runs.
    """
    if gc.get_freeze_count():  # the user's own, which would be undone
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
