"""Tests of `_torch.reach`: what is found in `f` without running it."""

# ruff: noqa: PLW0108 (a function that only calls another is what is looked into here)

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch.reach import Reached, reach
from reference import rows

F = Callable[[Any], Any]
GLOBAL = torch.ones(3)  # what some of the functions below name
MINE = types.ModuleType("of_a_user")
MINE.weight = GLOBAL  # type: ignore[attr-defined]


def by_name(x: Tensor) -> Tensor:
    return x + GLOBAL


class Model(nn.Module):
    def __init__(self, tensor: Tensor, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.Module())
        match how:
            case "parameter":
                self.inner[1].w = nn.Parameter(tensor)
            case "buffer":
                self.inner[1].register_buffer("b", tensor)
            case "attribute":
                self.table = [tensor]

    def forward(self, x: Tensor) -> Tensor:
        return x


class GlobalModel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x + GLOBAL


class Thing:
    """Holds a tensor, or uses the global one in a method that another one calls."""

    def __init__(self, tensor: object = None) -> None:
        self.tensor = tensor

    def method(self, x: Tensor) -> Tensor:
        return self.between(x)

    def between(self, x: Tensor) -> Tensor:
        return self.last(x)

    def last(self, x: Tensor) -> Tensor:
        return x + GLOBAL

    def unrelated(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x + GLOBAL

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x + GLOBAL


class Called(Thing):
    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)


class Slots:
    __slots__ = ("empty", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x


class MoreSlots(Slots):
    __slots__ = "single"  # noqa: PLC0205 (what is allowed has to work)


def cell(tensor: object) -> F:
    return lambda x: (x, tensor)


def default(tensor: object) -> F:
    def f(x: object, tensor: object = tensor) -> object:
        return x, tensor

    return f


def keyword_default(tensor: object) -> F:
    def f(x: object, *, tensor: object = tensor) -> object:
        return x, tensor

    return f


def nested(_: object) -> F:
    def f(x: Tensor) -> object:
        def inner() -> Tensor:
            def innermost() -> Tensor:
                return x + GLOBAL

            return innermost()

        return inner()

    return f


def through_a_module(_: object) -> F:
    return lambda x: x + MINE.weight


def decorated(tensor: object) -> F:
    return functools.wraps(by_name)(cell(tensor))


# How a callable comes by a tensor; some of them by the global one.
HELD: dict[str, Callable[[Tensor], F]] = {
    "cell": cell,
    "default": default,
    "keyword_default": keyword_default,
    "decorated": decorated,
    "cached": lambda t: functools.cache(cell(t)),
    "partial": lambda t: functools.partial(pow, t),
    "partial_keyword": lambda t: functools.partial(dict, t=t),
    "partial_of_partial": lambda t: functools.partial(functools.partial(pow, t), 1),
    "partial_of_a_method": lambda t: functools.partial(Thing(t).unrelated),
    "parameter": lambda t: Model(t, "parameter"),
    "buffer": lambda t: Model(t, "buffer"),
    "module_attribute": lambda t: Model(t, "attribute"),
    "method_of_a_module": lambda t: Model(t, "parameter").forward,
    "method": lambda t: Thing(t).unrelated,
    "object": Called,
    "object_in_object": lambda t: Thing(Thing(t)).unrelated,
    "slots": Slots,
    "inherited_slots": MoreSlots,
    "list": lambda t: cell([1, t]),
    "tuple": lambda t: cell((1, t)),
    "set": lambda t: cell({t}),
    "frozenset": lambda t: cell(frozenset({t})),
    "deque": lambda t: cell(deque([t])),
    "dict": lambda t: cell({"a": {"b": t}}),
}
NAMED: dict[str, Callable[[Tensor], F]] = {
    "global": lambda _: by_name,
    "global_function": lambda _: lambda x: by_name(x) * 2,
    "nested": nested,
    "module_of_a_user": through_a_module,
    "called_by_a_method": lambda _: Thing().method,
    "called_by_call": lambda _: Called(),
    "called_by_forward": lambda _: GlobalModel(),
    "class_method": lambda _: Thing.of_class,
    "static_method": lambda _: Thing.static,
}


@pytest.mark.parametrize("how", [*HELD, *NAMED])
def test_reach_finds_a_tensor(how: str) -> None:
    tensor = torch.ones(3)
    make = (HELD | NAMED)[how]
    expected = GLOBAL if how in NAMED else tensor
    # A parameter is another object, of the same memory.
    found = [t.data_ptr() for t in reach(make(tensor)).tensors]
    assert expected.data_ptr() in found


class Pair:
    """A module with a buffer and a generator, where code below looks for them."""

    bn: nn.Module
    g: torch.Generator


def use(bn: Any, g: Any, x: Tensor) -> Tensor:
    y: Tensor = bn(x) * torch.rand(x.shape, generator=g)
    return y


def use_pair(x: Tensor) -> Tensor:
    return use(PAIRS[0].bn, PAIRS[0].g, x)


PAIRS = [Pair()]
VAR: contextvars.ContextVar[Pair] = contextvars.ContextVar("VAR")
THREAD = threading.local()
CODE = """
def noise(x):
    return pair.bn(x) * pair.g
"""


def file(name: str) -> Any:
    """Return a Python module, as if imported from a file of the user's."""
    made = types.ModuleType(name)
    exec(CODE, vars(made))
    sys.modules[name] = made
    return made


UTILS, PACKAGE, SUB = map(file, ["my_utils", "my_package", "my_package.sub"])
PACKAGE.sub = SUB
RELATIVE = """
def absolute(x):
    import my_package.sub
    return my_package.sub.noise(x)
def relative(x):
    from .sub import noise
    return noise(x)
def of_package(x):
    from . import sub
    return sub.noise(x)
def above(x):
    from ..sub import noise
    return noise(x)
"""
IMPORTING: dict[str, Any] = {"__package__": "my_package"}
exec(RELATIVE, IMPORTING)
BELOW: dict[str, Any] = {"__package__": "my_package.below"}
exec(RELATIVE, BELOW)


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return use_pair(x)


class Child(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Mixin:
    def helper(self, x: Tensor) -> Tensor:
        return use_pair(x)


class WithHelper(Mixin):
    def helper(self, x: Tensor) -> Tensor:
        return super().helper(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.helper(x)


class Attributes(nn.Module):
    pair: Any = None
    by_string: Any = None

    @property
    def late(self) -> Pair:
        return PAIRS[0]

    @functools.cached_property
    def cached(self) -> Pair:
        return PAIRS[0]

    def given(self, x: Tensor, how: str) -> Tensor:
        return use_pair(x) if how else x

    partly = functools.partialmethod(given, how="a")


class OfClass(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return use(self.pair.bn, self.pair.g, x)


class OfProperty(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return use(self.late.bn, self.late.g, x)


class OfCached(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return use(self.cached.bn, self.cached.g, x)


class OfPartial(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        return self.partly(x)


class OfString(Attributes):
    def forward(self, x: Tensor) -> Tensor:
        pair = getattr(self, "by_string")  # noqa: B009
        return use(pair.bn, pair.g, x)


class Static:
    pair: Any = None

    @staticmethod
    def go(x: Tensor) -> Tensor:
        return use_pair(x)

    @classmethod
    def get(cls) -> Pair:
        return cls.pair  # type: ignore[no-any-return]


class Meta(type):
    @property
    def late(cls) -> Pair:
        return PAIRS[0]


class OfMeta(metaclass=Meta):
    pass


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return use_pair(x)


class NoiseInContext(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, *_: object) -> None:
        ctx.noise = use_pair


class OwnTensor(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> object:
        return use_pair(torch.ones(2, 3))


class Made:
    def __init__(self) -> None:
        self.pair = PAIRS[0]

    def run(self, x: Tensor) -> Tensor:
        return use(self.pair.bn, self.pair.g, x)


class Special:
    def __getitem__(self, index: int) -> object:
        return PAIRS[index]


class SpecialAttribute:
    def __getattr__(self, name: str) -> object:
        return PAIRS[0]


class Descriptor:
    def __get__(self, thing: object, kind: object = None) -> Pair:
        return PAIRS[0]


class Described:
    pair = Descriptor()


@functools.singledispatch
def by_type(x: object) -> object:
    return x


@by_type.register
def _(x: Tensor) -> object:
    return use_pair(x)


def hooked(register: str) -> Callable[[Pair], F]:
    def make(pair: Pair) -> F:
        module = nn.Sequential(nn.Linear(3, 3))
        getattr(module[0], register)(lambda *_: use(pair.bn, pair.g, *_))
        return module

    return make


def of_class(kind: Any) -> Callable[[Pair], F]:
    """Return what makes an object of a class that holds the pair itself."""

    def make(pair: Pair) -> F:
        kind.pair = kind.by_string = pair
        return kind()  # type: ignore[no-any-return]

    return make


def in_file(module: Any, f: Any) -> Callable[[Pair], F]:
    def make(pair: Pair) -> F:
        module.pair = pair
        return f  # type: ignore[no-any-return]

    return make


def of_python_module(module: Any) -> F:
    return lambda x: module.noise(x)


def default_module(_: object) -> F:
    def f(x: Tensor, module: Any = UTILS) -> object:
        return module.noise(x)

    return f


def made_of(kind: Any) -> F:
    return lambda x: kind().run(x)


def attribute_of(thing: Any) -> F:
    return lambda x: (x, thing.pair)


def local_class(pair: Pair) -> F:
    class Local:
        def run(self, x: Tensor) -> Tensor:
            return use(pair.bn, pair.g, x)

    local = Local()
    return lambda x: local.run(x)


def iterator(pair: Pair) -> F:
    def forever() -> Iterator[Pair]:
        mine = pair
        while True:
            yield mine

    it = forever()
    next(it)
    return lambda x: use(next(it).bn, next(it).g, x)


def iterator_of_globals(_: object) -> F:
    it = (pair for pair in (PAIRS[i] for i in range(9)))
    return lambda x: use(next(it).bn, next(it).g, x)


async def later(pair: Pair) -> Pair:
    return pair


def coroutine(pair: Pair) -> F:
    awaited = later(pair)
    CLOSED.append(awaited)
    return lambda x: (x, awaited)


CLOSED: list[Any] = []


def context(pair: Pair) -> F:
    VAR.set(pair)
    return lambda x: use(VAR.get().bn, VAR.get().g, x)


def context_default(pair: Pair) -> F:
    return cell(contextvars.ContextVar("other", default=pair))


def thread(pair: Pair) -> F:
    THREAD.pair = pair
    return lambda x: use(THREAD.pair.bn, THREAD.pair.g, x)


class Local(threading.local):
    pass


def thread_subclass(pair: Pair) -> F:
    local = Local()
    local.pair = pair
    return cell(local)


def remembered(pair: Pair) -> F:
    @functools.lru_cache
    def once(key: int) -> Pair | None:
        return pairs.pop(key)

    pairs: dict[int, Pair | None] = {0: pair}
    once(0)
    return lambda x: (once(0), x)


def key_of_weak(pair: Pair) -> F:
    known: Any = weakref.WeakKeyDictionary()
    known[pair.bn] = pair.g
    return cell(known)


def attribute_of_function(pair: Pair) -> F:
    def f(x: Tensor) -> object:
        return f.pair, x  # type: ignore[attr-defined]

    f.pair = pair  # type: ignore[attr-defined]
    return functools.partial(f)


def named_like_torch(pair: Pair) -> F:
    """As what wraps an operator of torch is."""
    return functools.wraps(torch.nn.functional.relu_)(
        functools.wraps(nn.functional.linear)(lambda x: use(pair.bn, pair.g, x))
    )


class Holder(dict[str, Any]):
    pass


def in_attribute_of_a_dict(pair: Pair) -> F:
    held = Holder()
    held.pair = pair  # type: ignore[attr-defined]
    return cell(held)


# How a callable comes by the pair, each of which was once missed, or might be.
ROUTES: dict[str, Callable[[Pair], Any]] = {
    "super": lambda _: Child(),
    "super_of_a_helper": lambda _: WithHelper(),
    "class_attribute_of_a_module": of_class(OfClass),
    "class_attribute_by_a_string": of_class(OfString),
    "property": lambda _: OfProperty(),
    "cached_property": lambda _: OfCached(),
    "partial_method": lambda _: OfPartial(),
    "static_method": lambda _: lambda x: Static.go(x),
    "class_method": in_file(Static, lambda _: Static.get()),
    "class_attribute": in_file(Static, lambda _: Static.pair),
    "property_of_a_metaclass": lambda _: lambda _: OfMeta.late,
    "function_of_autograd": lambda _: lambda x: Noise.apply(x),  # type: ignore[no-untyped-call]
    "setup_context": lambda _: lambda x: NoiseInContext.apply(x),  # type: ignore[no-untyped-call]
    "module_made_in_f": lambda _: lambda x: Child()(x),
    "object_made_in_f": lambda _: lambda x: Made().run(x),
    "class_in_a_cell": lambda _: made_of(Made),
    "closure_of_a_method": local_class,
    "getitem": lambda _: cell(Special()),
    "getattr": lambda _: cell(SpecialAttribute()),
    "descriptor": lambda _: attribute_of(Described()),
    "subclass_of_tensor": lambda _: cell(torch.ones(3).as_subclass(OwnTensor)),
    "single_dispatch": lambda _: lambda x: by_type(x),
    "forward_hook": hooked("register_forward_hook"),
    "forward_pre_hook": hooked("register_forward_pre_hook"),
    "backward_hook": hooked("register_full_backward_hook"),
    "backward_pre_hook": hooked("register_full_backward_pre_hook"),
    "python_module": in_file(UTILS, lambda x: UTILS.noise(x)),
    "python_module_in_a_package": in_file(SUB, lambda x: PACKAGE.sub.noise(x)),
    "python_module_in_a_cell": in_file(UTILS, of_python_module(UTILS)),
    "python_module_as_a_default": in_file(UTILS, default_module(None)),
    "import": in_file(SUB, IMPORTING["absolute"]),
    "relative_import": in_file(SUB, IMPORTING["relative"]),
    "import_of_the_package": in_file(SUB, IMPORTING["of_package"]),
    "import_from_above": in_file(SUB, BELOW["above"]),
    "iterator": iterator,
    "iterator_on_the_stack": lambda p: cell(x for x in [p]),
    "iterator_of_globals": iterator_of_globals,
    "iterator_of_c": lambda p: cell(itertools.cycle([p])),
    "map": lambda p: cell(map(cell(p), [1])),
    "coroutine": coroutine,
    "mapping_proxy": lambda p: cell(types.MappingProxyType({"a": p})),
    "key_of_a_dict": lambda p: cell({p: 1}),
    "context_variable": context,
    "default_of_a_context_variable": context_default,
    "thread_local": thread,
    "subclass_of_thread_local": thread_subclass,
    "result_in_a_cache": remembered,
    "weak_reference": lambda p: cell([weakref.ref(p.bn), p.g]),
    "weak_proxy": lambda p: cell([weakref.proxy(p.bn), p.g]),
    "weak_proxy_of_an_object": lambda p: cell(weakref.proxy(p)),
    "weak_method": lambda p: cell([weakref.WeakMethod(p.bn.forward), p.g]),
    "weak_key": key_of_weak,
    "attribute_of_a_function": attribute_of_function,
    "wrapper_of_an_operator": named_like_torch,
    "method_of_c": lambda p: [p].__getitem__,
    "attribute_of_a_dict": in_attribute_of_a_dict,
    "simple_namespace": lambda p: cell(types.SimpleNamespace(p=p)),
    "without_gradients": lambda p: torch.no_grad()(lambda x: use(p.bn, p.g, x)),
}


@pytest.fixture(name="pair")  # a global of this name would be found by it
def one_pair() -> Iterator[Pair]:
    pair = Pair()
    pair.bn, pair.g = nn.BatchNorm1d(3), torch.Generator()
    PAIRS[0] = pair
    yield pair
    VAR.set(Pair())
    THREAD.__dict__.clear()
    holders: list[Any] = [UTILS, PACKAGE, SUB, OfClass, OfString, Static]
    for holder in holders:
        holder.pair = holder.by_string = None
    while CLOSED:
        CLOSED.pop().close()


@pytest.mark.parametrize("how", ROUTES)
def test_reach_finds_a_module_and_a_generator(how: str, pair: Pair) -> None:
    found = reach(ROUTES[how](pair))
    assert any(module is pair.bn for module in found.modules)
    assert any(generator is pair.g for generator in found.generators)


def test_a_weak_proxy_is_no_module(pair: Pair) -> None:
    dead = weakref.proxy(nn.Linear(1, 1))
    proxy = weakref.proxy(pair.bn)
    found = reach(lambda x: proxy(x) + dead(x), weakref.ref(nn.Linear(1, 1)))
    (module,) = found.modules
    assert module is pair.bn
    assert type(module) is nn.BatchNorm1d


def test_a_batch_norm_behind_a_weak_proxy_is_updated_once() -> None:
    bn: Any = nn.BatchNorm1d(3).double()
    proxy = weakref.proxy(bn)
    x = rows(6, 3)
    y = chunk_and_checkpoint(lambda x: proxy(x), x, chunk_size=3, strategy="fused")
    y.sum().backward()
    assert bn.num_batches_tracked.item() == 2


def test_reach_finds_modules_and_generators_and_what_else_it_is_given() -> None:
    model, generator = Model(torch.ones(3), "parameter"), torch.Generator()
    found = reach(cell([model]), generator)
    assert found.generators == [generator]
    assert found.modules == list(model.modules())
    assert [t.data_ptr() for t in found.tensors] == [
        p.data_ptr() for p in model.parameters()
    ]


def test_a_method_reaches_only_the_methods_that_it_calls() -> None:
    assert not reach(Thing().unrelated).tensors
    assert any(t is GLOBAL for t in reach(Thing().method).tensors)


def test_libraries_are_not_looked_into() -> None:
    def f(x: Tensor) -> object:
        return torch.nn.functional.relu(x), functools, sys, weakref

    found = reach(f)
    assert found == Reached()


def test_an_empty_cell() -> None:
    tensor, late = torch.ones(3), torch.ones(3)

    def f(x: Tensor) -> Tensor:
        return x + tensor + late  # noqa: F821 (ruff minds the `del`)

    del late
    (found,) = reach(f).tensors
    assert found is tensor


def test_cycles_end() -> None:
    tensor = torch.ones(3)
    itself: list[object] = []
    itself.append(itself)
    thing, model = Thing(), Model(tensor, "attribute")
    thing.tensor = [thing, itself, model]
    model.table.append(thing)  # type: ignore[arg-type]
    assert [t is tensor for t in reach(thing.unrelated).tensors] == [True]


def test_each_tensor_is_found_once() -> None:
    tensor = torch.ones(3)
    assert len(reach(cell([tensor, {"a": tensor}]), tensor).tensors) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(10**6)),
        lambda: dict.fromkeys(range(10**6), 0.5),
        lambda: [[0.5] * 5000 for _ in range(5000)],
    ],
    ids=["list", "dict", "lists"],
)
def test_a_very_long_container_takes_no_time(make: Callable[[], object]) -> None:
    data, tensor = make(), torch.ones(3)

    def f(x: Tensor) -> object:
        return x + tensor, data

    start = time.process_time()
    found = reach(f).tensors
    assert time.process_time() - start < 0.25
    assert [t is tensor for t in found] == [True]


def test_what_is_far_away_is_not_found(caplog: pytest.LogCaptureFixture) -> None:
    near, many = torch.ones(3), [torch.ones(0) for _ in range(5000)]
    with caplog.at_level("DEBUG", logger="chunkcheck"):
        found = reach(cell([many, near])).tensors
    assert found[0] is near
    assert len(found) < 4096
    assert "looked at 4096 objects" in caplog.text


class RanError(Exception):
    pass


def ran(*_: object, **__: object) -> Any:
    raise RanError


SPECIAL = [
    *("getattr", "getattribute", "eq", "hash", "len", "bool", "iter", "next", "call"),
    *("contains", "getitem", "get", "add", "radd", "repr", "str", "reduce_ex"),
    *("instancecheck", "subclasscheck", "getstate", "mro_entries", "dir"),
]
PROPERTIES = [
    *("late", "func", "args", "__self__", "__module__"),
    *("values", "keys", "items", "get", "_parameters", "named_parameters"),
]


def forbid(kind: type) -> None:
    """Let whatever would run of a class raise."""
    for name in SPECIAL:
        type.__setattr__(kind, f"__{name}__", ran)
    for name in PROPERTIES:
        type.__setattr__(kind, name, property(ran))


def kind_of(*bases: type) -> Any:
    # Only here, since they cannot be set later.
    fields = {"__class__": property(ran), "__dict__": property(ran)}
    return types.new_class("Kind", bases, exec_body=lambda body: body.update(fields))


def attribute(*bases: type) -> Callable[[object], object]:
    def make(held: object) -> object:
        value = kind_of(*bases)()
        object.__setattr__(value, "held", held)
        return value

    return make


def slot(held: object) -> object:
    class Kind:
        __slots__ = ("empty", "held")

    value: Any = Kind()
    value.held = held
    return value


def with_metaclass(held: object) -> object:
    class Meta(type):
        pass

    class Kind(metaclass=Meta):
        pass

    value: Any = Kind()
    value.held = held
    forbid(Kind)
    forbid(Meta)
    return value


def thread_local(held: object) -> object:
    value = kind_of(threading.local)()
    value.held = held
    return value


def python_module(held: object) -> object:
    module = kind_of(types.ModuleType)("of_a_user")
    module.late = held
    return module


# Objects of classes of the user's, that hold something.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": attribute(),
    "slot": slot,
    "metaclass": with_metaclass,
    "module": attribute(nn.Module),
    "python_module": python_module,
    "thread_local": thread_local,
    "attribute_of_a_list": attribute(list),
    "attribute_of_an_int": attribute(int),
    "list": lambda held: kind_of(list)([held]),
    "tuple": lambda held: kind_of(tuple)([held]),
    "set": lambda held: kind_of(set)([held]),
    "deque": lambda held: kind_of(deque)([held]),
    "dict": lambda held: kind_of(dict)(a=held),
    "ordered_dict": lambda held: kind_of(OrderedDict)(a=held),
    "partial": lambda held: kind_of(functools.partial)(print, held),
    "weak_reference": lambda held: kind_of(weakref.ref)(held),
}


NOT_WEAK = {"slot", "tuple", "attribute_of_an_int", "weak_reference"}


@pytest.mark.parametrize("how", HOLDERS)
def test_nothing_of_the_users_is_run(how: str) -> None:
    tensor = torch.ones(3)
    value: Any = HOLDERS[how](tensor)
    kind = type(value)
    if how != "metaclass":
        forbid(kind)

    def f(x: Tensor) -> object:
        return x, value.late, value.get, value["a"]

    found = reach(f, kind)
    assert any(t is tensor for t in found.tensors)


@pytest.mark.parametrize("how", sorted(HOLDERS.keys() - NOT_WEAK))
def test_nothing_is_run_behind_a_proxy(how: str) -> None:
    tensor = torch.ones(3)
    value: Any = HOLDERS[how](tensor)
    if how != "metaclass":
        forbid(type(value))
    proxy = weakref.proxy(value)
    found = reach(lambda x: (x, proxy.late))
    assert any(t is tensor for t in found.tensors)


def test_a_class_that_looks_like_a_module_is_none() -> None:
    fields = {"__class__": property(lambda _: nn.Module)}
    fake = type("Fake", (), fields)()
    assert isinstance(fake, nn.Module)
    assert reach(cell(fake)) == Reached()


def test_a_thread_local_is_not_made_in_this_thread() -> None:
    class Local(threading.local):
        def __init__(self) -> None:
            made.append(threading.get_ident())

    made: list[int] = []
    local = Local()
    thread = threading.Thread(target=lambda: reach(cell(local)))
    thread.start()
    thread.join()
    assert made == [threading.get_ident()]


def test_a_private_slot() -> None:
    class Private:
        __slots__ = ("__tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.__tensor = tensor

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.__tensor

    tensor = torch.ones(3)
    assert any(t is tensor for t in reach(Private(tensor)).tensors)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_scripted_module() -> None:
    module = torch.jit.script(nn.Linear(3, 3).double())
    found = reach(module)
    assert found.modules[0] is module
    assert {id(p) for p in module.parameters()} <= {id(t) for t in found.tensors}

    x = rows(5, 3)
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), leaves)
    y = chunk_and_checkpoint(module, x, chunk_size=2)
    for got, plain in zip(
        torch.autograd.grad(y.square().sum(), leaves), expected, strict=True
    ):
        torch.testing.assert_close(got, plain)


def test_reach_looks_at_the_attributes_of_tensors() -> None:
    generator = torch.Generator()
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
        tensor.generator = generator  # type: ignore[attr-defined]
        assert reach(lambda: tensor).generators == [generator]  # noqa: B023
