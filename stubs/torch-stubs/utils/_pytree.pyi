# The registry as chunkcheck._tree reads it, and how a test writes into it.
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

_K = TypeVar("_K")
_T = TypeVar("_T")
_Context: TypeAlias = Any
_Flatten: TypeAlias = Callable[[Any], tuple[list[Any], _Context]]
_FlattenWithKeys: TypeAlias = Callable[[Any], tuple[list[tuple[Any, Any]], _Context]]
_Unflatten: TypeAlias = Callable[[Iterable[Any], _Context], Any]

SUPPORTED_NODES: dict[type, NodeDef]

class NodeDef(NamedTuple):
    type: type[Any]
    flatten_fn: _Flatten
    unflatten_fn: _Unflatten
    flatten_with_keys_fn: _FlattenWithKeys | None

@dataclass(frozen=True)
class SequenceKey(Generic[_T]):
    idx: int

@dataclass(frozen=True)
class MappingKey(Generic[_K, _T]):
    key: _K

@dataclass(frozen=True)
class GetAttrKey:
    name: str

def register_pytree_node(
    cls: type,
    flatten_fn: _Flatten,
    unflatten_fn: _Unflatten,
    *,
    serialized_type_name: str | None = None,
    to_dumpable_context: Callable[[_Context], Any] | None = None,
    from_dumpable_context: Callable[[Any], _Context] | None = None,
    flatten_with_keys_fn: _FlattenWithKeys | None = None,
) -> None: ...
