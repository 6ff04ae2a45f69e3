"""When a chunk's gradients may be taken apart from the graph around the call.

Knows leaves, nodes and modules. Knows nothing of chunks, nor what is done elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from chunkcheck._torch.captures import borders
from chunkcheck._torch.compat import has_tensor_hooks
from chunkcheck._torch.reach import Reached
from chunkcheck._torch.tensors import is_plain, is_tensor

HISTORY = "f captures a tensor that was computed from others"
HOOKS = "f captures a tensor with hooks"


class UnsuitedError(Exception):
    """It would not be exact; says why."""


def why_not_one_node(reached: Reached, tensors: Sequence[Tensor]) -> str | None:
    """Return why one node for all chunks would not be exact, as far as can be seen."""
    if any(map(has_tensor_hooks, tensors)):
        return "an argument has hooks, which must not see that it gets no gradient"
    for t in reached.tensors:
        if t.grad_fn is not None:
            return HISTORY
        if t.requires_grad and not is_plain(t):
            return f"f captures a {type(t).__name__}"
        if t.requires_grad and has_tensor_hooks(t):
            return HOOKS
    return why_not_apart(reached, tensors)


def why_not_apart(reached: Reached, tensors: Sequence[Tensor]) -> str | None:
    """Return why gradients would not be exact that are asked for chunk by chunk.

    What `f` captures is not asked for: its graph shows that, once it has run.
    """
    if any(not is_plain(t) for t in tensors):
        return "an argument is of a subclass of Tensor, sparse or nested"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        units = (fsdp.FullyShardedDataParallel, getattr(fsdp, "FSDPModule", ()))
        if any(isinstance(module, units) for module in reached.modules):
            return "f runs modules sharded by FSDP, which gather as they run"
    return None


def check_unchunked(
    results: Iterable[tuple[str, object]],
    given: Sequence[Tensor],
    first: int | None,
    path: Callable[[int], str],
    cut: int,
) -> None:
    """Check that what is the first chunk's does not depend on its rows.

    Args:
        results: Those leaves of the first chunk's result, with their paths.
        given: The tensors that `f` was given; those that are cut come first.
        first: The sequence number of the first node that the run made.
        path: Returns the path of one of the tensors.
        cut: How many are cut.

    Raises:
        ValueError: One does, as its graph shows: a loss, or a norm of the rows.

    """
    for where, value in results:
        if not is_tensor(value) or not value.requires_grad:
            continue
        found = borders([value], given, first)
        # Such a node stands for all that it was given.
        if found is None or _reentrant(found.nodes):
            continue
        if rows := sorted(i for i in found.given if i < cut):
            raise ValueError(
                f"{where} is computed from {path(rows[0])}, which is cut, but out_dim"
                " is None there, which takes the first chunk's value and gradient:"
                " write 'sum' or 'mean' to reduce it over the chunks, or the dim along"
                " which it is joined"
            )


def _reentrant(nodes: Iterable[Node]) -> bool:
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def check_leaf(leaf: Tensor) -> None:
    """Check that the gradient of a captured leaf can be asked for chunk by chunk.

    Raises:
        UnsuitedError: It cannot.

    """
    if not is_plain(leaf):
        raise UnsuitedError(f"f captures a {type(leaf).__name__}")
    if leaf.numel() and not leaf.untyped_storage().size():
        raise UnsuitedError("f captures a parameter that is there only while it runs")


def check_graph(nodes: Iterable[Node]) -> None:
    """Check that the nodes of a chunk's graph can be asked for single gradients.

    Raises:
        UnsuitedError: One cannot.

    """
    if _reentrant(nodes):
        raise UnsuitedError("f uses torch's reentrant checkpoint")


def differentiable(nodes: Iterable[Node]) -> bool:
    """Whether no node stands for a derivative that is not there."""
    return not any(node.name() in ("torch::autograd::Error", "Error") for node in nodes)
