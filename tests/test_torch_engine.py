"""Tests of `_torch.engine`: which way a call takes, and its options on both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkcheck import Fused, chunk_and_checkpoint
from reference import (
    Counted,
    assert_same_as_loop,
    assert_same_as_plain,
    net,
    rows,
    without_gc,
)

ways = pytest.mark.parametrize("history", [False, True], ids=["one_node", "own_graph"])
OWN_GRAPH = "each chunk keeps its own graph, since "


def capture(
    *, history: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return a leaf, and what `f` captures: with a history, each chunk keeps its graph.

    Backward may go through that history any number of times.
    """
    leaf = rows(4, dtype=dtype)
    return leaf, -leaf if history else leaf


class Sub(Tensor):
    pass


def hooked(tensor: Tensor) -> Tensor:
    tensor.register_hook(lambda gradient: gradient * 1)
    return tensor


HIDDEN: list[Tensor] = []


def hidden(tensor: Tensor) -> Callable[[], Any]:
    """Return a function that gives the tensor, which cannot be found from it."""
    HIDDEN.append(tensor)
    index = len(HIDDEN) - 1
    return lambda: globals()["HIDDEN"][index]  # a name that only running it computes


def sub() -> Tensor:
    return rows(4, grad=False).as_subclass(Sub).requires_grad_()


HISTORY = "f captures a tensor that was computed from others"
HOOKS = "f captures a tensor with hooks"
# What `f` captures, and why it has to take the general way.
CAPTURED: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "leaf": (lambda: rows(4), None),
    "parameter": (lambda: nn.Parameter(rows(4, grad=False)), None),
    "constant": (lambda: rows(4, grad=False), None),
    "constant_subclass": (lambda: rows(4, grad=False).as_subclass(Sub), None),
    "history": (lambda: -rows(4), HISTORY),
    "hooks": (lambda: hooked(rows(4)), HOOKS),
    "subclass": (sub, "f captures a Sub"),
}


@pytest.mark.parametrize("found", [True, False], ids=["found", "unfound"])
@pytest.mark.parametrize("name", CAPTURED)
def test_what_f_captures_decides_the_way(
    name: str, caplog: pytest.LogCaptureFixture, *, found: bool
) -> None:
    make, reason = CAPTURED[name]
    tensor = make()
    give = (lambda: tensor) if found else hidden(tensor)

    def f(x: Tensor) -> Tensor:
        y: Tensor = (x * give()).sin()
        return y.as_subclass(Tensor)

    counted = Counted(f)
    chunk_and_checkpoint(counted, rows(5, 4), chunk_size=2)
    # What is found in the first chunk only has it run once more.
    assert len(counted.rows) == (4 if reason and not found else 3)
    caplog.clear()
    assert_same_as_plain(
        f,
        (rows(5, 4),),
        chunk_size=2,
        strategy="auto",
        captured=[tensor],
    )
    messages = [r.getMessage() for r in caplog.records if r.name == "chunkcheck"]
    assert messages[:1] == ([] if reason is None else [OWN_GRAPH + reason])
    assert len(messages) <= 2
    again = [m for m in messages if m.startswith("f runs once more on the first 1 chu")]
    assert len(again) == (reason is not None and not found)


def test_a_parameter_that_is_there_only_while_f_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight, values = rows(4), rows(4, grad=False)

    def f(x: Tensor) -> Tensor:
        weight.untyped_storage().resize_(32)
        with torch.no_grad():
            weight.copy_(values)
        y = x + weight
        weight.untyped_storage().resize_(0)
        return y

    chunk_and_checkpoint(f, rows(5, 4), chunk_size=2)
    assert OWN_GRAPH + "f captures a parameter that is there only while" in caplog.text


ARGUMENTS: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "history": (lambda: rows(5, 4).exp(), None),
    "hooks": (lambda: hooked(rows(5, 4)), "an argument has hooks"),
    "subclass": (
        lambda: rows(5, 4).as_subclass(Sub),
        "an argument is of a subclass of Tensor, sparse or nested",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_decide_the_way(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = ARGUMENTS[name]
    x = make()
    y = chunk_and_checkpoint(lambda x: x.sin(), x, chunk_size=2)
    torch.testing.assert_close(y, x.sin())
    (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.testing.assert_close(got, x.cos().detach())
    messages = [r.getMessage() for r in caplog.records if r.name == "chunkcheck"]
    assert len(messages) == (reason is not None)
    assert reason is None or messages[0].startswith(OWN_GRAPH + reason)


def test_a_sparse_argument(caplog: pytest.LogCaptureFixture) -> None:
    x, table = rows(5, 4), torch.eye(4, dtype=torch.float64).to_sparse()
    table.requires_grad_()

    def f(x: Tensor, table: Tensor) -> Tensor:
        y: Tensor = torch.sparse.mm(table, x.T).T
        return y.sin()

    y = chunk_and_checkpoint(f, x, table, batch_dim=(0, None), chunk_size=2)
    got = torch.autograd.grad(y.sum(), [x, table])
    expected = torch.autograd.grad(f(x, table).sum(), [x, table])
    for a, b in zip(got, expected, strict=True):
        assert a.layout == b.layout
        torch.testing.assert_close(a.to_dense(), b.to_dense())
    assert OWN_GRAPH + "an argument is of a subclass" in caplog.text


def test_a_call_without_gradients_takes_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shift = -rows(4)
    with torch.no_grad():
        y = chunk_and_checkpoint(lambda x: x + shift, rows(5, 4), chunk_size=2)
    assert not y.requires_grad
    assert OWN_GRAPH not in caplog.text


def test_an_autocast_cache_from_outside_is_no_capture(
    caplog: pytest.LogCaptureFixture,
) -> None:
    linear, x = nn.Linear(4, 4), rows(5, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x)
        y = chunk_and_checkpoint(linear, x, chunk_size=2)
    y.float().sum().backward()
    assert linear.weight.grad is not None
    assert OWN_GRAPH not in caplog.text


class Noisy(nn.Module):
    """Draws random numbers and writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = nn.functional.dropout(self.norm(x), 0.5) * (1 + self.count)
        return y


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_capture_found_late_rewinds(
    chunk: int, caplog: pytest.LogCaptureFixture
) -> None:
    leaf, module = rows(4), Noisy().double()
    shift = -leaf
    unfound = hidden(shift)
    x = rows(6, 4, grad=False).abs() * -1
    x[2 * chunk : 2 * chunk + 2] *= -1
    saved = {key: t.clone() for key, t in module.state_dict().items()}

    def f(x: Tensor) -> Tensor:
        y: Tensor = module(x)
        return y if x.sum() < 0 else y * unfound()

    assert_same_as_loop(
        f,
        (x.requires_grad_(),),
        chunk_size=2,
        strategy="auto",
        captured=[module, leaf],
        state=lambda: {k: t.clone() for k, t in module.named_buffers()},
        reset=lambda: module.load_state_dict({k: t.clone() for k, t in saved.items()}),
    )
    assert OWN_GRAPH + HISTORY in caplog.text


@ways
@pytest.mark.parametrize("keep", [0, 1, 2, 9])
@pytest.mark.parametrize("grad_of_grad", [False, True])
def test_keep_chunks(keep: int, *, history: bool, grad_of_grad: bool) -> None:
    leaf, shift = capture(history=history)
    f = Counted(lambda x: ((x * shift).exp(), x.sin() * leaf))
    x = rows(5, 4)

    def gradients(call: Callable[[], Any]) -> list[Tensor]:
        a, b = call()
        loss = (a * b).sum()
        found = torch.autograd.grad(loss, [x, leaf], create_graph=grad_of_grad)
        if grad_of_grad:
            loss = torch.stack([g.square().sum() for g in found]).sum()
            found += torch.autograd.grad(loss, [x, leaf])
        return list(found)

    expected = gradients(lambda: f.f(x))
    options = Fused(keep_chunks=keep)
    got = gradients(lambda: chunk_and_checkpoint(f, x, chunk_size=2, strategy=options))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(f.rows) >= 3 + max(0, 3 - keep)
    assert grad_of_grad or len(f.rows) == 3 + max(0, 3 - keep)


@ways
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_what_is_kept_is_freed_by_backward(keep: int, *, history: bool) -> None:
    _, shift = capture(history=history)
    alive: list[StorageWeakRef] = []

    def f(x: Tensor) -> Tensor:
        hidden = x.exp()
        alive.append(StorageWeakRef(hidden.untyped_storage()))
        return torch.mul(hidden.sin(), shift)

    def held() -> int:
        return sum(not ref.expired() for ref in alive)

    with without_gc():
        options = Fused(keep_chunks=keep)
        y = chunk_and_checkpoint(f, rows(5, 4), chunk_size=2, strategy=options)
        assert held() == min(keep, 3)
        y.sum().backward()
        assert held() == 0
        y = chunk_and_checkpoint(f, rows(5, 4), chunk_size=2, strategy=options)
        assert held() == min(keep, 3)
        del y
        assert held() == 0


@ways
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_a_second_backward(keep: int, *, history: bool) -> None:
    leaf, shift = capture(history=history)
    x = rows(5, 4)
    y = chunk_and_checkpoint(
        lambda x: (x * shift).exp(),
        x,
        chunk_size=2,
        strategy=Fused(keep_chunks=keep),
    ).sum()
    expected = torch.autograd.grad((x * shift).exp().sum(), [x, leaf])
    for retain in (True, True, False):
        got = torch.autograd.grad(y, [x, leaf], retain_graph=retain)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, [x, leaf])


@ways
@pytest.mark.parametrize("kind", ["captured", "whole"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", 512), (torch.float64, 512), (None, 256)]
)
def test_accumulate_dtype(
    kind: str, asked: Any, expected: float, *, history: bool, create_graph: bool
) -> None:
    """Added to 256, one is lost in bf16."""
    _, shift = capture(history=history, dtype=torch.bfloat16)
    weight = rows(4, dtype=torch.bfloat16)
    x = torch.ones(512, 4, dtype=torch.bfloat16)
    options = Fused(accumulate_dtype=asked)
    if kind == "whole":
        y = chunk_and_checkpoint(
            lambda x, weight: x * weight + shift,
            x,
            weight,
            batch_dim=(0, None),
            chunk_size=1,
            strategy=options,
        )
    else:
        y = chunk_and_checkpoint(
            lambda x: x * weight + shift, x, chunk_size=1, strategy=options
        )
    (got,) = torch.autograd.grad(y.sum(), weight, create_graph=create_graph)
    assert got.dtype == torch.bfloat16
    # Where each chunk keeps its own graph, torch itself sums what is captured.
    torchs_own = history and kind == "captured"
    assert got.tolist() == [256 if torchs_own else expected] * 4


@ways
@pytest.mark.parametrize("check", ["default", "values", "none"])
def test_determinism_check(check: Any, *, history: bool) -> None:
    _, shift = capture(history=history)
    calls = 0

    def f(x: Tensor) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        drift = 1e-3 if calls > 3 and x[0, 0] == 2 else 0.0
        return {"a": (x * shift).sin(), "b": [x.exp() + drift]}

    x = torch.arange(5.0, dtype=torch.float64)[:, None].repeat(1, 4).requires_grad_()
    result: dict[str, Any] = chunk_and_checkpoint(
        f, x, chunk_size=2, strategy=Fused(determinism_check=check)
    )
    loss = result["a"].sum() + result["b"][0].sum()
    if check == "values":
        message = (
            r"(?s)recompute of rows 2:4 of 5 gave other values of result\['b'\]\[0\]"
        )
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
        assert x.grad is None
    else:
        loss.backward()
        torch.testing.assert_close(x.grad, (x * shift).cos() * shift + x.exp())


@ways
def test_values_that_agree_pass(*, history: bool) -> None:
    leaf, shift = capture(history=history)
    assert_same_as_plain(
        lambda x: (nn.functional.dropout(x, 0.0) * shift, {"n": x * torch.nan}, 3),
        (rows(5, 4),),
        chunk_size=2,
        strategy=Fused(determinism_check="values"),
        captured=leaf,
    )


@ways
@pytest.mark.parametrize("required", [True, False])
def test_a_parameter_that_is_frozen_or_not_before_backward(
    *, history: bool, required: bool
) -> None:
    """Frozen, it gets no gradient, as in plain `f`; thawed, it was a constant."""
    leaf, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    weight = module[0].weight  # type: ignore[index]
    weight.requires_grad_(required)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        leaves = [x, leaf, *module.parameters()]
        weight.requires_grad_(required)
        y = call(x)
        weight.requires_grad_(not required)
        y.sum().backward()
        found = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        return found

    def f(x: Tensor) -> Tensor:
        y: Tensor = module(x) * shift
        return y

    expected = gradients(f)
    got = gradients(lambda x: chunk_and_checkpoint(f, x, chunk_size=2))
    assert [g is None for g in got] == [g is None for g in expected]
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)
