"""The loop over the chunks, for strategies that run one chunk at a time.

Cuts the arguments once, runs each chunk, joins once. How a chunk is checkpointed is
the executor's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.compat import next_number, transforms_active
from chunkcheck._torch.cuts import Apart
from chunkcheck._torch.results import Results, recompute_error
from chunkcheck._torch.suited import check_unchunked
from chunkcheck._torch.tensors import alias, cut, detached, is_tensor
from chunkcheck._tree import Tree, align
from chunkcheck._typing import ChunkStrategy


def run_loop(
    execute: ChunkStrategy, chunks: Chunks, tensors: Sequence[Tensor], out_dim: object
) -> object:
    """Return the result of all chunks, each of them run by `execute`."""
    results = Results(chunks.plan, out_dim)
    pieces: Apart | _Split
    if torch.is_grad_enabled() or transforms_active():
        pieces = _Split(chunks, tensors)
    else:  # an `f` that turns grad mode on, to get forces from energies, needs leaves
        pieces = Apart(chunks, tensors, [t.requires_grad for t in tensors])
    for index in range(len(chunks.plan)):
        chunk, given, first = _Chunk(chunks, index), pieces.given(index), next_number()
        tree, values = chunk.result(execute(chunk, *given))
        values = results.accept(tree, values, index)
        if index == 0:
            unchunked = results.unchunked(values)
            check_unchunked(unchunked, given, first, chunks.path, len(chunks.dims))
        results.put(values, index)
    return results.rebuilt(results.join(tensors))


class _Split:
    """The tensors of each chunk as they come out of torch's own split."""

    def __init__(self, chunks: Chunks, tensors: Sequence[Tensor]) -> None:
        self._whole = tensors[len(chunks.dims) :]
        self._pieces = cut(tensors, chunks.dims, chunks.plan.size)

    def given(self, chunk: int) -> list[Tensor]:
        return [*(pieces[chunk] for pieces in self._pieces), *self._whole]


class _Chunk:
    """`f` on the rows of one chunk, as a function of flat tensors.

    Recompute calls it again, long after the loop, so it holds no tensor: neither an
    argument nor a result.
    """

    __slots__ = ("_chunks", "_index", "_others", "_tree")

    def __init__(self, chunks: Chunks, index: int) -> None:
        self._chunks = chunks
        self._index = index
        self._tree: Tree | None = None
        self._others: list[object] = []  # the result's leaves but for tensors

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run `f` and return the tensor leaves of its result."""
        chunks, count = self._chunks, len(self._chunks.dims)
        if len(tensors) != chunks.count:
            raise TypeError(
                f"the strategy called f with {len(tensors)} tensors instead of the"
                f" {chunks.count} that it was given"
            )
        # Forward and recompute get the same tensors: a hook that `f` registers on one
        # in both would act twice.
        given = [*chunks.as_contiguous(tensors[:count]), *tensors[count:]]
        tree, values = chunks.run(self._index, list(map(alias, given)))
        if self._tree is not None:  # a recompute, which must give what forward gave
            try:
                values = align(self._tree, tree, values, "result")
            except ValueError as error:
                how = f"gave another result: {error}"
                raise recompute_error(chunks.plan, self._index, how) from None
        else:
            self._tree = tree
        self._others = [_TENSOR if is_tensor(value) else value for value in values]
        found = tuple(value for value in values if is_tensor(value))
        if torch.is_grad_enabled():
            return found
        # Under no_grad the result has no graph, not even if `f` has turned it on.
        return detached(found, [t.requires_grad for t in found])

    def result(self, tensors: object) -> tuple[Tree, list[object]]:
        """Return the result of `f`, given what the strategy made of its tensors.

        Raises:
            TypeError: That is not what the protocol asks for.

        """
        if self._tree is None:
            raise TypeError(
                "the strategy did not call f: it must return f(*tensors), a tuple of"
                " tensors"
            )
        expected = sum(value is _TENSOR for value in self._others)
        if not (
            isinstance(tensors, tuple)
            and len(tensors) == expected
            and all(map(is_tensor, tensors))
        ):
            found = type(tensors).__name__
            if isinstance(tensors, tuple | list):
                found += f" of ({', '.join(type(t).__name__ for t in tensors)})"
            raise TypeError(
                f"the strategy must return what f(*tensors) returned, a tuple of"
                f" {expected} tensors, found a {found}"
            )
        rest = iter(tensors)
        return self._tree, [
            next(rest) if value is _TENSOR else value for value in self._others
        ]


_TENSOR = object()  # stands for a tensor where the tensor itself is not to be held
