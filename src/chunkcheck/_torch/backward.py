"""Backward through all chunks of a call: each run again, the gradients put together.

Knows nothing of the node that it is called from.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor

from chunkcheck._torch.captures import alive
from chunkcheck._torch.compat import gradients, hooks_muted
from chunkcheck._torch.cuts import Apart
from chunkcheck._torch.gradients import Gradient, Sum, gradient_maker
from chunkcheck._torch.products import add_gradients
from chunkcheck._torch.tape import OTHER_GRAPH, Kept, Tape


class Backward:
    """One backward through all chunks.

    Args:
        tape: What is known of the call.
        tensors: Its tensors.
        given: The gradients of the result's leaves, by column.
        wanted: Which of the tensors, and of the captures after them, get gradients.

    """

    def __init__(
        self,
        tape: Tape,
        tensors: Sequence[Tensor],
        given: Mapping[int, Tensor],
        wanted: Sequence[int],
    ) -> None:
        self._tape = tape
        self._differs = tape.replay.differs()
        self._cut = Apart(tape.chunks, tensors, tape.require)
        plan, dims = tape.chunks.plan, tape.chunks.dims
        joins = {c: tape.results.columns[c].join for c in given}
        self._of_joined = {
            c: given[c].split(plan.size, join.dim)
            for c, join in joins.items()
            if join.dim is not None
        }
        self._of_others = {c: given[c] for c in given if c not in self._of_joined}
        sources = [*tensors, *tape.captures.values()]
        asked = tape.options.accumulate_dtype
        self._totals: dict[int, Gradient] = {
            i: gradient_maker(
                sources[i], dims[i] if i < len(dims) else None, plan.size, asked
            )()
            for i in wanted
        }
        self._given = [i for i in wanted if i < len(tensors)]
        self._captured = [i for i in wanted if i >= len(tensors)]
        self._captures = [sources[i] for i in self._captured]
        self._of_captures = [self._totals[i] for i in self._captured]

    def gradients(self) -> dict[int, Tensor | None]:
        """Return the gradients of what is wanted."""
        tape = self._tape
        with hooks_muted(self._captures):  # which are there since forward
            # What is kept first: it is freed on the way.
            kept = tape.take_kept()
            done = set(kept)
            self._run_kept(kept)
            for chunk in reversed(range(len(tape.chunks.plan))):
                for leaf in () if chunk in done else alive(self._run(chunk)):
                    if id(leaf) not in tape.captures:
                        raise tape.results.differs(chunk, OTHER_GRAPH)
        return {i: total.total() for i, total in self._totals.items()}

    def _run_kept(self, kept: dict[int, Kept]) -> None:
        """Add the gradients of the chunks whose graphs are there, and let go of these.

        All in one go, so that torch sums them; but one by one where it would do so in
        too narrow a dtype.
        """
        sums = [total for total in self._totals.values() if isinstance(total, Sum)]
        at_once = 1 if any(total.widens for total in sums) else len(kept)
        while kept:
            chunks = sorted(kept, reverse=True)[:at_once]
            group = {chunk: kept.pop(chunk) for chunk in chunks}
            ends = [
                end
                for chunk, (_, values) in group.items()
                for end in self._ends(chunk, values)
            ]
            self._add(ends, {chunk: given for chunk, (given, _) in group.items()})

    def _run(self, chunk: int) -> list[weakref.ref[Tensor]]:
        """Add the gradients of one chunk, and return the leaves that are unknown."""
        given = self._cut.given(chunk)
        values, found = self._tape.recompute(chunk, given, differs=self._differs)
        ends = self._ends(chunk, values)
        if found is None:
            self._add(ends, {chunk: given})
            return []
        if ends and self._totals:
            wanted = [(given[i], self._totals[i]) for i in self._given]
            wanted += zip(self._captures, self._of_captures, strict=True)
            add_gradients(ends, wanted, found.nodes, chunk)
        known = self._tape.captures
        return [weakref.ref(leaf) for leaf in found.leaves if id(leaf) not in known]

    def _ends(
        self, chunk: int, values: Sequence[object]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the results of a chunk that get a gradient, each with its own."""
        of_results = {c: parts[chunk] for c, parts in self._of_joined.items()}
        of_results.update(self._of_others)
        return self._tape.results.ends(values, chunk, of_results)

    def _add(
        self,
        ends: Sequence[tuple[Tensor, Tensor]],
        given: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """Add the gradients that go out from some ends.

        Args:
            ends: Results, each with its gradient.
            given: The tensors of the chunks that these are of, by chunk.

        """
        if not ends or not self._totals:
            return
        outputs, of_outputs = zip(*ends, strict=True)
        wanted = [(i, chunk) for i in self._given for chunk in given]
        inputs = [given[chunk][i] for i, chunk in wanted] + self._captures
        found = gradients(outputs, of_outputs, inputs)
        (any_chunk, *_) = given
        captured = [(i, any_chunk) for i in self._captured]
        for (i, chunk), gradient in zip([*wanted, *captured], found, strict=True):
            if gradient is not None:
                self._totals[i].add(chunk, gradient)
