"""Names for types, shared by every layer. Knows no array library at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
)

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Only the recursion is quoted: pyright does not read an alias of several strings. A
# tuple is checked entry by entry. `list[Any]` rather than `list[Dim]`, since a list is
# invariant and a variable of type `list[int]` would be rejected.
Dim: TypeAlias = int | tuple["Dim", ...] | list[Any] | Mapping[Any, "Dim"] | None
BatchDim: TypeAlias = int | tuple[Dim, ...] | Mapping[str, Dim] | None
OutDim: TypeAlias = (
    int
    | Literal["auto", "sum", "mean"]
    | tuple["OutDim", ...]
    | list[Any]
    | Mapping[Any, "OutDim"]
    | None
)

ContextFn: TypeAlias = Callable[
    [], tuple[AbstractContextManager[object], AbstractContextManager[object]]
]
FlatFunction: TypeAlias = "Callable[..., tuple[Tensor, ...]]"


class ChunkStrategy(Protocol):
    """Any callable that runs `f(*args)` so that backward can redo it.

    `args` are the tensor leaves of one chunk, the chunked ones first, each in flatten
    order; `f` returns a tuple of tensors and so must the strategy.
    """

    def __call__(self, f: FlatFunction, /, *args: Tensor) -> tuple[Tensor, ...]:
        """Return `f(*args)`."""
        ...
