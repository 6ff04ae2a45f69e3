"""The engine behind "auto" and "fused": chooses between its two ways, and says why.

Knows when either is exact. How they work is their business.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch import Tensor

from chunkcheck._strategies import Fused
from chunkcheck._torch.captures import Reached, reach
from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.compat import has_tensor_hooks
from chunkcheck._torch.one_node import OneNode, UnsuitedError
from chunkcheck._torch.own_graph import OwnGraph
from chunkcheck._torch.replay import Replay
from chunkcheck._torch.results import Results
from chunkcheck._torch.tensors import is_plain

_log = logging.getLogger("chunkcheck")


def run_fused(
    options: Fused, chunks: Chunks, tensors: Sequence[Tensor], out_dim: object
) -> object:
    """Return the result of all chunks, ready for backward."""
    reached = reach(chunks.f, *chunks.constants)
    replay = Replay(options, reached, tensors)
    reason, again = why_not_one_node(reached, tensors), 0
    if reason is None:
        results = Results(chunks.plan, out_dim, options.determinism_check)
        try:
            return OneNode(options, chunks, tensors, results, replay).run(tensors)
        except UnsuitedError as error:
            reason = str(error)
            again = len(replay.records)
            replay.rewind()
    _log.info("each chunk keeps its own graph, since %s", reason)
    if again:
        _log.warning(
            "f runs once more on the first %d chunks, since it showed only there that"
            " %s: what f changes besides random states and buffers, it changes twice",
            again,
            reason,
        )
    results = Results(chunks.plan, out_dim, options.determinism_check)
    return OwnGraph(options, chunks, tensors, results, replay).run(tensors)


def why_not_one_node(reached: Reached, tensors: Sequence[Tensor]) -> str | None:
    """Return why one node for all chunks would not be exact, as far as can be seen."""
    if any(not is_plain(t) for t in tensors):
        return "an argument is of a subclass of Tensor, sparse or nested"
    if any(map(has_tensor_hooks, tensors)):
        return "an argument has hooks, which must not see that it gets no gradient"
    for t in reached.tensors:
        if t.grad_fn is not None:
            return "f captures a tensor that was computed from others"
        if t.requires_grad and not is_plain(t):
            return f"f captures a {type(t).__name__}"
        if t.requires_grad and has_tensor_hooks(t):
            return "f captures a tensor with hooks"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        units = (fsdp.FullyShardedDataParallel, getattr(fsdp, "FSDPModule", ()))
        if any(isinstance(module, units) for module in reached.modules):
            return "f runs modules sharded by FSDP, which gather as they run"
    return None
