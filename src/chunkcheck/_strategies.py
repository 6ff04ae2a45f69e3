"""Strategies: how one chunk is run so that backward can redo it, as declarations.

Knows no array library: each backend executes these in its own terms. A strategy of a
user's own needs no declaration, any callable will do (see `ChunkStrategy`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from chunkcheck._typing import ChunkStrategy, ContextFn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The library's own engine: exact, lean and fast. "auto" is this one.

    Where all that `f` captures are leaves without hooks of their own, which is nearly
    always so, one node of the graph stands for all chunks, and backward runs them again
    one by one. Elsewhere each chunk keeps its own graph, whose saved tensors are
    recomputed. The logger `chunkcheck` tells which and why.

    Attributes:
        preserve_rng_state: Replay the random state of the CPU and of the devices of all
            tensors, and of every `torch.Generator` that `f` holds. Without it, dropout
            gives wrong gradients.
        preserve_python_rng_state: Replay the states of `random` and of `numpy.random`.
        generators: Generators to replay that cannot be found by looking into `f`.
        determinism_check: `"default"` checks that a recompute gives a result of the
            same structure, shapes and dtypes, `"values"` the same values as well (it
            keeps a copy of the result), `"none"` nothing.
        context_fn: Returns two context managers, for a chunk's forward and for its
            recompute.
        accumulate_dtype: The dtype in which the chunks' gradients of a parameter, or of
            a tensor passed whole, are summed, if it is wider than theirs. `"auto"` is
            float32; `None` sums in their own, which for bf16 and fp16 is inexact.
        keep_chunks: The last so many chunks keep their activations and are not
            recomputed: less time for more memory.
        fall_back: Run the chunks without recompute where it cannot be exact, under
            `torch.func` transforms and in forward-mode AD, instead of raising. "auto"
            does.

    Raises:
        ValueError: `determinism_check` is none of those, or `keep_chunks` is negative.
        TypeError: `context_fn` cannot be called, `keep_chunks` is no int, `generators`
            is no tuple of them, or `accumulate_dtype` is no floating dtype.

    Example:
        >>> from chunkcheck import Fused
        >>> Fused(keep_chunks=2).keep_chunks
        2

    """

    preserve_rng_state: bool = True
    preserve_python_rng_state: bool = False
    generators: tuple[torch.Generator, ...] = ()
    determinism_check: Literal["default", "values", "none"] = "default"
    context_fn: ContextFn | None = None
    accumulate_dtype: torch.dtype | Literal["auto"] | None = "auto"
    keep_chunks: int = 0
    fall_back: bool = False

    def __post_init__(self) -> None:
        for name in ("preserve_rng_state", "preserve_python_rng_state", "fall_back"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, found {getattr(self, name)!r}")
        if self.determinism_check not in ("default", "values", "none"):
            raise ValueError(
                "determinism_check must be 'default', 'values' or 'none', found"
                f" {self.determinism_check!r}"
            )
        _check_context_fn(self.context_fn)
        _check_generators(self.generators)
        _check_dtype(self.accumulate_dtype)
        if isinstance(self.keep_chunks, bool) or not isinstance(self.keep_chunks, int):
            raise TypeError(
                f"keep_chunks must be an int, found {self.keep_chunks!r} of type"
                f" {type(self.keep_chunks).__name__}"
            )
        if self.keep_chunks < 0:
            raise ValueError(
                f"keep_chunks must be 0 or more chunks, found {self.keep_chunks}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradInForward:
    """Compute the gradients of a loss in forward, chunk by chunk: no recompute.

    For an `f` of which one result requires a gradient: one number per chunk, reduced by
    `out_dim="sum"` or `"mean"`. Forward takes the gradients of all inputs and captured
    parameters from each chunk's graph and drops it; backward multiplies them by the
    gradient that comes in, so any scale or further use of the loss is right. What else
    `f` returns, such as counts, must not require a gradient: detach it.

    It costs the gradients' memory from forward to backward and once more in backward,
    and their time even if backward never comes; under `torch.no_grad` only the value is
    computed. Changing a parameter between forward and backward does no harm. A gradient
    of zero times an infinite one that comes in is nan, where a backward through `f` may
    give zero: do not divide by a count of zero. What it cannot do raises:
    `create_graph=True`, `torch.func`, and an `f` that captures a tensor that was
    computed from others (pass it as an argument).

    Attributes:
        accumulate_dtype: As in `Fused`; the loss itself is added up so, too.

    Raises:
        TypeError: `accumulate_dtype` is no floating dtype.

    Example:
        >>> import torch
        >>> from chunkcheck import GradInForward, chunk_and_checkpoint
        >>> head = torch.nn.Linear(8, 1000)
        >>> def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ...     return torch.nn.functional.cross_entropy(head(x), target)
        >>> x, target = torch.randn(10, 8), torch.randint(1000, (10,))
        >>> mean = chunk_and_checkpoint(
        ...     loss, x, target, chunk_size=4, out_dim="mean", strategy=GradInForward()
        ... )
        >>> mean.backward()
        >>> head.weight.grad.shape
        torch.Size([1000, 8])

    """

    accumulate_dtype: torch.dtype | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        _check_dtype(self.accumulate_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonReentrant:
    """Checkpoint each chunk by `torch.utils.checkpoint` with `use_reentrant=False`.

    Exact under every backward mode that torch has. A captured tensor that is changed
    in place between forward and backward goes unnoticed, as in torch's own. To see what
    a determinism error is about, call backward under
    `torch.utils.checkpoint.set_checkpoint_debug_enabled(True)`, forward included.

    Attributes:
        preserve_rng_state: Replay the random state of the CPU and of the chunk's device
            in recompute. Without it, dropout gives wrong gradients.
        determinism_check: `"default"` compares shape, dtype and device of what forward
            and recompute save, `"none"` compares nothing.
        context_fn: Returns two context managers, for forward and for recompute; also
            torch's hook for selective checkpointing.
        early_stop: End the recompute, by an exception inside `f`, once all that
            backward needs is there. It saves the last operations of `f`; right only if
            `f` has no broad `except` and leaves nothing to set back at its end, such as
            `module.train()` after `module.eval()`.

    Raises:
        TypeError: `context_fn` cannot be called.
        ValueError: `determinism_check` is neither.

    Example:
        >>> from chunkcheck import NonReentrant
        >>> NonReentrant(preserve_rng_state=False).preserve_rng_state
        False

    """

    preserve_rng_state: bool = True
    determinism_check: Literal["default", "none"] = "default"
    context_fn: ContextFn | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        if self.determinism_check not in ("default", "none"):
            raise ValueError(
                "determinism_check must be 'default' or 'none', found"
                f" {self.determinism_check!r}"
            )
        _check_context_fn(self.context_fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reentrant:
    """Checkpoint each chunk by `torch.utils.checkpoint` with `use_reentrant=True`.

    For code that depends on it; `NonReentrant` does more. Arguments and results of any
    structure work, and so does an `f` whose parameters alone require a gradient. What
    torch's reentrant checkpoint cannot do raises: `torch.autograd.grad`,
    `backward(inputs=...)`, `create_graph=True`, a second backward, from another result
    as well, without `retain_graph`, a captured tensor with a history in two chunks, a
    tensor subclass with a `__torch_function__` of its own, and a process group of more
    than one rank, under which gradients would be silently wrong. Parameter hooks run
    once per chunk.

    Attributes:
        preserve_rng_state: As in `NonReentrant`.

    """

    preserve_rng_state: bool = True


@dataclass(frozen=True, slots=True)
class NoCheckpoint:
    """Run each chunk as it is: nothing is recomputed and, in training, nothing saved.

    For measurements, and for an `f` that checkpoints itself.
    """


def _check_generators(generators: object) -> None:
    if not isinstance(generators, tuple) or not all(
        hasattr(generator, "get_state") for generator in generators
    ):
        raise TypeError(
            f"generators must be a tuple of torch.Generator, found {generators!r}"
        )


def _check_dtype(asked: object) -> None:
    floating = getattr(asked, "is_floating_point", False)
    if asked not in ("auto", None) and not floating:
        raise TypeError(
            "accumulate_dtype must be a floating dtype such as torch.float32,"
            f" 'auto' or None, found {asked!r}"
        )


def _check_context_fn(context_fn: object) -> None:
    if context_fn is not None and not callable(context_fn):
        raise TypeError(
            "context_fn must be a callable that returns two context managers, or None,"
            f" found {context_fn!r}"
        )


BuiltinStrategy: TypeAlias = (
    Fused | GradInForward | NonReentrant | Reentrant | NoCheckpoint
)
Strategy: TypeAlias = BuiltinStrategy | ChunkStrategy
StrategyName: TypeAlias = Literal[
    "auto", "fused", "grad_in_forward", "non_reentrant", "reentrant", "none"
]

_BY_NAME: dict[StrategyName, BuiltinStrategy] = {
    "auto": Fused(fall_back=True),
    "fused": Fused(),
    "grad_in_forward": GradInForward(),
    "non_reentrant": NonReentrant(),
    "reentrant": Reentrant(),
    "none": NoCheckpoint(),
}
_NAMES = ", ".join(map(repr, get_args(StrategyName)))


def resolve_strategy(strategy: object) -> Strategy:
    """Return the strategy that `strategy` names or is.

    Raises:
        TypeError: It is `None`, a class, or nothing that can be called.
        ValueError: It is a name that no strategy has.

    """
    if isinstance(strategy, str):
        if strategy in _BY_NAME:
            return _BY_NAME[strategy]
        close = difflib.get_close_matches(strategy, _BY_NAME, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"strategy {strategy!r} is none of {_NAMES}{hint}")
    if isinstance(strategy, BuiltinStrategy):
        return strategy
    if strategy is None:
        raise TypeError(
            "strategy is None: write strategy='none' to run the chunks without"
            " checkpointing, or leave it out for the default"
        )
    if isinstance(strategy, type):
        raise TypeError(
            f"strategy is the class {strategy.__name__}: write an instance,"
            f" strategy={strategy.__name__}()"
        )
    if not callable(strategy):
        raise TypeError(
            f"strategy must be one of {_NAMES}, a strategy instance or a callable"
            f" (f, *tensors) -> tuple of tensors, found {strategy!r} of type"
            f" {type(strategy).__name__}"
        )
    return strategy
