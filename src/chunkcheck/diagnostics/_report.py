"""Report: what runs of a function give and leave behind, how that differs and reads.

Knows tensors and Python objects. Knows nothing of chunks, nor how anything is run.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from chunkcheck._tree import LEAF, Tree, equal

# fmt: off
Cause: TypeAlias = Literal[
    "rows_mix", "wrong_length", "wrong_dim", "cut_whole", "only_first", "reduction",
    "randomness", "buffers", "recompute", "grows", "in_place", "lost_gradient", "error",
    "unexplained",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why chunking is not right for a function.

    Attributes:
        cause: A short key, such as `"rows_mix"`.
        message: What was seen, with paths such as `result['loss']`.
        remedy: What to do.
    """

    cause: Cause
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.message}. {self.remedy}."


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found: true in a boolean context when all is well.

    Attributes:
        findings: What is wrong, each with its cause; empty when all is well.
        name: The name of the function.
        results: The number of tensors in its result.
        gradients: The number of gradients that plain `f` gives.
        difference: The largest difference between what was compared and found equal,
            relative to the largest entry of its tensor.
        with_plain: Whether the values of plain `f` were compared. Where `f` is random
            or updates buffers, those of the loop over the chunks are the right ones.
    """

    findings: tuple[Finding, ...]
    name: str
    results: int
    gradients: int
    difference: float
    with_plain: bool

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.findings:
            head = f"chunking is not right for {self.name}:"
            return "\n\n".join([head, *(f"- {finding}" for finding in self.findings)])
        size = f"to {self.difference:.0e}" if self.difference else "exactly"
        counts = f"{_count(self.results, 'result')} and " + _count(
            self.gradients, "gradient"
        )
        if self.with_plain:
            return (
                f"chunking is right for {self.name}: {counts} of plain f, loop and"
                f" chunks agree {size}"
            )
        return (
            f"chunking is right for {self.name}: {counts} of loop and chunks agree"
            f" {size} (plain f has other random numbers or buffers)"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


@dataclass(slots=True)
class Seen:
    """What one run of a call gave and left behind."""

    tree: Tree = LEAF
    paths: tuple[str, ...] = ()
    values: list[object] = field(default_factory=list)  # tensors are copies
    requires_grad: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)  # buffers and constants
    random: dict[str, object] = field(default_factory=dict)  # states, after backward
    moved: list[str] = field(default_factory=list)  # which of these moved in forward
    written: list[str] = field(default_factory=list)  # paths of arguments


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs differ, and by how much."""

    name: str  # of a result or of what the gradient belongs to
    index: int | None  # of the result's leaf; None: a gradient
    off: float
    scale: float  # the largest entry expected

    @property
    def relative(self) -> float:
        """The difference relative to the largest entry."""
        return self.off / self.scale if self.scale else math.inf

    def __str__(self) -> str:
        what = self.name if self.index is not None else f"the gradient of {self.name}"
        if math.isinf(self.off):
            return f"{what} differs"
        return (
            f"{what} differs by {self.off:.2g} where entries go up to {self.scale:.2g}"
        )


def distance(found: object, expected: object) -> tuple[float, float]:
    """Return how far two leaves are apart at most, and the largest entry expected.

    Values that are no numbers, and tensors of other shapes, are infinitely far apart;
    NaN equals NaN.
    """
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        known = isinstance(expected, int | float | complex | str | bytes | None)
        same = type(found) is type(expected) and (equal(found, expected) or not known)
        return (0.0 if same else math.inf), 0.0
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, 0.0
    if not expected.numel() or expected.is_meta or expected.is_nested:
        return 0.0, 0.0
    got, want = _wide(found), _wide(expected)
    alike = got.eq(want) | (got.isnan() & want.isnan())
    off = torch.where(alike, 0.0, (got - want).abs())
    size = want.abs()
    scale = torch.where(size.isfinite(), size, 0.0).max().item()
    worst = off.nan_to_num(math.inf, math.inf).max().item()
    exact = not (expected.is_floating_point() or expected.is_complex())
    return (math.inf if exact and worst else worst), scale


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def distances(found: Seen, expected: Seen) -> Iterator[tuple[Difference, torch.dtype]]:
    """Yield how far apart each leaf and each gradient of two runs are.

    Only what both have is compared.
    """
    pairs = zip(found.paths, found.values, expected.values, strict=False)
    for index, (path, got, want) in enumerate(pairs):
        yield Difference(path, index, *distance(got, want)), _dtype(want)
    for name, wanted in expected.gradients.items():
        given = found.gradients.get(name)
        if wanted is not None and given is not None:
            yield Difference(name, None, *distance(given, wanted)), wanted.dtype


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.float64


def rtol_of(dtype: torch.dtype) -> float:
    """Return how far two values may be apart, relative to the largest entry."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    return 1e-10 if eps < 1e-12 else 1e-5 if eps < 1e-6 else 2e-2


def leaf(tensor: Tensor, noise: float = 0.0) -> Tensor:
    """Return a leaf in the same memory, or one with relative noise in another."""
    found = tensor.detach()
    if noise and (tensor.is_floating_point() or tensor.is_complex()):
        found = found + noise * found * cotangent(found.abs(), 0, 0)
    return found.requires_grad_(tensor.requires_grad)


def cotangent(tensor: Tensor, index: int, noise: float) -> Tensor:
    """Return a random gradient for a result, the same at each call."""
    generator = torch.Generator().manual_seed(index)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found = torch.randn(tensor.shape, generator=generator, dtype=wide)
    found = found * (1 + noise * torch.randn(found.shape, generator=generator))
    return found.to(tensor.device, tensor.dtype)


def graph_leaves(results: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward from `results` gives gradients to."""
    nodes = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # which grows as we go
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                nodes.append(other)
    return [v for n in nodes if (v := getattr(n, "variable", None)) is not None]


_MOST_OBJECTS = 8000
_LIBRARIES = frozenset({"torch", "numpy", "chunkcheck", *sys.stdlib_module_names})


class _Held(NamedTuple):
    """Something that holds other things by key, and how to set it back."""

    path: str  # with a place for the key
    values: dict[Any, Any]
    put: Callable[[dict[Any, Any]], object]
    grows: bool = False  # whether it means anything that it holds more


class Carried:
    """What a callable carries in Python from one run to the next.

    Lists, dicts, attributes, cells, globals and generators of random numbers, as far as
    they are found by following what objects hold and functions name, but not through
    classes and libraries.
    """

    def __init__(self, **roots: object) -> None:
        self._roots = roots
        self.random: dict[str, tuple[_Get, _Set]] = {}
        self._before = [(held, dict(held.values)) for held in self._walk()]
        self._drawn = {name: get() for name, (get, _) in self.random.items()}

    def now(self) -> dict[str, object]:
        """Return lengths, shapes and plain values, by path."""
        found: dict[str, object] = {}
        for held in self._walk():
            if held.grows:
                found[held.path.partition("[{")[0]] = (len(held.values),)
            for key, value in held.values.items():
                if isinstance(value, Tensor):
                    found[held.path.format(key)] = tuple(value.shape)
                elif isinstance(value, int | float | str | None):
                    found[held.path.format(key)] = value
        return found

    def restore(self, *, only_random: bool = False) -> None:
        """Set all back to what it was at the start."""
        for name, state in self._drawn.items():
            self.random[name][1](state)
        for held, values in () if only_random else self._before:
            held.put(values)

    def _walk(self) -> Iterator[_Held]:
        """Yield all that holds something, nearest first."""
        queue: deque[tuple[str, Any]] = deque(self._roots.items())
        seen: dict[int, object] = {}
        while queue and len(seen) < _MOST_OBJECTS:
            path, value = queue.popleft()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if type(value) is random.Random:
                source: tuple[_Get, _Set] = (value.getstate, value.setstate)
                self.random.setdefault(f"the random.Random {path}", source)
            elif type(value).__module__ == "numpy.random._generator":
                source = _of_numpy(value.bit_generator)
                self.random.setdefault(f"the NumPy Generator {path}", source)
            for held in _inside(path.replace("{", "{{").replace("}", "}}"), value):
                yield held
                queue += [(held.path.format(k), v) for k, v in held.values.items()]


_Get: TypeAlias = Callable[[], object]
_Set: TypeAlias = Callable[[Any], object]


def _of_numpy(bits: Any) -> tuple[_Get, _Set]:
    return lambda: deepcopy(bits.state), lambda state: setattr(bits, "state", state)


def _inside(path: str, value: Any) -> Iterator[_Held]:
    if isinstance(value, types.FunctionType):
        if not _is_library(value.__module__):
            space, names = value.__globals__, value.__code__.co_freevars
            used = {k: space[k] for k in _named(value.__code__) if k in space}
            yield _Held("{}", used, space.update)
            cells = dict(zip(names, value.__closure__ or (), strict=True))
            known = {k: cell.cell_contents for k, cell in cells.items() if _full(cell)}
            yield _Held("{}", known, lambda d: _fill(cells, d))
    elif isinstance(value, dict):
        yield _Held(path + "[{!r}]", value, lambda d: _refill(value, d), grows=True)
    elif isinstance(value, list | deque):
        items = dict(enumerate(value))
        put = functools.partial(_put_items, value)
        yield _Held(path + "[{}]", items, put, grows=True)
    elif isinstance(value, tuple):
        yield _Held(path + "[{}]", dict(enumerate(value)), bool)
    elif isinstance(value, types.MethodType | functools.partial):
        names = ("__self__", "__func__", "func", "args", "keywords")
        yield _Held(path, {k: getattr(value, k, None) for k in names}, bool)
    elif hasattr(value, "__dict__") and (
        isinstance(value, nn.Module)
        or not (_is_library(type(value).__module__) or isinstance(value, _NO_STATE))
    ):
        own = vars(value)
        yield _Held(path + ".{}", own, lambda d: _refill(own, d))
        names = ("forward", "__call__")
        yield _Held(path, {k: getattr(type(value), k, None) for k in names}, bool)


_NO_STATE = (type, types.ModuleType, Tensor)


def _full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _fill(cells: Mapping[str, types.CellType], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        cells[name].cell_contents = value


def _put_items(holder: Any, values: Mapping[int, object]) -> None:
    if len(holder) != len(values) or any(holder[i] is not v for i, v in values.items()):
        holder.clear()
        holder.extend(values.values())


def _refill(holder: dict[Any, Any], values: Mapping[Any, object]) -> None:
    if holder.keys() != values.keys() or any(
        holder[k] is not values[k] for k in values
    ):
        holder.clear()
        holder.update(values)


def _named(code: types.CodeType) -> list[str]:
    inner = [_named(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for names in inner for name in names)]


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES
