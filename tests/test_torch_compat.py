"""Tests of `_torch.compat`: the private names are there and mean what we think.

And without them, gradients are right all the same.
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch import compat
from reference import assert_same_as_plain, net, rows

# What `compat` reads from torch, and what it does without.
NAMES: dict[str, tuple[str, Any]] = {
    "_C._are_functorch_transforms_active": ("_transforms_active", lambda: False),
    "_C._is_alias_of": ("_is_alias_of", None),
    "_C._autograd._get_sequence_nr": ("_next_number", None),
    "_C._current_graph_task_id": ("_graph_task", threading.get_ident),
    "_C._current_autograd_node": ("_current_node", lambda: None),
    "_C._will_engine_execute_node": ("_will_run", lambda _: True),
    "autograd.Variable._execution_engine.run_backward": ("_run_backward", None),
    "overrides._get_current_function_mode_stack": ("_function_modes", list),
    "overrides._pop_mode": ("_pop_mode", None),
    "overrides._push_mode": ("_push_mode", None),
    "_guards.TracingContext.try_get": ("_tracing", lambda: None),
    "utils._python_dispatch._get_current_dispatch_mode_stack": (
        "_dispatch_modes",
        list,
    ),
    "utils._python_dispatch._pop_mode": ("_pop_dispatch_mode", None),
    "utils._python_dispatch._push_mode": ("_push_dispatch_mode", None),
    "_C._get_privateuse1_backend_name": ("_private_device", lambda: "privateuseone"),
    "multiprocessing.reductions.StorageWeakRef": ("_weak_storage", None),
    "_subclasses.FakeTensor": ("_fake_tensor", ()),
}


@pytest.mark.parametrize("path", NAMES)
def test_the_name_is_there(path: str) -> None:
    name, _ = NAMES[path]
    assert getattr(compat, name) is not None
    assert attrgetter(path)(torch) == getattr(compat, name)


@pytest.mark.parametrize("path", NAMES)
def test_without_the_name_gradients_are_right(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, *NAMES[path])
    module, leaf = net(), rows(4)

    def closure(x: Tensor) -> Tensor:
        y: Tensor = module(x).sin() * x
        return y

    shift = leaf.exp()
    for f in (module, closure, lambda x: module(x) + shift, lambda x: x[:, :2]):
        x = rows(5, 4)
        captured = [*module.parameters(), leaf]
        expected = torch.autograd.grad(
            f(x).sum(), [x, *captured], retain_graph=True, materialize_grads=True
        )
        y = chunk_and_checkpoint(f, x, chunk_size=2)
        assert y.grad_fn is not None
        found = torch.autograd.grad(
            y.sum(), [x, *captured], retain_graph=True, materialize_grads=True
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert_same_as_plain(
        lambda x: (module(x), x * 2), (rows(5, 4),), chunk_size=2, strategy="auto"
    )


def test_attributes_of_nodes_and_tensors_are_there() -> None:
    x = rows(3)
    y = (x * x.exp()).sum()
    assert hasattr(x, "_version")
    assert hasattr(x, "_backward_hooks")
    assert hasattr(nn.Linear(1, 1), "_buffers")
    assert y.grad_fn is not None
    assert hasattr(y.grad_fn, "_sequence_nr")
    assert hasattr(y.grad_fn.next_functions[0][0], "_saved_self")
    assert hasattr(forward_ad, "_current_level")


def test_factors_of_products() -> None:
    x, w, b = rows(2, 3), rows(3, 4), rows(4)
    for y, indices in ((x @ w, (0, 1)), (torch.addmm(b, x, w, alpha=3), (1, 2))):
        assert y.grad_fn is not None
        assert compat.factors(y.grad_fn) == dict(zip(indices, (x, w), strict=True))
    assert getattr(y.grad_fn, compat.ALPHA) == 3
    node = x.sin().grad_fn
    assert node is not None
    assert compat.factors(node) is None


def test_without_the_names_of_factors_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"MmBackward0": {0: "_gone", 1: "_gone"}}
    w = rows(300, 300)
    for known in (names, {}):
        monkeypatch.setattr(compat, "_FACTORS", known)
        assert_same_as_plain(
            lambda x: (x @ w).sin().sum(),
            (rows(5, 300),),
            chunk_size=2,
            out_dim="sum",
            strategy="auto",
            captured=w,
        )


def test_which_tensors_have_values() -> None:
    assert compat.has_values(torch.ones(2))
    assert not compat.has_values(torch.ones(2, device="meta"))
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not compat.has_values(fake)


def test_a_memory_is_known_for_as_long_as_it_is_remembered() -> None:
    tensor = torch.ones(3)
    before = compat.memory(tensor)
    assert before == compat.memory(tensor)
    assert before != compat.memory(tensor[1:])
    for _ in range(20):  # one of which comes to lie where the first one was
        tensor.data = torch.ones(3)
        assert compat.memory(tensor) != before
    assert compat.memory(torch.ones(3, device="meta")) is None


def test_numbers_tell_older_nodes_from_newer() -> None:
    x = rows(3)
    old = x.sin().grad_fn
    first = compat.next_number()
    new = x.cos().grad_fn
    assert old is not None
    assert new is not None
    assert first is not None
    assert compat.number(old) < first <= compat.number(new) < compat.LEAF_NUMBER
    leaf: Any = new.next_functions[0][0]
    assert compat.number(leaf) == compat.LEAF_NUMBER
    assert leaf.variable is x


class Tells(torch.autograd.Function):
    """Notes which of its inputs the running backward wants a gradient for."""

    wanted: list[bool]
    task: int

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        Tells.wanted = [compat.will_run(node) for node, _ in ctx.next_functions]
        Tells.task = compat.graph_task()
        return gradient * b, gradient * a


def test_will_run() -> None:
    a, b = rows(3), rows(3)
    y = Tells.apply(a, b.exp()).sum()  # type: ignore[no-untyped-call]
    for ask, expected in (
        (lambda: torch.autograd.grad(y, a, retain_graph=True), [True, False]),
        (lambda: torch.autograd.grad(y, b, retain_graph=True), [False, True]),
        (lambda: torch.autograd.grad(y, [a, b], retain_graph=True), [True, True]),
        (lambda: y.backward(inputs=[b], retain_graph=True), [False, True]),
        (lambda: y.backward(retain_graph=True), [True, True]),
    ):
        before = getattr(Tells, "task", -1)
        ask()
        assert Tells.wanted == expected
        assert Tells.task != before


def test_has_hooks() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    x = rows(3)
    without: Tensor = Saves.apply(x)  # type: ignore[no-untyped-call]
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        within: Tensor = Saves.apply(x)  # type: ignore[no-untyped-call]
    assert without.grad_fn is not None
    assert within.grad_fn is not None
    assert not compat.has_hooks(without.grad_fn)
    assert compat.has_hooks(within.grad_fn)


def test_saved_by() -> None:
    x, constant = rows(3), rows(3, grad=False)
    y = x * constant
    assert y.grad_fn is not None
    saved = list(compat.saved_by(y.grad_fn))
    assert any(t is constant for t in saved)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_transforms_active() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(compat.transforms_active())
        return x.sin().sum()

    x = torch.ones(3)
    assert not compat.transforms_active()
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.ones(2, 3))
    torch.func.jvp(f, (x,), (x,))
    with forward_ad.dual_level():
        f(x)
    assert seen == [True] * 4
    assert not compat.transforms_active()


def test_share_storage() -> None:
    for device in ("cpu", "meta"):
        x = torch.ones(4, 2, device=device)
        assert compat.share_storage(x, x[1:])
        assert compat.share_storage(x.split(2)[0], x.split(2)[1])
        assert not compat.share_storage(x, x.clone())
    assert not compat.share_storage(torch.eye(2).to_sparse(), torch.eye(2))


def test_version() -> None:
    x = torch.ones(2)
    before = compat.version(x)
    x[:1].add_(1)
    assert compat.version(x) != before
    with torch.inference_mode():
        assert compat.version(torch.ones(2)) is None
