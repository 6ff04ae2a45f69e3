"""Random calls: trees of arguments, functions of their rows, dims, sizes, strategies.

A `Case` describes one call by plain values, so that hypothesis can print and shrink it,
and so that its tensors can be made afresh for every run. `Case.prepare` makes them.

Nothing here uses the library's own trees, plans or cuts: its walkers, paths and the
plain loop over chunks are a second opinion. The names of the strategies are all that is
taken from it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from chunkcheck import (
    ChunkStrategy,
    Fused,
    NoCheckpoint,
    NonReentrant,
    Reentrant,
    StrategyName,
    chunk_and_checkpoint,
    chunked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# ---------------------------------------------------------------------- containers


class Pair(NamedTuple):
    """A namedtuple of the caller's."""

    left: Any
    right: Any


@dataclass
class Record:
    """A dataclass that torch's registry knows."""

    first: Any
    second: Any


_pytree.register_pytree_node(
    Record,
    lambda record: ([record.first, record.second], None),
    lambda children, _: Record(*children),
    serialized_type_name="chunkcheck.tests.Record",
    flatten_with_keys_fn=lambda record: (
        [
            (_pytree.GetAttrKey("first"), record.first),
            (_pytree.GetAttrKey("second"), record.second),
        ],
        None,
    ),
)

Values: TypeAlias = torch.return_types.max  # a container that torch itself returns
MAPPINGS: tuple[type, ...] = (dict, OrderedDict, defaultdict)
CONTAINERS: tuple[type, ...] = (tuple, list, *MAPPINGS, deque, Pair, Record, Values)


def children(node: Any) -> list[tuple[str, Any, Any]] | None:
    """Return path step, key and child for each child of a container, else None."""
    kind = type(node)
    if kind in MAPPINGS:
        return [(f"[{key!r}]", key, child) for key, child in node.items()]
    if kind in (Pair, Record):
        names = [f.name for f in dataclasses.fields(Record)]
        names = list(Pair._fields) if kind is Pair else names
        return [(f".{name}", name, getattr(node, name)) for name in names]
    if kind in (tuple, list, deque, Values):
        return [(f"[{i}]", i, child) for i, child in enumerate(node)]
    return None


def rebuilt(node: Any, parts: Sequence[Any]) -> Any:
    """Return a container like `node` with other children."""
    kind = type(node)
    if kind is defaultdict:
        return defaultdict(node.default_factory, zip(node, parts, strict=True))
    if kind in MAPPINGS:
        return kind(zip(node, parts, strict=True))
    if kind is deque:
        return deque(parts, node.maxlen)
    return kind(*parts) if kind in (Pair, Record) else kind(parts)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf, in order."""
    inner = children(node)
    if inner is None:
        yield path, node
    for step, _, child in inner or ():
        yield from leaves(child, path + step)


def mapped(function: Callable[[Any], Any], node: Any) -> Any:
    """Return `node` in fresh containers, with `function` applied to every leaf."""
    inner = children(node)
    if inner is None:
        return function(node)
    return rebuilt(node, [mapped(function, child) for _, _, child in inner])


def vandalize(node: Any) -> None:
    """Empty every container that can be emptied."""
    for _, _, child in children(node) or ():
        vandalize(child)
    if type(node) in (*MAPPINGS, list, deque):
        node.clear()
    if type(node) is Record:
        node.first = node.second = None


# ----------------------------------------------------------------------- arguments

Layout = Literal[
    "contiguous", "offset", "strided", "expanded", "transposed", "channels_last"
]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)  # by how many dims they take
Grad = Literal["none", "leaf", "view", "history"]
DIFFERENTIABLE = (torch.float64, torch.float32, torch.complex128)
DTYPES = (*DIFFERENTIABLE, torch.int64, torch.bool)
SIZES = (2, 3, 5, 7, 1)


@dataclass(frozen=True)
class Array:
    """One tensor among the arguments. Equal ones are one tensor, passed twice."""

    key: int
    shape: tuple[int, ...]
    dim: int | None = 0  # where its rows are; None: passed whole
    written: int = 0  # the same dim as the caller writes it
    dtype: torch.dtype = torch.float64
    layout: Layout = "contiguous"
    axis: int = 0  # the expanded dim
    grad: Grad = "leaf"

    @property
    def rows(self) -> int | None:
        """How many rows it has."""
        return None if self.dim is None else self.shape[self.dim]

    def resized(self, rows: int) -> Array:
        """Return the same with another number of rows."""
        assert self.dim is not None
        shape = list(self.shape)
        shape[self.dim] = rows
        return dataclasses.replace(self, shape=tuple(shape))

    def make(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the tensor, and the leaf of the graph that its gradient goes to."""
        base = self._data(self._base_shape()).to(device)
        if self.grad == "leaf":
            leaf = self._view(base).detach().requires_grad_()
            return leaf, leaf
        if self.grad == "none":
            return self._view(base), None
        base.requires_grad_()
        return self._view(base if self.grad == "view" else base * 1.5 + 0.25), base

    def _data(self, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(self.key)
        if self.dtype == torch.int64:
            return torch.randint(-5, 6, shape, generator=generator)
        if self.dtype == torch.complex128:
            return torch.randn(shape, generator=generator, dtype=self.dtype)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        return normal > 0 if self.dtype == torch.bool else normal.to(self.dtype)

    def _base_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        match self.layout:
            case "transposed":
                shape[0], shape[-1] = shape[-1], shape[0]
            case "offset":
                shape = [3 + math.prod(shape)]
            case "strided":
                shape[-1] *= 2
            case "expanded":
                shape[self.axis] = 1
            case "channels_last":
                shape = [shape[0], shape[2], shape[3], shape[1]]
            case "contiguous":
                pass
        return tuple(shape)

    def _view(self, base: Tensor) -> Tensor:
        match self.layout:
            case "transposed":
                return base.transpose(0, -1)
            case "offset":
                return base[3:].view(self.shape)
            case "strided":
                return base[..., ::2]
            case "expanded":
                return base.expand(self.shape)
            case "channels_last":
                return base.permute(0, 3, 1, 2)
            case "contiguous":
                return base


CONSTANTS: tuple[object, ...] = (None, 3, "text", 2.5, True)


@st.composite
def arrays(
    draw: st.DrawFn, keys: Iterator[int], rows: int, common: int | None, cut: bool
) -> Array:
    """Draw a tensor with so many rows along `common`, or along any dim, if `cut`."""
    least = 1 if common is None else common + 1 if common >= 0 else -common
    ndim = draw(st.integers(least, 4))
    sizes = st.sampled_from(SIZES[: {4: 2, 3: 3}.get(ndim)])
    shape = draw(st.lists(sizes, min_size=ndim, max_size=ndim))
    written = common
    if written is None and cut:
        written = draw(st.sampled_from((*range(ndim), *range(-1, -1 - ndim, -1))))
    if written is not None:
        shape[written] = rows
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(LAYOUTS[: {1: 4, 4: 6}.get(ndim, 5)]))
    grads: tuple[Grad, ...] = ("leaf", "none", "view", "history")
    return Array(
        key=next(keys),
        shape=tuple(shape),
        dim=None if written is None else written % ndim,
        written=written or 0,
        dtype=dtype,
        layout=layout,
        axis=draw(st.integers(0, ndim - 1)) if layout == "expanded" else 0,
        grad=draw(st.sampled_from(grads)) if dtype in DIFFERENTIABLE else "none",
    )


def scalar(key: int) -> Array:
    """Return a 0-d tensor, which always passes whole."""
    return Array(key, (), dim=None)


@st.composite
def trees(draw: st.DrawFn, leaf: st.SearchStrategy[Any], depth: int = 2) -> Any:
    """Draw a tree of all kinds of containers, with leaves from `leaf`."""
    kind = draw(st.sampled_from((None, None, *CONTAINERS)) if depth else st.none())
    if kind is None:
        return draw(leaf)
    inner = trees(leaf, depth - 1)
    if kind in (Pair, Record):
        return kind(draw(inner), draw(inner))
    if kind is Values:
        return Values((draw(inner), draw(inner)))
    if kind not in MAPPINGS:
        parts = draw(st.lists(inner, max_size=3))
        return (
            deque(parts, draw(st.sampled_from((None, 5))))
            if kind is deque
            else (kind(parts))
        )
    keys = draw(st.lists(st.sampled_from(("b", "a", 7, 0)), max_size=3, unique=True))
    pairs = [(key, draw(inner)) for key in keys]
    return defaultdict(list, pairs) if kind is defaultdict else kind(pairs)


# ------------------------------------------------------------------------ programs

ROW_OPS: tuple[str, ...] = (
    *("scale", "same", "view", "mul_", "linear", "softmax", "sum", "outer", "gated"),
    *("layer_norm", "abs", "mixed", "max", "sort", "frozen_part"),
    *("argmax", "positive", "detached", "no_grad", "fresh", "constant"),
)
WHOLE_OPS: tuple[str, ...] = ("whole", "same_whole", "captured")
NOISE_OPS: tuple[str, ...] = ("dropout", "noise", "mixed_noise")


@dataclass(frozen=True)
class Output:
    """One tensor (or pair of them) of the result, computed from some arguments.

    Sources count the tensors among the arguments; the first one has all rows.
    """

    op: str
    sources: tuple[int, ...] = (0,)
    dim: int | None = 0  # where its rows go, as out_dim has it; None: it has none

    def arranged(self, rows_first: Tensor) -> Tensor:
        """Return a tensor with its rows where they belong."""
        assert self.dim is not None
        while rows_first.dim() < self.least:
            rows_first = rows_first.unsqueeze(-1)
        return rows_first.movedim(0, self.place(rows_first.dim()))

    @property
    def least(self) -> int:
        """How many dims it has at least."""
        assert self.dim is not None
        return self.dim + 1 if self.dim >= 0 else -self.dim

    def place(self, ndim: int) -> int:
        """Return the dim of the rows, from the start."""
        assert self.dim is not None
        return self.dim % ndim


@dataclass(frozen=True)
class Captures:
    """What `f` finds around it, as a description."""

    weight: bool = True  # whether the weight trains
    bias: bool = True
    root: bool = True
    history: bool = False  # whether the activation is computed from the root

    def make(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors, the leaves of the graph among them."""
        generator = torch.Generator().manual_seed(99)

        def normal(*shape: int) -> Tensor:
            data = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            return data.to(device)

        weight = torch.nn.Parameter(normal(128, 3), requires_grad=self.weight)
        bias = torch.nn.Parameter(normal(3), requires_grad=self.bias)
        root = normal(128).requires_grad_(self.root)
        made = {"weight": weight, "bias": bias, "root": root}
        return made | {"activation": root.sin() if self.history else root}


@dataclass(frozen=True)
class Program:
    """A function of trees that treats rows independently, as a description."""

    outputs: Any  # a tree of Output and constants
    captures: Captures = Captures()
    vandal: bool = False  # empties the containers that it is given
    reorders: bool = False  # the order of its dicts depends on the rows
    stop_after: int | None = None  # a call that raises

    def run(
        self,
        arrays: Sequence[Array],
        tensors: Sequence[Tensor],
        made: dict[str, Tensor],
    ) -> Any:
        """Return the result for these tensors, one for each of `arrays`."""

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Output):
                return leaf
            given = [(arrays[i], tensors[i]) for i in leaf.sources]
            return _compute(leaf, given, made)

        result = mapped(value, self.outputs)
        if self.reorders:
            full = next(
                as_rows(t, a.dim)
                for a, t in zip(arrays, tensors, strict=True)
                if a.dim is not None
            )
            if bool(full.detach().sum() > 0):
                result = _reordered(result)
        return result


def _reordered(node: Any) -> Any:
    inner = children(node)
    if inner is None:
        return node
    parts = [_reordered(child) for _, _, child in inner]
    if type(node) not in MAPPINGS:
        return rebuilt(node, parts)
    pairs = list(zip(node, parts, strict=True))[::-1]
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, pairs)
    return type(node)(pairs)


def as_rows(x: Tensor, dim: int) -> Tensor:
    """Return `x` as real numbers of shape (rows, features)."""
    x = x.movedim(dim, 0)
    return as_real(x.reshape(x.shape[0], math.prod(x.shape[1:])))


def as_real(x: Tensor) -> Tensor:
    """Return `x` as real numbers."""
    if x.is_complex():
        return x.real + 2 * x.imag
    return x if x.is_floating_point() else x.to(torch.float64)


def _factor(sources: Sequence[tuple[Array, Tensor]]) -> Tensor | float:
    """Return a number per row, or one row's for all, made of all sources."""
    total: Tensor | float = 1.0
    for array, tensor in sources:
        total = total + (
            as_real(tensor).mean().cos()
            if array.dim is None
            else as_rows(tensor, array.dim).mean(1, keepdim=True).cos()
        )
    return total


def _compute(
    out: Output, sources: Sequence[tuple[Array, Tensor]], made: dict[str, Tensor]
) -> Any:
    weight, bias, activation = made["weight"], made["bias"], made["activation"]
    array, x = sources[0]
    others = sources[1:]
    match out.op:
        case "whole":
            return as_real(x).sin() * _factor(others)
        case "same_whole":
            return x
        case "captured":
            return weight[:2].sin()
    assert array.dim is not None
    if out.op in ("scale", "same", "view"):
        match out.op:
            case "view":  # fails where the memory of `x` has gaps
                last = array.layout == "channels_last"
                y = x.permute(0, 2, 3, 1) if last else x
                y = (y.view(-1) * 2).view(y.shape)
                y = y.permute(0, 3, 1, 2) if last else y
            case "scale":
                y = x.sin() if x.dtype in DIFFERENTIABLE else x.logical_not()
            case _:
                y = x
        if y.dim() < out.least or array.dim != out.place(y.dim()):
            y = out.arranged(y.movedim(array.dim, 0))
        return y
    r = as_rows(x, array.dim)
    factor = _factor(others)
    n, k = r.shape
    distinct = r + torch.arange(k, device=r.device, dtype=r.dtype) * 1e-3
    match out.op:
        case "mul_":
            y = r * factor
            y.mul_(2).sin_()
        case "linear":
            y = torch.tanh(r @ weight[:k].to(r.dtype) + bias.to(r.dtype))
        case "softmax":
            y = (r * factor).softmax(1)
        case "sum":
            y = (r * factor).sum(1)
        case "abs":
            y = x.movedim(array.dim, 0).to(torch.complex128).abs() + 1
        case "outer":
            z = factor if isinstance(factor, Tensor) else bias
            z = z.reshape(-1, 1) if z.dim() != 1 else z[None]
            y = torch.einsum("na,nb->nab", r[:, :3], z.to(r.dtype))
        case "gated":
            y = r * activation[:k].to(r.dtype)
        case "layer_norm":
            y = torch.nn.functional.layer_norm(r, (k,), weight[:k, 0].to(r.dtype))
        case "argmax":
            y = distinct.argmax(1)
        case "positive":
            y = r > 0
        case "detached":
            y = (r * factor).detach()
        case "no_grad":
            with torch.no_grad():
                y = r.cos()
        case "frozen_part":
            y = r.detach() * weight[:k, 0].to(r.dtype)
        case "fresh":
            y = torch.zeros(n, 2, dtype=torch.float64, device=r.device)
        case "max":
            values, indices = distinct.max(1)
            return Values((out.arranged(values), out.arranged(indices)))
        case "sort":
            return Pair(*(out.arranged(v) for v in distinct.sort(1)))
        case "mixed":
            y = r * factor + bias[0].to(r.dtype)
        case "dropout":
            y = torch.nn.functional.dropout(r * factor, 0.5) * bias[0].to(r.dtype)
        case "noise":
            y = r * torch.rand_like(r)
        case "mixed_noise":
            y = (r + torch.randn(3, dtype=r.dtype, device=r.device).sum()).softmax(1)
        case _:
            raise AssertionError(out.op)
    return out.arranged(y)


# ---------------------------------------------------------------------- strategies


def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return contexts that do nothing."""
    return nullcontext(), nullcontext()


@dataclass(frozen=True)
class Mine:
    """A strategy of a user's own."""

    how: Literal["plain", "checkpoint", "twice"]

    def __call__(
        self, f: Callable[..., tuple[Tensor, ...]], /, *args: Tensor
    ) -> tuple[Tensor, ...]:
        """Run `f`."""
        if self.how == "checkpoint":
            result: tuple[Tensor, ...] = checkpoint(f, *args, use_reentrant=False)
            return result
        if self.how == "twice":
            with torch.no_grad():
                f(*args)
        return f(*args)


AnyStrategy: TypeAlias = (
    Fused | NonReentrant | Reentrant | NoCheckpoint | ChunkStrategy | StrategyName
)
# All but "grad_in_forward", which is for one reduced scalar.
NAMES: tuple[StrategyName, ...] = tuple(
    name for name in get_args(StrategyName) if name != "grad_in_forward"
)
REPLAYING: tuple[AnyStrategy, ...] = (
    *NAMES,
    Fused(keep_chunks=1, determinism_check="values"),
    Fused(preserve_python_rng_state=True, context_fn=contexts),
    NonReentrant(determinism_check="none"),
    NonReentrant(early_stop=False),
    NonReentrant(context_fn=contexts),
    Reentrant(),
    NoCheckpoint(),
    Mine("plain"),
    Mine("checkpoint"),
)
STRATEGIES: tuple[AnyStrategy, ...] = (
    *REPLAYING,
    Fused(preserve_rng_state=False, accumulate_dtype=torch.float64),
    NonReentrant(preserve_rng_state=False),
    Reentrant(preserve_rng_state=False),
    Mine("twice"),
)


def is_reentrant(strategy: AnyStrategy) -> bool:
    """Whether what torch's reentrant checkpoint cannot do raises under `strategy`."""
    return strategy == "reentrant" or isinstance(strategy, Reentrant)


# --------------------------------------------------------------------------- cases


@dataclass
class Prepared:
    """The tensors of one run, and `f`."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roots: dict[str, Tensor]  # the leaves of the graph, whose gradients count
    calls: Counter[str] = field(default_factory=Counter)  # filled by `f`

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments by path."""
        return {path: t for path, t in self.given if isinstance(t, Tensor)}

    @property
    def given(self) -> list[tuple[str, Any]]:
        """Path and value of every leaf of the arguments."""
        return [*leaves(self.args, "args"), *leaves(self.kwargs, "kwargs")]


@dataclass(frozen=True)
class Case:
    """One call, as a description."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    program: Program
    rows: int
    chunk_size: int | None
    batch_dim: Any
    out_dim: Any
    strategy: AnyStrategy
    named: int = 9  # so many positional parameters have names; the rest is *rest
    dropped: frozenset[int] = frozenset()  # results that backward does not start from
    by_grad: bool = False  # gradients by torch.autograd.grad instead of backward
    shared: int | None = None  # the dim that out_dim defaults to

    @property
    def given(self) -> list[tuple[str, Any]]:
        """Path and description of every leaf of the arguments."""
        return [*leaves(self.args, "args"), *leaves(self.kwargs, "kwargs")]

    @property
    def arrays(self) -> list[Array]:
        """The tensors among the arguments, in order."""
        return [leaf for _, leaf in self.given if isinstance(leaf, Array)]

    @property
    def cut(self) -> list[tuple[str, Array]]:
        """Path and description of the tensors that have a batch dim."""
        return [
            (path, leaf)
            for path, leaf in self.given
            if isinstance(leaf, Array) and leaf.dim is not None
        ]

    @property
    def outputs(self) -> list[Output]:
        """The computed leaves of the result."""
        return [o for _, o in leaves(self.program.outputs) if isinstance(o, Output)]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First row of each chunk, and the row after its last."""
        size = self.chunk_size or max(1, self.rows)
        starts = range(0, self.rows, size) or [0]
        return [(start, min(start + size, self.rows)) for start in starts]

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding may make."""
        return 1e-5 if any(a.dtype == torch.float32 for a in self.arrays) else 1e-10

    def replace(self, **changes: Any) -> Case:
        """Return another case."""
        return dataclasses.replace(self, **changes)

    def prepare(self, device: torch.device | None = None) -> Prepared:
        """Make the tensors of one run."""
        device = device or torch.device("cpu")
        made: dict[Array, Tensor] = {}
        captures = self.program.captures.make(device)
        roots = {k: t for k, t in captures.items() if t.is_leaf and t.requires_grad}

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Array) and leaf not in made:
                made[leaf], root = leaf.make(device)
                if root is not None:
                    roots[f"array {leaf.key}"] = root
            return made[leaf] if isinstance(leaf, Array) else leaf

        args, kwargs = mapped(tensor, self.args), mapped(tensor, self.kwargs)
        calls: Counter[str] = Counter()
        arrays, program = self.arrays, self.program

        def f(*args: Any, **kwargs: Any) -> Any:
            calls["f"] += 1
            values = [leaf for _, leaf in (*leaves(args), *leaves(kwargs))]
            if calls["f"] - 1 == program.stop_after:
                raise Interrupted(calls["f"])
            tensors = [value for value in values if isinstance(value, Tensor)]
            result = program.run(arrays, tensors, captures)
            if program.vandal:
                vandalize(args)
                vandalize(kwargs)
            return result

        f.__signature__ = self._signature()  # type: ignore[attr-defined]
        return Prepared(f, args, kwargs, roots, calls)

    def _signature(self) -> inspect.Signature:
        kinds = inspect.Parameter
        names = [f"p{i}" for i in range(min(self.named, len(self.args)))]
        parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in names]
        if self.named < len(self.args):
            parameters.append(kinds("rest", kinds.VAR_POSITIONAL))
        known = list(self.kwargs)[:1]  # the others arrive by **extra
        parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in known]
        return inspect.Signature([*parameters, kinds("extra", kinds.VAR_KEYWORD)])

    def call(self, run: Prepared, form: str = "shortest") -> Any:
        """Call the library, in the immediate form unless that cannot be or `form`."""
        options = {
            "chunk_size": self.chunk_size,
            "batch_dim": self.batch_dim,
            "out_dim": self.out_dim,
            "strategy": self.strategy,
        }
        if form == "curried" or run.kwargs:
            return chunked(run.f, **options)(*run.args, **run.kwargs)
        if form == "decorator":
            return functools.partial(chunked, **options)(run.f)(*run.args)
        return chunk_and_checkpoint(run.f, *run.args, **options)

    def loop(self, run: Prepared) -> Any:
        """Run the plain loop over the chunks and join its results, all by hand."""
        results = []
        by_id = {
            id(t): a
            for (_, a), (_, t) in zip(self.given, run.given, strict=True)
            if isinstance(t, Tensor)
        }
        for start, stop in self.chunks:

            def part(leaf: Any, start: int = start, stop: int = stop) -> Any:
                array = by_id.get(id(leaf)) if isinstance(leaf, Tensor) else None
                if array is None or array.rows != self.rows or array.dim is None:
                    return leaf
                return leaf.narrow(array.dim, start, stop - start)

            results.append(run.f(*mapped(part, run.args), **mapped(part, run.kwargs)))
        columns = [[leaf for _, leaf in leaves(result)] for result in results]
        joined: list[Any] = []
        dims = self._result_dims()
        for dim, *values in zip(dims, *columns, strict=True):
            joined.append(
                values[0]
                if dim is None
                else torch.cat(values, dim.place(values[0].dim()))
            )
        rest = iter(joined)
        return mapped(lambda _: next(rest), results[0])

    def _result_dims(self) -> list[Output | None]:
        """Return, for every leaf of the result, the output with its dim."""
        dims: list[Output | None] = []
        for _, leaf in leaves(self.program.outputs):
            joins = isinstance(leaf, Output) and leaf.dim is not None
            count = 2 if isinstance(leaf, Output) and leaf.op in ("max", "sort") else 1
            dims += [leaf if joins else None] * count
        return dims


class Interrupted(Exception):  # noqa: N818
    """What `f` raises where it is told to."""


def gap_free(array: Array) -> bool:
    """Whether `.view` works on the whole."""
    return array.layout in ("contiguous", "offset", "channels_last")


@st.composite
def outputs(
    draw: st.DrawFn,
    arrays: Sequence[Array],
    rows: int,
    dim: int | None,
    ops: Sequence[str],
) -> Any:
    """Draw a leaf of a result. `dim` is where all rows go, if they share that."""
    full = [i for i, a in enumerate(arrays) if a.rows == rows]
    whole = [i for i, a in enumerate(arrays) if a.dim is None]
    op = draw(st.sampled_from(ops))
    if op == "constant":
        return draw(st.sampled_from(CONSTANTS))
    if op in ("whole", "same_whole") and whole:
        return Output(op, (draw(st.sampled_from(whole)),), None)
    if op in WHOLE_OPS:
        return Output("captured", (0,), None)
    first = draw(st.sampled_from(full))
    if op == "view" and not gap_free(arrays[first]):
        op = "scale"
    rest = draw(st.lists(st.sampled_from(range(len(arrays))), max_size=2))
    chosen = draw(st.sampled_from((0, 1, -1, 2, -2, -3))) if dim is None else dim
    return Output(op, (first, *rest), chosen)


@st.composite
def prefixes(
    draw: st.DrawFn, node: Any, dim_of: Callable[[Any], Any], top: bool = False
) -> Any:
    """Draw a prefix that says `dim_of(leaf)` for every leaf of `node`.

    `dim_of` returns "any" for a leaf where everything but an int at the very leaf is
    allowed. With `top` the result is not shorter than one entry per child.
    """
    inner = children(node)
    if inner is None:
        dim = dim_of(node)
        return None if dim == "any" else dim
    found = {dim_of(leaf) for _, leaf in leaves(node)} - {"any"}
    if not top and len(found) <= 1 and draw(st.booleans()):
        return found.pop() if found else draw(st.sampled_from((None, 0)))
    parts = [draw(prefixes(child, dim_of)) for _, _, child in inner]
    keys = [key for _, key, _ in inner]
    by_key = type(node) in MAPPINGS
    if type(node) in (Pair, Record):
        by_key = draw(st.booleans())
    if by_key:
        pairs = list(zip(keys, parts, strict=True))
        return dict(pairs[::-1] if draw(st.booleans()) else pairs)
    return tuple(parts) if top or draw(st.booleans()) else parts


def _batch_dim_of(leaf: Any) -> Any:
    if not isinstance(leaf, Array) or not leaf.shape:
        return "any"
    return None if leaf.dim is None else leaf.written


def _out_dim_of(leaf: Any) -> Any:
    # max and sort give two leaves each, so that no entry stands at the very leaf.
    if not isinstance(leaf, Output):
        return "any"
    if leaf.dim is None:
        return None
    return leaf.dim


Mode = Literal["int", "tuple", "mapping"]


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    strategies: Sequence[AnyStrategy] = STRATEGIES,
    ops: Sequence[str] = (*ROW_OPS, *WHOLE_OPS),
    min_rows: int = 0,
    keywords: bool = True,
    vandals: bool = True,
    out: Literal["right", "default"] = "right",
) -> Case:
    """Draw a case.

    Args:
        draw: Hypothesis's own.
        strategies: What to draw the strategy from.
        ops: What the results are drawn from.
        min_rows: The smallest batch.
        keywords: Whether some calls have keyword arguments.
        vandals: Whether some programs empty their containers and reorder their dicts.
        out: "right": `out_dim` is left out only where the library must find the right
            dim; "default": it is left out, and the rows are anywhere in the result.

    """
    mode: Mode = draw(st.sampled_from(("int", "tuple", "mapping")))
    rows = draw(st.integers(min_rows, 11))
    common = draw(st.sampled_from((0, 1, -1, 2, -2))) if mode == "int" else None
    args, kwargs = draw(_arguments(mode, rows, common, keywords))
    given = [a for _, a in leaves((args, kwargs)) if isinstance(a, Array)]
    named = draw(st.integers(0, len(args))) if mode == "mapping" else 9
    batch_dim: Any = common
    if mode == "tuple":
        batch_dim = draw(prefixes(args, _batch_dim_of, top=True))
    if mode == "mapping":
        parts = {f"p{i}": arg for i, arg in enumerate(args[:named])}
        if named < len(args):
            parts["rest"] = args[named:]
        parts |= kwargs
        batch_dim = {
            name: draw(prefixes(part, _batch_dim_of))
            for name, part in parts.items()
            if any(_batch_dim_of(a) != "any" for _, a in leaves(part))
            or draw(st.booleans())
        }

    several = st.integers(1, max(1, rows - 1))
    chunk_size = draw(several | several | st.integers(1, 13) | st.none())
    shared = _shared_dim(given, rows)
    out_dim: Any = "auto"
    if out == "default":
        dim = None
        ops = tuple(op for op in ops if op not in WHOLE_OPS)
    elif (
        shared is None
        or _unsure(shared, rows, chunk_size, given)
        or draw(st.booleans())
    ):
        dim, out_dim = None, None
    else:
        dim = shared
        ops = tuple(op for op in ops if op not in WHOLE_OPS)
    tree = draw(trees(outputs(given, rows, dim, ops)))
    if out_dim is None:
        out_dim = draw(prefixes(tree, _out_dim_of))

    strategy = draw(st.sampled_from(strategies))
    captures = Captures(
        weight=draw(st.booleans()),
        bias=draw(st.booleans()),
        root=draw(st.booleans()),
        history=draw(st.booleans()) and not is_reentrant(strategy),
    )
    vandal = vandals and draw(st.booleans())
    reorders = vandals and draw(st.booleans())
    return Case(
        args=args,
        kwargs=kwargs,
        program=Program(tree, captures, vandal, reorders),
        rows=rows,
        chunk_size=chunk_size,
        batch_dim=batch_dim,
        out_dim=out_dim,
        strategy=strategy,
        named=named,
        dropped=draw(st.frozensets(st.integers(0, 3), max_size=2)),
        by_grad=draw(st.booleans()) and not is_reentrant(strategy),
        shared=shared,
    )


@st.composite
def _arguments(
    draw: st.DrawFn, mode: Mode, rows: int, common: int | None, keywords: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    keys = itertools.count(1)
    seen: list[Array] = []
    kinds = ["cut", "cut", "one", "scalar", "constant", "again"]
    if mode != "int":
        kinds.append("whole")

    @st.composite
    def leaf(draw: st.DrawFn) -> Any:
        kind = draw(st.sampled_from(kinds))
        if kind == "constant":
            return draw(st.sampled_from(CONSTANTS))
        if kind == "again" and seen:
            return draw(st.sampled_from(seen))
        if kind == "scalar":
            return scalar(next(keys))
        count = 1 if kind == "one" and rows > 1 else rows
        seen.append(draw(arrays(keys, count, common, kind != "whole")))
        return seen[-1]

    args = tuple(draw(st.lists(trees(leaf()), min_size=1, max_size=3)))
    kwargs: dict[str, Any] = {}
    if keywords:
        value = trees(leaf()) if mode != "tuple" else st.sampled_from(CONSTANTS)
        names = draw(st.lists(st.sampled_from("xyz"), max_size=2, unique=True))
        kwargs = {name: draw(value) for name in names}
    given = [a for _, a in leaves((args, kwargs)) if isinstance(a, Array)]
    if all(a.rows != rows for a in given):
        args = (*args, draw(arrays(keys, rows, common, True)))
    return args, kwargs


def _unsure(
    dim: int, rows: int, chunk_size: int | None, arrays: Sequence[Array]
) -> bool:
    """Whether the contract allows the library to ask for `out_dim`."""
    if chunk_size is None or chunk_size >= rows:
        return False
    return (dim != 0 and rows % chunk_size == 0) or (
        chunk_size == 1 and any(a.rows == 1 for a in arrays)
    )


def _shared_dim(arrays: Sequence[Array], rows: int) -> int | None:
    """Return the dim that all chunked tensors share, as the library's contract says."""
    cut = [a for a in arrays if a.rows == rows]
    written = {a.written for a in cut}
    if len(written) == 1:
        return written.pop()
    dims = {a.dim for a in cut}
    return dims.pop() if len(dims) == 1 else None
