"""Reach: what a callable may use besides its arguments, found without running it.

Knows Python objects. Knows nothing of graphs, nor what becomes of what is found.
"""

from __future__ import annotations

import contextvars
import dis
import gc
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

# Looking further would cost more than a chunk, and what is so far away is rarely used.
_MOST_OBJECTS = 4096


@dataclass(slots=True)
class Reached:
    """What can be reached from a callable without running it."""

    modules: list[nn.Module] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # parameters among them


def reach(f: Callable[..., Any], *others: object) -> Reached:
    """Look into a callable and other objects, the nearest first.

    Through what objects hold, and what code names: globals, imports, and the attributes
    of classes and Python modules. Nothing of the user's is run. What is further away
    than some thousands of objects is not found.
    """
    search = _Search()
    search.run(f, *others)
    return search.found


def _ids(*kinds: type) -> frozenset[int]:
    # By id, since to hash a class may run a method of its metaclass.
    return frozenset(map(id, kinds))


_ATOMS = _ids(
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range),
    *(type(...), type(NotImplemented), torch.dtype, torch.device, torch.Size),
    *(types.CodeType, types.FrameType, types.TracebackType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType),
    logging.Logger,  # which holds all others
)
_SEQUENCES = _ids(list, tuple, set, frozenset, deque)
_METHODS = _ids(types.FunctionType, staticmethod, classmethod)
_PROXIES = _ids(weakref.ProxyType, weakref.CallableProxyType)
_FRAMES = {
    id(types.GeneratorType): "gi_frame",
    id(types.CoroutineType): "cr_frame",
    id(types.AsyncGeneratorType): "ag_frame",
}

# What torch calls by these names, and what makes an object.
_CALLED = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
_MAKERS = ("__new__", "__init__", "__post_init__")

_MODULE_FIELDS = frozenset(vars(nn.Module()))  # all of them hold no capture of `f`'s,
_MODULE_MEMBERS = (  # but for these
    *("_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)

# Past any `__getattribute__`, `__dict__` and `__mro__`, which may be the user's.
_mro: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
_of_class: Callable[[type], Mapping[str, object]] = vars(type)["__dict__"].__get__
_of_module: Callable[[nn.Module], dict[str, object]]
_of_module = vars(nn.Module)["__dict__"].__get__
_of_tensor: Callable[[Tensor], dict[str, object]] = vars(Tensor)["__dict__"].__get__
_of_file: Callable[[types.ModuleType], dict[str, object]]
_of_file = vars(types.ModuleType)["__dict__"].__get__


class _Search:
    """One walk, breadth first.

    All that an object holds is followed. Classes and Python modules hold much that is
    not used: of these only what some code that was found names, wherever that code is.
    """

    def __init__(self) -> None:
        self.found = Reached()
        self._kept: dict[int, object] = {}  # all seen, by an id that none gets again
        self._words: dict[str, None] = {}  # all that code names, in order
        self._spaces: list[Mapping[str, object]] = []  # of classes and Python modules
        self._classes: set[int] = set()  # whose attributes are among these

    def run(self, *roots: object) -> None:
        found, kept, left = self.found, self._kept, _MOST_OBJECTS
        queue = deque(roots)
        while queue:
            value: Any = queue.popleft()
            kind = type(value)  # not `__class__`, which a proxy borrows
            if id(kind) in _ATOMS or id(value) in kept:
                continue
            kept[id(value)] = value
            if issubclass(kind, Tensor):
                found.tensors.append(value)
                plain = kind is Tensor or kind is nn.Parameter
                if plain and not _of_tensor(value):
                    continue
            elif issubclass(kind, torch.Generator):
                found.generators.append(value)
                continue
            elif issubclass(kind, nn.Module):
                found.modules.append(value)
            if left:
                before = len(queue)
                queue.extend(islice(self._inside(value, kind), left))
                left -= len(queue) - before
                if not left:
                    _log.debug(
                        "looked at %d objects that f reaches, and no further",
                        _MOST_OBJECTS,
                    )

    def _inside(self, value: Any, kind: type) -> Iterable[object]:
        if issubclass(kind, nn.Module):
            return chain(_in_module(value), self._in_class(kind))
        if kind is types.FunctionType:
            return self._in_function(value)
        if kind is dict:
            return chain(value.values(), value)
        if id(kind) in _SEQUENCES:
            return value  # type: ignore[no-any-return]
        if issubclass(kind, Tensor):
            return chain(_of_tensor(value).values(), self._in_class(kind))
        if issubclass(kind, type):
            return chain(_makers(value), self._in_class(value), self._in_class(kind))
        if issubclass(kind, types.ModuleType):
            return self._in_file(value)
        if id(kind) in _PROXIES:
            return _behind(value)
        if issubclass(kind, threading.local):
            held: Iterable[object] = _in_this_thread(value, kind)
        elif id(kind) in _FRAMES:
            held = self._in_frame(value, kind)
        else:
            # What the garbage collector sees, since it runs nothing, and sees all.
            held = (v for v in gc.get_referents(value) if v is not kind)
        if issubclass(kind, weakref.ref):
            held = chain((weakref.ref.__call__(value),), held)
        elif kind is contextvars.ContextVar:
            held = chain((value.get(None),), held)
        return chain(held, self._in_class(kind))

    def _in_function(self, function: types.FunctionType) -> Iterator[object]:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                yield cell.cell_contents
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from function.__dict__.values()
        yield from self._in_code(function.__code__, function.__globals__)

    def _in_frame(self, value: object, kind: type) -> Iterator[object]:
        frame: types.FrameType | None = getattr(value, _FRAMES[id(kind)])
        if frame is not None:
            yield from frame.f_locals.values()
            # The collector sees more, such as what a loop is over.
            spaces = (frame.f_globals, frame.f_builtins)
            for held in gc.get_referents(value, frame):
                if all(held is not space for space in spaces):
                    yield held
            yield from self._in_code(frame.f_code, frame.f_globals)

    def _in_code(
        self, code: types.CodeType, space: dict[str, object]
    ) -> Iterator[object]:
        if _is_library(dict.get(space, "__name__")):
            return
        named = _named(code)
        for name in named.names:
            if (value := dict.get(space, name)) is not None:
                yield value
        if named.imports:
            yield from _imported(named.imports, dict.get(space, "__package__"))
        new = [name for name in named.words if name not in self._words]
        self._words.update(dict.fromkeys(new))
        for other in self._spaces:
            yield from (other[name] for name in new if name in other)

    def _in_class(self, kind: type) -> Iterable[object]:
        """Return what is used of a class: what code names, and what Python calls."""
        if id(kind) in self._classes:
            return ()
        self._classes.add(id(kind))
        found: list[object] = []
        for base in _mro(kind):
            if base is not kind and id(base) in self._classes:
                continue
            self._classes.add(id(base))
            space = _of_class(base)
            if _is_library(space.get("__module__", "builtins")):
                continue
            self._spaces.append(space)
            found += (
                member
                for name, member in list(space.items())
                if name in self._words or name in _CALLED or _is_special(name, member)
            )
        return found

    def _in_file(self, module: types.ModuleType) -> Iterator[object]:
        space = _of_file(module)
        if not _is_library(space.get("__name__")):
            self._spaces.append(space)
            names = ("__getattr__", *self._words)
            yield from [space[name] for name in names if name in space]


def _is_special(name: str, member: object) -> bool:
    """Whether Python calls a member of a class by itself, once there is an object."""
    return (
        name.startswith("__")
        and name.endswith("__")
        and name not in _MAKERS
        and id(type(member)) in _METHODS
    )


def _makers(kind: type) -> list[object]:
    return [
        space[name]
        for space in map(_of_class, _mro(kind))
        if not _is_library(space.get("__module__", "builtins"))
        for name in _MAKERS
        if name in space
    ]


def _in_module(module: nn.Module) -> Iterator[object]:
    if issubclass(type(module), torch.jit.ScriptModule):
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from module.children()
        return
    fields = _of_module(module)
    for name in _MODULE_MEMBERS:
        members = fields.get(name)
        if issubclass(type(members), dict):
            yield from dict.values(members)  # type: ignore[arg-type]
    for name, value in list(fields.items()):  # other threads may set more
        if name not in _MODULE_FIELDS:
            yield value


def _in_this_thread(local: threading.local, kind: type) -> Iterable[object]:
    # In a thread that has not used it yet, to ask is to run `__init__`.
    for base in _mro(kind):
        if base is threading.local:
            break
        if "__init__" in _of_class(base):
            return ()
    return threading.local.__getattribute__(local, "__dict__").values()  # type: ignore[no-any-return]


class _Catch:
    """Gets hold of what is on the other side of a `+`."""

    def __add__(self, other: object) -> object:
        return other


def _behind(proxy: Any) -> Iterator[object]:
    """Yield what a weak proxy stands for.

    As an operand it gives way to that, and the left one is asked first.
    """
    with suppress(ReferenceError):
        yield type(proxy).__radd__(proxy, _Catch())


class _Named(NamedTuple):
    """The names in code and in the functions and classes that are made in it."""

    names: tuple[str, ...]  # of globals and attributes
    words: tuple[str, ...]  # these, and strings, which may be for `getattr`
    imports: tuple[str, ...]  # those that may be of modules that it imports


_IMPORT = dis.opmap["IMPORT_NAME"]


@lru_cache(maxsize=4096)
def _named(code: types.CodeType) -> _Named:
    names, constants = code.co_names, code.co_consts
    words = [c for c in constants if isinstance(c, str) and c.isidentifier()]
    imports = names if _IMPORT in code.co_code[::2] else ()
    inner = [_named(c) for c in constants if isinstance(c, types.CodeType)]
    return _Named(
        tuple(dict.fromkeys(chain(names, *(n.names for n in inner)))),
        tuple(dict.fromkeys(chain(names, words, *(n.words for n in inner)))),
        tuple(dict.fromkeys(chain(imports, *(n.imports for n in inner)))),
    )


def _imported(names: Iterable[str], package: object) -> Iterator[object]:
    """Yield those modules that are there already, by absolute or relative names."""
    parts = package.split(".") if isinstance(package, str) else []
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    for name in names:
        for full in (name, *(f"{parent}.{name}".rstrip(".") for parent in above)):
            yield sys.modules.get(full)


_LIBRARIES = frozenset({"chunkcheck", "torch", "numpy", *sys.stdlib_module_names})


def _is_library(module: object) -> bool:
    """Whether a module, by its name, holds nothing that `f` could capture."""
    return type(module) is str and _is_of_library(module)


@lru_cache(maxsize=4096)
def _is_of_library(module: str) -> bool:
    return module != "__main__" and module.partition(".")[0] in _LIBRARIES
