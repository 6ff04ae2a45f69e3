"""The engine behind "auto" and "fused": takes one of its two ways, and says why.

How they work, and when the faster one is exact, is their business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from chunkcheck._strategies import Fused
from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.one_node import OneNode
from chunkcheck._torch.own_graph import OwnGraph
from chunkcheck._torch.reach import reach
from chunkcheck._torch.replay import Replay
from chunkcheck._torch.results import Results
from chunkcheck._torch.suited import UnsuitedError, why_not_one_node

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
