"""The general engine: every chunk keeps its place in torch's own graph.

Saved-tensor hooks keep a handle for each tensor that a chunk saves for backward. Its
first use runs the chunk again and fills the handles that are left. Nothing that `f`
captures need be known for a right gradient, since torch itself connects it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from chunkcheck._strategies import Fused
from chunkcheck._torch.captures import (
    Borders,
    Observed,
    alive,
    borders,
    stamp,
)
from chunkcheck._torch.chunks import Chunks
from chunkcheck._torch.compat import (
    current_node,
    graph_task,
    is_tracing,
    next_number,
    number,
    version,
)
from chunkcheck._torch.cuts import Apart, InPlace
from chunkcheck._torch.replay import Replay
from chunkcheck._torch.results import Results
from chunkcheck._torch.saved import Saved
from chunkcheck._torch.suited import check_unchunked
from chunkcheck._torch.tape import OTHER_GRAPH, nodes_since, requiring


class OwnGraph:
    """One call, as recompute needs it. The handles of its chunks hold it.

    Args:
        options: Those of the strategy.
        chunks: The call.
        tensors: Its tensors, in the order of `chunks`.
        results: Where the results are put.
        replay: What recompute sees again.

    """

    def __init__(
        self,
        options: Fused,
        chunks: Chunks,
        tensors: Sequence[Tensor],
        results: Results,
        replay: Replay,
    ) -> None:
        self.options = options
        self.chunks = chunks
        self.results = results
        self.replay = replay
        self._saved = Saved(tensors, chunks.path)
        self._require = [t.requires_grad for t in tensors]
        self.first = next_number()  # older nodes are those of captured tensors
        self._apart: tuple[int, Apart] | None = None
        # The frames that hold what has been recomputed: one, or one for each device,
        # since the chunks of each follow one another.
        devices = {t.device for t in tensors}
        self._filled: deque[weakref.ref[_Frame]] = deque(maxlen=len(devices))

    def run(self, tensors: Sequence[Tensor]) -> object:
        """Return the result of all chunks."""
        plan, results = self.chunks.plan, self.results
        cut = InPlace(self.chunks, tensors, self.options.accumulate_dtype)
        for chunk in range(len(plan)):
            given = cut.given(chunk)
            frame = _Frame(self, chunk)
            keep = chunk >= len(plan) - self.options.keep_chunks
            first = next_number()
            with nullcontext() if keep else saved_tensors_hooks(frame.pack, _unpack):
                tree, values = self.replay.run(self.chunks.run, chunk, given)
            values = results.accept(tree, values, chunk)
            if chunk == 0:
                path, count = self.chunks.path, len(self.chunks.dims)
                check_unchunked(results.unchunked(values), given, first, path, count)
            made = nodes_since(first)
            frame.close(borders(requiring(values), given, first), made)
            results.put(values, chunk)
        self.replay.finish()
        return results.rebuilt(results.join(tensors))

    def fill(self, frame: _Frame) -> None:
        """Note that a frame is to be filled, and empty the one whose turn is over.

        That one's backward may not have needed all that its chunk had saved.
        """
        if len(self._filled) == self._filled.maxlen:
            oldest = self._filled[0]()
            if oldest is not None and oldest is not frame:
                oldest.empty()
        self._filled.append(weakref.ref(frame))

    def apart(self) -> Apart:
        """Return the tensors for recompute, unpacked once in each backward."""
        task = graph_task()
        if self._apart is None or self._apart[0] != task:
            tensors = self._saved.tensors()
            self._apart = task, Apart(self.chunks, tensors, self._require)
        return self._apart[1]


class _Handle:
    """Stands in the graph for one tensor that a chunk saved."""

    __slots__ = (
        *("__weakref__", "dtype", "frame", "index"),
        *("shape", "value", "version"),
    )

    def __init__(self, frame: _Frame, index: int, tensor: Tensor) -> None:
        self.frame = frame
        self.index = index
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.value: Tensor | None = None  # not yet used
        self.version: int | None = None  # of the value, when it was saved

    def keep(self, tensor: Tensor) -> None:
        """Hold the value."""
        # Detached: a tensor that its own node saves would never be freed.
        self.value, self.version = tensor.detach(), version(tensor)

    def taken(self, *, leave: bool) -> Tensor | None:
        """Return the value if it is there, and let go of it unless it is to be left.

        Raises:
            RuntimeError: `f` has written to it after it was saved.

        """
        value = self.value
        if value is not None and version(value) != self.version:
            raise RuntimeError(
                f"{self}, which is needed for gradient computation, has been modified"
                " by an inplace operation of f after it was saved for backward: f must"
                " not change it in place"
            )
        if not leave:
            self.value = None
        return value

    def __str__(self) -> str:
        return f"a tensor of {self.dtype} and shape {tuple(self.shape)}"


class _Frame:
    """What one chunk saved. Only handles hold it, and it holds none of them."""

    __slots__ = (
        *("__weakref__", "_call", "_chunk", "_given", "_handles"),
        *("_leaves", "_made", "_older", "_open", "_recent", "_watched"),
    )

    def __init__(self, call: OwnGraph, chunk: int) -> None:
        self._call = call
        self._chunk = chunk
        self._handles: list[weakref.ref[_Handle]] = []
        self._watched: Observed = []
        self._recent: tuple[int | None, dict[int, Tensor]] = None, {}
        self._open = True  # the first run has not ended
        self._made = 0  # how many nodes it made
        self._given: set[int] = set()  # which of the tensors the chunk used
        # Both as a walk meets them, that is, where in the graph they are.
        self._leaves: list[int] = []  # the ids of those in its graph
        self._older: list[int] = []  # the numbers of nodes that its graph ends in

    @property
    def count(self) -> int:
        """The number of tensors that the chunk saved."""
        return len(self._handles)

    def close(self, found: Borders | None, made: int) -> None:
        """End the first run: take down where its graph ends, and let go of values.

        Args:
            found: Where it ends.
            made: How many nodes the run made.

        """
        self._open = False
        self._made = made
        self.empty()
        if found is not None:
            self._given, self._older = found.given, found.older
            self._leaves = [id(leaf) for leaf in found.leaves]
            self._watched += [(weakref.ref(leaf), stamp(leaf)) for leaf in found.leaves]

    def pack(self, tensor: Tensor) -> _Handle | Tensor:
        """Keep a handle instead of `tensor`."""
        if is_tracing():
            return tensor
        node, first = tensor.grad_fn, self._call.first
        if node is None or (first is not None and number(node) < first):
            # Perhaps captured: it is, if it outlives the chunk.
            self._watched.append((weakref.ref(tensor), stamp(tensor)))
        handle = _Handle(self, len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        if self._open:  # until the run ends, since `f` may call autograd itself
            handle.keep(tensor)
        return handle

    def empty(self) -> None:
        """Let go of all values."""
        self._recent = None, {}
        for ref in self._handles:
            if (handle := ref()) is not None:
                handle.value = None

    def unpack(self, handle: _Handle) -> Tensor:
        """Return the tensor of a handle, which then is the caller's to keep.

        A node may ask twice, as a custom Function does that reads its saved tensors one
        by one, so what the same node has asked for is there until another one asks.
        """
        node = current_node()
        # By its number, since the node itself would hold what it has saved.
        asking = None if node is None or self._call.first is None else number(node)
        if asking is None or asking != self._recent[0]:
            self._recent = asking, {}
        recent = self._recent[1]
        value = handle.taken(leave=self._open)
        if value is None:
            value = recent.get(handle.index)
        if value is None:
            value, unknown = self._recompute(handle.index)
            for _ in alive(unknown):  # not one that `f` makes and drops in each run
                raise self._call.results.differs(self._chunk, OTHER_GRAPH)
        if asking is not None:
            recent[handle.index] = value
        return value

    def _recompute(self, wanted: int) -> tuple[Tensor, list[weakref.ref[Tensor]]]:
        """Run the chunk again and fill all handles.

        Returns:
            The value of one of them, and the leaves that forward did not see.

        """
        call, chunk = self._call, self._chunk
        call.replay.check_unchanged(self._watched, call.chunks.f)
        call.fill(self)
        given = call.apart().given(chunk)
        again = _Frame(call, chunk)  # whose handles say how much they have in common
        values: dict[int, _Handle] = {}

        def keep(tensor: Tensor) -> _Handle | Tensor:
            index = again.count
            packed = again.pack(tensor)
            live = index < self.count and self._handles[index]() is not None
            if live and isinstance(packed, _Handle):
                values[index] = packed
            return packed

        differs = call.replay.differs()
        first = next_number()
        with (
            torch.enable_grad(),
            call.replay.again(call.replay.records[chunk], differs=differs),
            saved_tensors_hooks(keep, _unpack),
        ):
            tree, results = call.chunks.run(chunk, given)
        same = nodes_since(first) == self._made
        results = call.results.check_again(tree, results, chunk)
        graph = borders(requiring(results), given, first)
        unknown = self._check_graph(graph, same=same)
        call.replay.check_unchanged(self._watched, call.chunks.f)
        if again.count != self.count:
            how = f"saved {again.count} tensors for backward, forward {self.count}"
            raise call.results.differs(chunk, how)
        for index, new in values.items():
            handle = self._handles[index]()
            if handle is None:
                continue
            if (handle.shape, handle.dtype) != (new.shape, new.dtype):
                how = f"saved {new} for backward, forward {handle}"
                raise call.results.differs(chunk, how)
            handle.value, handle.version = new.value, new.version
        found = self._handles[wanted]()
        value = None if found is None else found.taken(leave=False)
        if value is None:
            raise call.results.differs(chunk, "did not save what backward needs")
        return value, unknown

    def _check_graph(
        self, found: Borders | None, *, same: bool
    ) -> list[weakref.ref[Tensor]]:
        """Check where the graph of a recompute ends, and return its unknown leaves.

        Args:
            found: Where it ends.
            same: Whether it has as many nodes. Else a compiler may have made another
                graph of the same, whose ends come in another order.

        """
        if found is None:
            return []
        known = set(self._leaves)
        unknown = [weakref.ref(leaf) for leaf in found.leaves if id(leaf) not in known]
        here = list(map(id, found.leaves))
        # Of those that `f` makes, each run makes others.
        both = known.intersection(here)
        before, now = ([i for i in ids if i in both] for ids in (self._leaves, here))
        in_order = list if same else sorted
        if (
            found.given != self._given
            or len(here) != len(self._leaves)
            or in_order(now) != in_order(before)
            or in_order(found.older) != in_order(self._older)
        ):
            raise self._call.results.differs(self._chunk, OTHER_GRAPH)
        return unknown


def _unpack(packed: _Handle | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.frame.unpack(packed)
