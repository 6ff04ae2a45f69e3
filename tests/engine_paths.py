"""Both ways of the engine, for tests of what must hold on each of them.

An `f` that captures a tensor with a history takes the general one, in which every
chunk keeps its own graph; any other takes the one node for all chunks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference import Strategy, own_checkpoint

both_paths = pytest.mark.parametrize(
    "history", [False, True], ids=["leaf", "with_history"]
)

OWN_GRAPH = "each chunk keeps its own graph"  # what the log says of the general one


def capture(
    device: torch.device, *shape: int, history: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return a leaf and what `f` is to capture: itself, or a tensor with a history.

    The history is one that a second backward can go through.
    """
    leaf = torch.randn(shape or (4,), dtype=dtype, device=device, requires_grad=True)
    return leaf, -leaf if history else leaf


def skip_torchs_own_under_tracing(strategy: Strategy) -> None:
    """Skip what torch 2.4 cannot do: a checkpoint of its own around what it traces.

    Its hooks see fake tensors there, raise, and stay on the stack for good.
    """
    if strategy in ("non_reentrant", own_checkpoint) and torch.__version__ < "2.5":
        pytest.skip("this torch's own checkpoint cannot be traced through")
