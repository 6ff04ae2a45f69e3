# What every release from torch 2.4 on takes. `use_reentrant` has a default there, with
# a warning; here it is required.
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias, TypeVar, TypeVarTuple

_R = TypeVar("_R")
_Ts = TypeVarTuple("_Ts")
_Contexts: TypeAlias = tuple[
    AbstractContextManager[object], AbstractContextManager[object]
]

class CheckpointError(RuntimeError): ...

def checkpoint(
    function: Callable[[*_Ts], _R],
    *args: *_Ts,
    use_reentrant: bool,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], _Contexts] = ...,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
) -> _R: ...
def set_checkpoint_debug_enabled(
    enabled: bool | None,
) -> AbstractContextManager[None]: ...
def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager[None]: ...
