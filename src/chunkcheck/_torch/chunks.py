"""Chunks: `f` run on the rows of one chunk, given flat tensors.

Knows the call and its trees. Knows nothing of gradients, nor how chunks are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from chunkcheck._arguments import Call
from chunkcheck._plan import Plan
from chunkcheck._torch.compat import version
from chunkcheck._torch.tensors import as_contiguous, is_tensor, memory_format
from chunkcheck._tree import Tree, flatten

_TENSOR = object()  # stands for a tensor where the tensor itself is not to be held


class Chunks:
    """A call with its tensors taken out, to be run on the tensors of each chunk.

    Recompute uses it again, long after the loop, so it holds no tensor.

    Attributes:
        plan: How the tensors are cut.
        dims: Of the tensors that are cut, the dim. All tensors stand in this order:
            those that are cut, then those that pass whole, each in flatten order.
        constants: The leaves of the call, without the tensors.

    """

    __slots__ = (
        *("_call", "_formats", "_invoke", "_positions"),
        *("constants", "dims", "plan"),
    )

    def __init__(self, call: Call, leaves: Sequence[object], plan: Plan) -> None:
        where = [
            (position, dim)
            for position, (leaf, dim) in enumerate(zip(leaves, plan.dims, strict=True))
            if is_tensor(leaf)
        ]
        chunked = [(position, dim) for position, dim in where if dim is not None]
        whole = [position for position, dim in where if dim is None]
        self.plan = plan
        self.dims = [dim for _, dim in chunked]
        self._call = call
        self._invoke = partial(_direct, call.f) if call.is_flat else call.invoke
        self.constants = [_TENSOR if is_tensor(leaf) else leaf for leaf in leaves]
        self._positions = [*(position for position, _ in chunked), *whole]
        self._formats = [
            memory_format(leaf) for i, _ in chunked if is_tensor(leaf := leaves[i])
        ]

    @property
    def f(self) -> Callable[..., Any]:
        """What is called."""
        return self._call.f

    @property
    def count(self) -> int:
        """The number of tensors."""
        return len(self._positions)

    def tensors(self, leaves: Sequence[object]) -> list[Tensor]:
        """Return the tensors among the leaves of the call."""
        return [leaf for i in self._positions if is_tensor(leaf := leaves[i])]

    def run(self, chunk: int, tensors: Sequence[Tensor]) -> tuple[Tree, list[object]]:
        """Run `f` on the tensors of one chunk, and return its result taken apart.

        Args:
            chunk: The chunk.
            tensors: Its tensors.

        Raises:
            RuntimeError: `f` wrote into one of them.

        """
        leaves = list(self.constants)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        versions = list(map(version, tensors))
        try:
            result = self._invoke(leaves)
        except Exception as error:
            self._annotate(error, chunk, tensors)
            raise
        after = list(map(version, tensors))
        if after != versions:
            index = next(i for i, v in enumerate(after) if v != versions[i])
            raise RuntimeError(
                f"f wrote into {self.path(index)} while running"
                f" {self.plan.describe(chunk)}, but it is the caller's tensor or a view"
                " of that: clone it before changing it"
            )
        values, tree = flatten(result)
        return tree, values

    def as_contiguous(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces of the chunked tensors, as contiguous as their wholes."""
        return list(map(as_contiguous, pieces, self._formats))

    def path(self, index: int) -> str:
        """Return the path of one of the tensors of `run`."""
        return self._call.paths[self._positions[index]]

    def _annotate(
        self, error: Exception, chunk: int, tensors: Sequence[Tensor]
    ) -> None:
        """Say which rows `f` had, and what was cut to them."""
        error.add_note(f"while running {self.plan.describe(chunk)}")
        if len(tensors) > 1:
            seen = [
                f"{self.path(index)} {tuple(tensor.shape)}"
                for index, tensor in enumerate(tensors)
            ]
            cut = len(self._formats)
            error.add_note(
                f"f was given these chunks: {', '.join(seen[:cut])};"
                f" and whole: {', '.join(seen[cut:]) or 'no tensor'}"
            )
        text = str(error)
        if "modified inplace" in text or "used in an in-place operation" in text:
            error.add_note(
                "a chunk is a view of the caller's tensor, which f must not write to:"
                " clone it first"
            )


def _direct(f: Callable[..., Any], leaves: Sequence[object]) -> Any:
    """Call `f` on leaves that are its arguments: faster, and nothing to rebuild."""
    return f(*leaves)
