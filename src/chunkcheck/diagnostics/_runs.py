"""Runs: trial runs of one call, each from the same state and without a trace.

Knows how a call is cut and run in chunks. Knows nothing of what is looked for.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chunkcheck._api import chunked, planned
from chunkcheck._arguments import Call
from chunkcheck._plan import Plan, checked_size
from chunkcheck._strategies import Strategy, StrategyName, resolve_strategy
from chunkcheck._torch.compat import version
from chunkcheck._torch.reach import reach
from chunkcheck._torch.replay import LARGEST_BUFFER
from chunkcheck._torch.tensors import is_tensor
from chunkcheck._torch.untouched import untouched
from chunkcheck._tree import flatten, unflatten
from chunkcheck._typing import BatchDim, OutDim
from chunkcheck.diagnostics._report import (
    Carried,
    Difference,
    Seen,
    cotangent,
    distance,
    distances,
    graph_leaves,
    leaf,
    rtol_of,
)


class Trial:
    """Runs of one call, each from the same state and without a trace."""

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: tuple[int, BatchDim, OutDim, Strategy | StrategyName],
        rows: int | None,
        tolerances: tuple[float | None, float | None],
    ) -> None:
        self.f = f
        self.size, self.batch_dim, self.out_dim, strategy = options
        self.strategy = resolve_strategy(strategy)
        self.values: list[Any]
        self.call: Call
        self.plan: Plan
        checked_size(self.size)  # no policy, which would choose one for each run
        how = self.size, self.batch_dim, self.out_dim
        self.call, self.values, self.plan = planned(f, args, kwargs, *how)
        if rows is not None:
            sample = self.cut(0, min(checked_size(rows) or 1, self.plan.rows))
            args, kwargs = self._rebuilt(sample)
            self.call, self.values, self.plan = planned(f, args, kwargs, *how)
        if len(self.plan) < 2:
            raise ValueError(
                f"chunk_size={self.size!r} makes one chunk of the {self.plan.rows} rows"
                " of the sample, which cannot show whether rows are independent: give a"
                " smaller chunk_size or more rows"
            )
        self.reached = reach(f, *self.values)
        self.carried = Carried(f=f, args=list(self.values))
        self._names: dict[int, str] = {}
        for module in self.reached.modules:
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                self._names.setdefault(id(t), f"{type(module).__name__}.{name}")
        found = self.reached.tensors
        self._captured = [(t, t.grad) for t in found if t.is_leaf and t.requires_grad]
        constants = [t for t in found if not t.requires_grad]
        self._constants = [
            t
            for t in constants
            if t.nbytes < LARGEST_BUFFER and t.layout == torch.strided
        ]
        kept = [*self._constants, *filter(is_tensor, self.values)]
        self._kept = [(t, t.detach().clone()) for t in kept]
        self._rtol, self._atol = tolerances
        self._lowest: torch.dtype | None = None  # that f computes in, once it matters
        self._floor: dict[str, float] = {}
        self.largest = 0.0
        before = self._state()
        self.plain = Seen()
        self.plain = self.run(self.call.invoke)
        self.updated = [
            name
            for name, now in self.plain.state.items()
            if distance(now, before.get(name))[0]
        ]
        self.exact = not (self.updated or self.plain.moved)

    def cut(self, start: int, stop: int) -> list[Any]:
        """Return the leaves of the arguments with these rows of what is cut."""
        pairs: Any = zip(self.values, self.plan.dims, strict=True)
        return [v if d is None else v.narrow(d, start, stop - start) for v, d in pairs]

    def chunk(self, index: int) -> Seen:
        """Run plain `f` on one chunk, from the state before the first."""
        values = self.cut(*self.plan.bounds(index))
        return self.run(self.call.invoke, values, backward=False)

    def chunks(
        self, strategy: Strategy | StrategyName, whole: int | None = None
    ) -> Seen | Exception:
        """Run the chunked call, and return the error if there is one.

        Args:
            strategy: The strategy.
            whole: A leaf that passes whole even if it is cut otherwise.

        """
        options: Any = {"out_dim": self.out_dim, "strategy": strategy}

        def call(values: list[object]) -> object:
            if whole is None:
                run = chunked(self.f, chunk_size=self.size, **options, **dims)
                args, kwargs = self._rebuilt(values)
                return run(*args, **kwargs)
            run = chunked(flat, chunk_size=self.size, **options, **dims)
            return run(*values)

        def flat(*values: object) -> object:
            return self.call.invoke(values)

        dims: Any = {"batch_dim": self.batch_dim}
        if whole is not None:
            given = enumerate(self.plan.dims)
            dims = {"batch_dim": tuple(None if i == whole else d for i, d in given)}
        try:
            return self.run(call)
        except Exception as error:  # noqa: BLE001  any error of the chunked call
            return error

    def _rebuilt(self, values: Sequence[object]) -> tuple[Any, Any]:
        rest = iter(values)
        return unflatten(self.call.args, rest), unflatten(self.call.kwargs, rest)

    def run(
        self,
        how: Callable[[list[Any]], object],
        values: list[Any] | None = None,
        *,
        backward: bool = True,
        carry: bool = False,
        noise: float = 0.0,
    ) -> Seen:
        """Run a call and say what it gave and left behind, and set all back.

        Args:
            how: The call, given the leaves of the arguments.
            values: These leaves, if not those of the sample.
            backward: Whether to run backward as well.
            carry: Leave what `f` holds in Python as earlier runs left it.
            noise: Change the arguments and gradients that come in, relatively.

        """
        self.carried.restore(only_random=carry)
        values = self.values if values is None else values
        leaves = {id(v): leaf(v, noise) for v in values if is_tensor(v)}
        # What the user computed is no leaf, and `f` may write into it.
        given: list[Any] = [leaves.get(id(v), v) for v in values]
        given = [
            t.clone() if is_tensor(v) and v.grad_fn is not None else t
            for t, v in zip(given, values, strict=True)
        ]
        versions = [version(v) if is_tensor(v) else None for v in given]
        args, kwargs = self._rebuilt(given)
        try:
            with untouched(self.f, args, kwargs):
                seen = self._seen(how, given, [*leaves.values()], backward, noise)
                own = zip(self.call.paths, values, strict=True)
                seen.gradients = {
                    path: leaves[id(v)].grad for path, v in own if is_tensor(v)
                }
                seen.gradients |= {self.name(t): t.grad for t, _ in self._captured}
                now = [version(v) if is_tensor(v) else None for v in given]
                paths = zip(self.call.paths, now, versions, strict=True)
                seen.written = [path for path, a, b in paths if a != b]
        finally:
            for tensor, gradient in self._captured:
                tensor.grad = gradient
            for tensor, held in self._kept:
                if distance(tensor, held)[0]:
                    tensor.detach().copy_(held)
        return seen

    def _seen(
        self,
        how: Callable[[list[Any]], object],
        given: list[object],
        leaves: list[Tensor],
        backward: bool,
        noise: float,
    ) -> Seen:
        for tensor, _ in self._captured:
            tensor.grad = None
        before = self._random()
        flat, tree = flatten(how(given))
        seen = Seen(tree, tuple(tree.paths("result")))
        seen.values = [v.detach().clone() if is_tensor(v) else v for v in flat]
        seen.requires_grad = [is_tensor(v) and v.requires_grad for v in flat]
        seen.moved = [k for k, v in self._random().items() if v != before[k]]
        ends = [(i, v) for i, v in enumerate(flat) if is_tensor(v) and v.requires_grad]
        if backward and ends:
            known = {id(t) for t in (*leaves, *(t for t, _ in self._captured))}
            new = [t for t in graph_leaves(v for _, v in ends) if id(t) not in known]
            self._captured += [(t, t.grad) for t in new]
            for tensor in new:
                tensor.grad = None
            gradients = [cotangent(v, index, noise) for index, v in ends]
            # What f captures may have a history, which is the user's.
            torch.autograd.backward([v for _, v in ends], gradients, retain_graph=True)
        seen.random, seen.state = self._random(), self._state()
        return seen

    def name(self, tensor: Tensor) -> str:
        """Return what a captured tensor is called."""
        other = f"a captured tensor of shape {tuple(tensor.shape)}"
        if other in self._names.values():
            other += f" ({len(self._names)})"
        return self._names.setdefault(id(tensor), other)

    def _state(self) -> dict[str, Tensor]:
        modules = self.reached.modules
        buffers = [b for m in modules for b in m.buffers() if b.nbytes < LARGEST_BUFFER]
        found = {id(t): t for t in (*self._constants, *buffers)}
        return {self.name(t): t.detach().clone() for t in found.values()}

    def _random(self) -> dict[str, object]:
        """Return the states of all sources of random numbers."""
        found = {name: get() for name, (get, _) in self.carried.random.items()}
        found["Python's random"] = random.getstate()
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            found["NumPy's numpy.random"] = (kind, keys.tobytes(), *rest)
        found["torch's random state"] = torch.get_rng_state().tolist()
        for index, generator in enumerate(self.reached.generators):
            if generator is not torch.default_generator:
                key = f"the torch.Generator {index} that f holds"
                found[key] = generator.get_state().tolist()
        given = [v for v in (*self.values, *self.reached.tensors) if is_tensor(v)]
        for device in {t.device for t in given if t.device.type not in ("cpu", "meta")}:
            state = torch.get_device_module(device).get_rng_state(device)
            found[f"torch's random state of {device}"] = state.tolist()
        return found

    def differing(
        self, found: Seen, expected: Seen, *, again: bool = False
    ) -> list[Difference]:
        """Return where two runs are further apart than rounding explains.

        Args:
            found: One run.
            expected: The other.
            again: Whether both ran the same, which leaves nothing to rounding.

        """
        pairs = list(distances(found, expected))
        over = [d for d, dtype in pairs if d.off > self._allowed(d, dtype)]
        if again:
            return over
        if over and self._rtol is None and self._lowest is None:
            self._lowest = torch.float64
            with _Dtypes() as seen:
                self.run(self.call.invoke, backward=False)
            self._lowest = max(seen.found, key=lambda d: torch.finfo(d).eps)
            moved = self.run(self.call.invoke, noise=torch.finfo(self._lowest).eps)
            off = [d for d, _ in distances(moved, self.plain) if math.isfinite(d.off)]
            self._floor = {d.name: 10 * d.off for d in off}
        over = [d for d, dtype in pairs if d.off > self._allowed(d, dtype)]
        agreed = [d.relative for d, _ in pairs if d not in over and d.scale]
        rounded = [
            r for r in agreed if r < rtol_of(torch.bfloat16)
        ]  # not a zero's noise
        self.largest = max(self.largest, *rounded, 0.0)
        return over

    def _allowed(self, difference: Difference, dtype: torch.dtype) -> float:
        rtol = self._rtol
        if rtol is None:
            rtol = max(rtol_of(dtype), rtol_of(self._lowest or dtype))
        floor = self._floor.get(difference.name, 0.0)
        return max(rtol * difference.scale, floor) + (self._atol or 0.0)


class _Dtypes(TorchFunctionMode):
    """Notes the floating dtypes of what torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {torch.float64}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if is_tensor(value) and value.is_floating_point():
                self.found.add(value.dtype)
        return result
