"""The fast engine: one node of the graph for all chunks.

Forward runs every chunk with its graph, notes which leaves `f` captures, and drops the
graph. Backward runs every chunk again and puts the gradients together. That is exact
where all that `f` captures are leaves without hooks; elsewhere it says what is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from chunkcheck._strategies import Fused
from chunkcheck._torch.backward import Backward
from chunkcheck._torch.captures import (
    Observed,
    borders,
    fingerprint,
    observed,
    stamp,
)
from chunkcheck._torch.compat import (
    graph_task,
    has_tensor_hooks,
    hooks_muted,
    next_number,
    will_run,
)
from chunkcheck._torch.cuts import Apart
from chunkcheck._torch.products import LARGE
from chunkcheck._torch.reach import Reached
from chunkcheck._torch.replay import Replay
from chunkcheck._torch.results import Results
from chunkcheck._torch.saved import Saved, kept_from
from chunkcheck._torch.suited import (
    HISTORY,
    HOOKS,
    UnsuitedError,
    check_graph,
    check_leaf,
    check_unchunked,
    differentiable,
)
from chunkcheck._torch.tape import (
    Runnable,
    Tape,
    Trace,
    nodes_since,
    required,
    requiring,
)
from chunkcheck._torch.tensors import is_plain, is_tensor, stub
from chunkcheck._tree import Tree, flatten


class OneNode:
    """One call: its forward, and its backward, for which only the graph holds it.

    Args:
        options: Those of the strategy.
        chunks: The call.
        tensors: Its tensors, in the order of `chunks`.
        results: Where the results are put.
        replay: What recompute sees again.
        derived: Whether this is the derivative of a call that has been checked.

    """

    def __init__(
        self,
        options: Fused,
        chunks: Runnable,
        tensors: Sequence[Tensor],
        results: Results,
        replay: Replay,
        *,
        derived: bool = False,
    ) -> None:
        require = [t.requires_grad for t in tensors]
        self._tape = Tape(options, chunks, results, replay, require)
        self._derived = derived
        self._saved = Saved(tensors, chunks.path)
        self._watched: Observed = []  # must not change before backward
        self.mailbox: dict[int, OneNode] = {}  # by backward

    def run(self, tensors: Sequence[Tensor]) -> object:
        """Return the result of all chunks.

        Raises:
            UnsuitedError: Another engine must do it.

        """
        return self._tape.results.rebuilt(self.leaves(tensors))

    def leaves(self, tensors: Sequence[Tensor]) -> list[object]:
        """Return the leaves of that result."""
        tape = self._tape
        cut = Apart(tape.chunks, tensors, tape.require)
        with kept_from(outer_hooks=self._saved.outer_hooks):
            for chunk in range(len(tape.chunks.plan)):
                self._note(chunk, self._forward(chunk, cut.given(chunk)))
        tape.replay.finish()
        whole = [t for t in tensors[len(tape.chunks.dims) :] if t.requires_grad]
        sums = [*whole, *tape.captures.values()]
        tape.large = any(t.nbytes >= LARGE for t in sums)
        leaves = tape.results.join(tensors)
        return self._connected(leaves, tensors)

    def _forward(self, chunk: int, given: list[Tensor]) -> _Run:
        """Run one chunk."""
        tape, plan = self._tape, self._tape.chunks.plan
        first = next_number()
        tree, values = tape.replay.run(tape.chunks.run, chunk, given)
        tape.made.append(nodes_since(first))
        values = tape.results.accept(tree, values, chunk)
        found = borders(requiring(values), given, first)
        if found is None or found.older:
            raise UnsuitedError(HISTORY)
        if chunk == 0:
            check_graph(found.nodes)
            unchunked = tape.results.unchunked(values)
            path, cut = tape.chunks.path, len(tape.chunks.dims)
            check_unchunked(unchunked, given, first, path, cut)
        if self._derived and not differentiable(found.nodes):
            tape.once = True
        new = [leaf for leaf in found.leaves if id(leaf) not in tape.captures]
        for leaf in () if self._derived else new:
            check_leaf(leaf)
            if has_tensor_hooks(leaf):
                raise UnsuitedError(HOOKS)
        tape.results.put(values, chunk, connected=False)
        if chunk >= len(plan) - tape.options.keep_chunks:
            tape.kept[chunk] = given, values
        return _Run(
            required(values),
            found.given,
            list(map(id, found.leaves)),
            [(weakref.ref(leaf), stamp(leaf)) for leaf in new],
            self._first_saved(found.nodes, given) if chunk == 0 else [],
        )

    def _first_saved(self, nodes: Sequence[Node], given: Sequence[Tensor]) -> Observed:
        self._tape.fingerprint = fingerprint(nodes)
        return observed(nodes, given)

    def _note(self, chunk: int, run: _Run) -> None:
        """Take down what outlives the graph: the rest `f` did not capture but make."""
        tape = self._tape
        for ref, before in run.new:
            if (leaf := ref()) is not None:
                tape.captures[id(leaf)] = leaf
                self._watched.append((ref, before))
                if chunk in tape.kept:  # whose graph holds what `f` made
                    tape.uncertain.add(id(leaf))
        self._watched += [pair for pair in run.constants if pair[0]() is not None]
        trace: Trace = (run.required, run.used, tape.captured(run.leaves))
        if chunk and tape.traces[-1] == trace:
            trace = tape.traces[-1]  # so that many chunks take no memory
        else:
            tape.used |= run.used
            tape.alike = not chunk
        tape.traces.append(trace)

    def _connected(
        self, leaves: list[object], tensors: Sequence[Tensor]
    ) -> list[object]:
        """Return the leaves of the result, in the graph if they require a gradient."""
        tape = self._tape
        columns = [
            column
            for column, of_chunks in enumerate(
                zip(*(of_chunk for of_chunk, *_ in tape.traces), strict=True)
            )
            if any(of_chunks)
        ]
        if not columns:
            return leaves
        inputs = [*(tensors[i] for i in sorted(tape.used)), *tape.captures.values()]
        if not inputs:  # `f` made a leaf of its own
            inputs.append(torch.empty(0, requires_grad=True))
        wholes = [leaf for column in columns if is_tensor(leaf := leaves[column])]
        stubs: tuple[Tensor, ...] = _Core.apply(  # type: ignore[no-untyped-call]
            self.mailbox, columns, wholes, *inputs
        )
        for column, whole, end in zip(columns, wholes, stubs, strict=True):
            with saved_tensors_hooks(lambda _: self, _deliver):
                leaves[column] = _Result.apply([whole], end)  # type: ignore[no-untyped-call]
        return leaves

    def backward(
        self, given: Mapping[int, Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs of the node.

        Args:
            given: The gradients of the result's leaves, by column.
            wanted: Which gradients are.

        """
        tape = self._tape
        if tape.once:
            raise RuntimeError(
                "trying to differentiate twice a function that was marked with"
                " @once_differentiable, which f uses"
            )
        tensors = self._saved.tensors()
        tape.replay.check_unchanged(self._watched, tape.chunks.f)
        count = tape.chunks.count  # the captures come after the tensors
        sources = [*sorted(tape.used), *range(count, count + len(tape.captures))]
        leaves = list(tape.captures.values())
        which = [
            i
            for i, asked in zip(sources, wanted, strict=False)
            # One that is frozen by now gets none, as in torch's own graph.
            if asked and (i < count or leaves[i - count].requires_grad)
        ]
        if torch.is_grad_enabled():  # only under create_graph=True
            found = _Derivative(tape, given, which).gradients(tensors)
        else:
            with torch.enable_grad():
                found = Backward(tape, tensors, given, which).gradients()
        tape.replay.check_unchanged(self._watched, tape.chunks.f)
        return [found.get(i) for i in sources]


class _Run(NamedTuple):
    """What is known of the first run of a chunk."""

    required: list[bool]  # which leaves of the result require a gradient
    used: set[int]  # which of the tensors
    leaves: list[int]  # the ids of those that its graph ends in
    new: Observed  # of these, those in which no other chunk's did
    constants: Observed  # that it saved


class _Derivative:
    """The gradients of a call as a call of its own, which has gradients in turn.

    Its chunks are those of the call: each runs `f` again, on leaves of its own, so that
    no gradient takes a way around through what an argument was computed from.
    """

    def __init__(
        self, tape: Tape, given: Mapping[int, Tensor], wanted: Sequence[int]
    ) -> None:
        columns = tape.results.columns
        self._tape = tape
        self._wanted = wanted
        self._differs = tape.replay.differs()
        self._cut = [c for c in given if columns[c].join.dim is not None]
        self._whole = [c for c in given if columns[c].join.dim is None]
        self._given = given
        self._found: set[int] = set()
        self.plan = tape.chunks.plan
        self.dims = [
            *tape.chunks.dims,
            *(dim for c in self._cut if (dim := columns[c].join.dim) is not None),
        ]

    @property
    def count(self) -> int:
        """The number of tensors: those of the call, and the gradients of its result."""
        return self._tape.chunks.count + len(self._cut) + len(self._whole)

    @property
    def f(self) -> Callable[..., Any]:
        """What the call calls."""
        return self._tape.chunks.f

    def path(self, index: int) -> str:
        """Return what one of the tensors is."""
        cut, count = len(self._tape.chunks.dims), self._tape.chunks.count
        whole = index - len(self._cut)
        if index < cut or cut <= whole < count:
            return self._tape.chunks.path(index if index < cut else whole)
        return "the gradient of a result"

    def as_contiguous(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the pieces of one chunk, as contiguous as their wholes."""
        chunks = self._tape.chunks
        cut = len(chunks.dims)
        return [*chunks.as_contiguous(pieces[:cut]), *pieces[cut:]]

    def gradients(self, tensors: Sequence[Tensor]) -> dict[int, Tensor | None]:
        """Return the gradients of what is wanted, in the graph of their sources."""
        cut = len(self._tape.chunks.dims)
        flat = [
            *tensors[:cut],
            *(self._given[c] for c in self._cut),
            *tensors[cut:],
            *(self._given[c] for c in self._whole),
        ]
        out_dim = tuple(
            self._tape.chunks.dims[i] if i < cut else "sum" for i in self._wanted
        )
        options = self._tape.options
        replay = Replay(Fused(preserve_rng_state=False), Reached(), ())
        asked = options.accumulate_dtype
        results = Results(self.plan, out_dim, accumulate_dtype=asked)
        node = OneNode(options, self, flat, results, replay, derived=True)
        found = zip(self._wanted, node.leaves(flat), strict=True)
        return {
            i: gradient if i in self._found and is_tensor(gradient) else None
            for i, gradient in found
        }

    def run(self, chunk: int, tensors: Sequence[Tensor]) -> tuple[Tree, list[object]]:
        """Return the gradients that one chunk gives, zeros for those it has not."""
        tape = self._tape
        cut, count = len(tape.chunks.dims), tape.chunks.count
        after = cut + len(self._cut)
        given = [*tensors[:cut], *tensors[after : after + count - cut]]
        of_results = dict(zip(self._cut, tensors[cut:after], strict=True))
        of_results.update(zip(self._whole, tensors[after + count - cut :], strict=True))
        values, _ = tape.recompute(chunk, given, differs=self._differs)
        ends = tape.results.ends(values, chunk, of_results)
        sources = [*given, *tape.captures.values()]
        inputs = [sources[i] for i in self._wanted]
        captures = list(tape.captures.values())
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if ends:
            outputs, of_outputs = zip(*ends, strict=True)
            with hooks_muted(captures):
                found = torch.autograd.grad(
                    outputs, inputs, of_outputs, create_graph=True, allow_unused=True
                )
        gradients = []
        for i, source, gradient in zip(self._wanted, inputs, found, strict=True):
            if gradient is None:
                gradients.append(torch.zeros_like(source))
            else:
                self._found.add(i)
                plain = is_plain(gradient)  # or sparse, which cannot be joined
                gradients.append(gradient if plain else gradient.to_dense())
        values, tree = flatten(tuple(gradients))
        return tree, values


class _Core(torch.autograd.Function):
    """The node that all chunks share. It gives stubs; each result has its own node."""

    @staticmethod
    def forward(
        ctx: Any,
        mailbox: dict[int, OneNode],
        columns: list[int],
        wholes: list[Tensor],
        *_inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.mailbox, ctx.columns = mailbox, columns
        ctx.set_materialize_grads(False)
        return tuple(map(stub, wholes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: OneNode = ctx.mailbox.pop(graph_task())
        given = {
            column: gradient
            for column, gradient in zip(ctx.columns, gradients, strict=True)
            if gradient is not None
        }
        wanted = [will_run(node) for node, _ in ctx.next_functions]
        if not given or not any(wanted):
            return (None, None, None, *[None] * len(wanted))
        found = call.backward(given, wanted)
        return (None, None, None, *found, *[None] * (len(wanted) - len(found)))


class _Result(torch.autograd.Function):
    """The node of one result. It saves the call, so torch frees that when it is done.

    Each result has one, so that backward may start from one and later from another.
    """

    @staticmethod
    def forward(ctx: Any, whole: list[Tensor], end: Tensor) -> Tensor:
        ctx.save_for_backward(end)
        ctx.set_materialize_grads(False)
        return whole[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        _ = ctx.saved_tensors  # which delivers the call to `_Core`
        return None, gradient


def _deliver(call: OneNode) -> Tensor:
    call.mailbox[graph_task()] = call
    return torch.empty(0)
