"""The functions that the benchmarks run."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from benchmarks.contenders import Contender, Function


def mlp(width: int, hidden: int, result: int | None = None) -> nn.Sequential:
    """Return an MLP with GELU. The yardstick is `mlp(64, 1024)`."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, result or width)
    )


def history(way: Contender, width: int, hidden: int, chunk_size: int) -> Function:
    """Return a way to run an `mlp` that captures a tensor with a history.

    Its last bias is computed from another tensor, before the chunks run. It does the
    operations of `mlp` and no others.
    """
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def run(x: Tensor) -> Tensor:
        bias = last.bias.clone()

        def f(rows: Tensor) -> Tensor:
            return linear(gelu(first(rows)), last.weight, bias)

        return way.run(f, x, chunk_size)

    return run


def elementwise(x: Tensor, operations: int) -> Tensor:
    """Do many small operations, which all save a tensor for backward."""
    for _ in range(operations):
        x = x.sin()
    return x
