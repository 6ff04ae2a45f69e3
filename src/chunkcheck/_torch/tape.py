"""The tape of a call: what its backward needs, and a chunk run again from it.

Knows nothing of the node that backward comes through, nor how gradients are put
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from chunkcheck._plan import Plan
from chunkcheck._strategies import Fused
from chunkcheck._torch.captures import Borders, borders, fingerprint
from chunkcheck._torch.compat import next_number
from chunkcheck._torch.replay import Replay
from chunkcheck._torch.results import Results
from chunkcheck._torch.tensors import is_tensor
from chunkcheck._tree import Tree

OTHER_GRAPH = (
    "used other tensors that require a gradient than forward: a parameter that was"
    " replaced, or another one of several experts"
)
Kept: TypeAlias = tuple[list[Tensor], list[object]]  # what a chunk got and gave
# Which leaves of the result require a gradient, and the graph's borders: which tensors
# that it was given a chunk used, and the ids of the captured leaves in the order in
# which a walk meets them, that is, where in the graph they are.
Trace: TypeAlias = tuple[list[bool], set[int], tuple[int, ...]]


class Runnable(Protocol):
    """A call as chunks of flat tensors, such as `Chunks`."""

    plan: Plan
    dims: list[int]

    @property
    def count(self) -> int:
        """The number of tensors."""
        ...

    @property
    def f(self) -> Callable[..., Any]:
        """What is called."""
        ...

    def path(self, index: int) -> str:
        """Return the path of one of the tensors."""
        ...

    def run(self, chunk: int, tensors: Sequence[Tensor]) -> tuple[Tree, list[object]]:
        """Return the result for one chunk, taken apart."""
        ...

    def as_contiguous(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces of one chunk, as contiguous as their wholes."""
        ...


@dataclass(slots=True)
class Tape:
    """What backward needs of one call, apart from its tensors."""

    options: Fused
    chunks: Runnable
    results: Results
    replay: Replay
    require: list[bool]  # which of the tensors require a gradient
    used: set[int] = field(default_factory=set)  # which of the tensors
    captures: dict[int, Tensor] = field(default_factory=dict)  # by id
    traces: list[Trace] = field(default_factory=list)  # by chunk
    made: list[int] = field(default_factory=list)  # by chunk, how many nodes
    # The ids of leaves that a kept graph ends in: perhaps `f` made them.
    uncertain: set[int] = field(default_factory=set)
    large: bool = False  # whether any sum is
    once: bool = False  # whether it has no derivative
    alike: bool = True  # whether all chunks use the same tensors
    # What the first chunk saved: what differs in each recompute differs there.
    fingerprint: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    # By chunk, the tensors and the result of those whose graph is kept.
    kept: dict[int, Kept] = field(default_factory=dict)

    def take_kept(self) -> dict[int, Kept]:
        """Return the chunks whose graphs are kept: each goes to one backward only."""
        found = {}
        while self.kept:
            with suppress(KeyError):  # another thread was faster
                chunk, kept = self.kept.popitem()
                found[chunk] = kept
        return found

    def recompute(
        self, chunk: int, given: Sequence[Tensor], *, differs: bool
    ) -> tuple[list[object], Borders | None]:
        """Run a chunk again.

        Args:
            chunk: The chunk.
            given: Its tensors.
            differs: See `Replay.again`.

        Returns:
            The leaves of its result, and its graph, if that had to be looked at.

        Raises:
            RuntimeError: It did not do what it did in forward.

        """
        first = next_number()
        with self.replay.again(self.replay.records[chunk], differs=differs):
            tree, values = self.chunks.run(chunk, given)
        same = nodes_since(first) == self.made[chunk]
        values = self.results.check_again(tree, values, chunk)
        trace = self.traces[chunk]
        if trace[0] != required(values):
            how = "gave results of which others require a gradient"
            raise self.results.differs(chunk, how)
        # A parameter that was replaced shows in the first chunk. Experts of which each
        # chunk uses others show in forward.
        if same and chunk and self.alike and not self.large:
            return values, None
        found = borders(requiring(values), given, first)
        if found is None or found.older:
            raise self.results.differs(chunk, OTHER_GRAPH)
        _, used, captured = trace
        seen = self.captured(map(id, found.leaves))
        # A compiler may have made another graph of the same, in another order.
        alike = seen == captured or (not same and set(seen) == set(captured))
        if found.given != used or not alike:
            raise self.results.differs(chunk, OTHER_GRAPH)
        if (
            chunk == 0
            and same  # else a compiler has made another graph of it
            and self.options.determinism_check != "none"
            and fingerprint(found.nodes) != self.fingerprint
        ):
            how = "saved tensors of other shapes for backward than forward"
            raise self.results.differs(chunk, how)
        return values, found

    def captured(self, leaves: Iterable[int]) -> tuple[int, ...]:
        """Return which of some leaves, given by their ids, are captured for certain."""
        return tuple(
            i for i in leaves if i in self.captures and i not in self.uncertain
        )


def nodes_since(first: int | None) -> int:
    """Return how many nodes this thread made since `next_number` returned `first`."""
    last = next_number()
    return -1 if first is None or last is None else last - first


def required(values: Sequence[object]) -> list[bool]:
    """Return which of some leaves require a gradient."""
    return [is_tensor(v) and v.requires_grad for v in values]


def requiring(values: Sequence[object]) -> list[Tensor]:
    """Return the tensors that require a gradient."""
    return [v for v in values if is_tensor(v) and v.requires_grad]
