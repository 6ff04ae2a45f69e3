"""Tests of the engine's backward: what of torch's own it has to do, on both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from chunkcheck import Fused, chunk_and_checkpoint
from reference import Counted, assert_close, assert_same_as_plain, net, rows

ways = pytest.mark.parametrize("history", [False, True], ids=["one_node", "own_graph"])
Call = Callable[[Callable[..., Any], Tensor], Any]


def capture(*, history: bool) -> tuple[Tensor, Tensor]:
    """Return a leaf, and what `f` captures, which may be computed from it."""
    leaf = rows(4)
    return leaf, -leaf if history else leaf


def plain(f: Callable[..., Any], x: Tensor) -> Any:
    return f(x)


def in_chunks(f: Callable[..., Any], x: Tensor) -> Any:
    return chunk_and_checkpoint(f, x, chunk_size=2)


def keeping_one(f: Callable[..., Any], x: Tensor) -> Any:
    return chunk_and_checkpoint(f, x, chunk_size=2, strategy=Fused(keep_chunks=1))


def assert_all_close(got: Any, expected: Any) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), index
        if a is not None:
            assert_close(a, b, str(index))


@ways
@pytest.mark.parametrize("call", [in_chunks, keeping_one])
def test_derivatives_up_to_the_third_order(call: Call, *, history: bool) -> None:
    leaf, shift = capture(history=history)
    module = net()
    x = rows(5, 4)

    def f(x: Tensor) -> Tensor:
        y: Tensor = module(x) * (x * shift).sin()
        return y

    def derivatives(call: Call) -> list[Tensor | None]:
        leaves = [x, leaf, *module.parameters()]
        found: list[Tensor | None] = []
        y = call(f, call(f, x)).square().sum()
        for order in (1, 2, 3):
            gradients = torch.autograd.grad(y, leaves, create_graph=order < 3)
            found += gradients
            y = sum(g.square().sum() for g in gradients)
        return found

    assert_all_close(derivatives(call), derivatives(plain))


@ways
def test_a_gradient_penalty(*, history: bool) -> None:
    """The usual second derivative: into parameters, by `.backward()`."""
    leaf, shift = capture(history=history)
    module = net()

    def penalised(call: Call) -> list[Tensor | None]:
        leaves = [leaf, *module.parameters()]
        x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
        y = call(lambda x: module(x * shift), x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + gradient.square().sum()).backward()
        found = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        return [*found, x.grad]

    assert_all_close(penalised(in_chunks), penalised(plain))


@ways
@pytest.mark.parametrize("negative_first", [False, True])
def test_chunks_of_which_some_have_no_second_derivative(
    *, history: bool, negative_first: bool
) -> None:
    _, shift = capture(history=history)
    x = torch.ones(4, 4, dtype=torch.float64)
    x[:2] *= -1 if negative_first else 1
    x[2:] *= 1 if negative_first else -1
    x.requires_grad_()

    def f(x: Tensor) -> Tensor:
        return (x * 2 if x.sum() > 0 else x**3) + shift

    def twice(call: Call) -> list[Tensor | None]:
        (first,) = torch.autograd.grad(call(f, x).sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), x)]

    def loop(f: Callable[..., Any], x: Tensor) -> Tensor:
        return torch.cat([f(piece) for piece in x.split(2)])

    assert_all_close(twice(in_chunks), twice(loop))


@ways
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1,)])
def test_results_one_after_the_other(order: tuple[int, ...], *, history: bool) -> None:
    leaf, shift = capture(history=history)
    other = rows(4)
    x = rows(5, 4)

    def f(x: Tensor) -> list[Tensor]:
        return [x.sin() * shift, x.exp(), x.cos() * other]

    def gradients(call: Call) -> list[Any]:
        leaves = [x, leaf, other]
        results, found = call(f, x), []
        for index in order:
            results[index].square().sum().backward()
            found += [None if t.grad is None else t.grad.clone() for t in leaves]
        for t in leaves:
            t.grad = None
        return found

    assert_all_close(gradients(in_chunks), gradients(plain))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@ways
def test_a_hook_after_the_call_acts_once(*, history: bool) -> None:
    """As in plain `f`, on the whole gradient; whatever the chunks do in between."""
    leaf, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    leaves = [leaf, x, *module.parameters()]

    def gradients(call: Call, *, create_graph: bool) -> tuple[list[Any], int]:
        seen: list[Tensor] = []

        def double(gradient: Tensor) -> Tensor:
            seen.append(gradient)
            return gradient * 2

        y = call(lambda x: module(x) * shift, x)
        handles = [t.register_hook(double) for t in leaves]
        y.square().sum().backward(create_graph=create_graph)
        found = [t.grad.detach() for t in leaves if t.grad is not None]
        for t in leaves:
            t.grad = None
        for handle in handles:
            handle.remove()
        return found, len(seen)

    for create_graph in (False, True):
        expected, count = gradients(plain, create_graph=create_graph)
        got, found = gradients(in_chunks, create_graph=create_graph)
        assert found == count == len(leaves)
        assert_all_close(got, expected)


@ways
@pytest.mark.parametrize("inner_leaf", [True, False])
@pytest.mark.parametrize("call", [in_chunks, keeping_one])
def test_forces(call: Call, *, history: bool, inner_leaf: bool) -> None:
    """`f` itself calls autograd, on its argument or on a leaf that it makes."""
    leaf, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    leaves = [leaf, *module.parameters(), x]

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        place = x.detach().requires_grad_() if inner_leaf else x
        energy = module(place).square() * shift
        (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
        return energy, force

    def train(call: Call) -> list[Tensor | None]:
        energy, force = call(f, x)
        loss = energy.sum() + force.square().sum()
        loss.backward()
        found = [energy, force, *(t.grad for t in leaves)]
        for t in leaves:
            t.grad = None
        return found

    assert_all_close(train(call), train(plain))


@ways
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_a_leaf_that_f_makes_in_a_second_backward(
    keep: int, *, history: bool, create_graph: bool
) -> None:
    """Kept or not, it is no capture: each run has another one."""
    leaf, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    leaves = [leaf, *module.parameters()]

    def f(x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = module(place).square() * shift
        (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
        return force

    strategy = Fused(keep_chunks=keep)
    loss = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy).square().sum()
    expected = torch.autograd.grad(f(x).square().sum(), leaves, allow_unused=True)
    for _ in range(2):
        got = torch.autograd.grad(
            loss,
            leaves,
            allow_unused=True,
            retain_graph=True,
            create_graph=create_graph,
        )
        assert_all_close(got, expected)


@ways
def test_forces_alone(*, history: bool) -> None:
    leaf, shift = capture(history=history)

    def f(x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad((x * shift).exp().sum(), x)
        return force * x * leaf

    x = rows(5, 4)
    assert_same_as_plain(f, (x,), chunk_size=2, strategy="auto", captured=leaf)


@ways
def test_hooks_around_see_the_arguments_once(*, history: bool) -> None:
    leaf, shift = capture(history=history)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    x, table = rows(5, 4), rows(3, 4)

    def f(x: Tensor, table: Tensor) -> Tensor:
        return (x.exp() @ table.T @ table).sin() * shift

    with saved_tensors_hooks(pack, unpack):
        y = chunk_and_checkpoint(f, x, table, batch_dim=(0, None), chunk_size=2)
    seen = [t.data_ptr() for t in packed if t.numel()]
    assert sorted(seen) == sorted([x.data_ptr(), table.data_ptr()])
    for count in (1, 2):
        got = torch.autograd.grad(y.sum(), [x, table, leaf], retain_graph=True)
        assert len([t for t in unpacked if t.numel()]) == 2 * count
    assert_all_close(got, torch.autograd.grad(f(x, table).sum(), [x, table, leaf]))


@ways
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_around(*, history: bool, early_stop: bool) -> None:
    leaf, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    f = Counted(lambda x: nn.functional.dropout(module(x) * shift, 0.5))

    def block(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(f, x.sin(), chunk_size=2).exp()
        return y

    leaves = [x, leaf, *module.parameters()]
    torch.manual_seed(3)
    expected = torch.autograd.grad(block(x).sum(), leaves)
    torch.manual_seed(3)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        y = checkpoint(block, x, use_reentrant=False)
    f.rows.clear()
    assert_all_close(torch.autograd.grad(y.sum(), leaves), expected)
    assert len(f.rows) == 6  # torch's recompute, and ours in it


@ways
def test_a_checkpoint_inside(*, history: bool) -> None:
    leaf, shift = capture(history=history)
    module = net()
    assert_same_as_plain(
        lambda x: checkpoint(lambda x: module(x) * shift, x, use_reentrant=False).sin(),
        (rows(5, 4),),
        chunk_size=2,
        strategy="auto",
        captured=[module, leaf],
    )


@ways
@pytest.mark.parametrize("inner_history", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_chunked_within_chunked(
    *, history: bool, inner_history: bool, create_graph: bool
) -> None:
    leaf, shift = capture(history=history)
    inner_leaf, inner_shift = capture(history=inner_history)
    module, x = net(), rows(5, 6, 4)
    leaves = [x, leaf, inner_leaf, *module.parameters()]

    def inner(x: Tensor) -> Tensor:
        y: Tensor = module(x) * inner_shift
        return y

    def outer(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(inner, x, chunk_size=4, batch_dim=1).sin() * shift

    def gradients(call: Call, f: Callable[..., Any]) -> list[Tensor | None]:
        found = torch.autograd.grad(call(f, x).sum(), leaves, create_graph=create_graph)
        if create_graph:
            loss = sum(g.square().sum() for g in found)
            assert isinstance(loss, Tensor)
            found += torch.autograd.grad(loss, leaves)
        return list(found)

    assert_all_close(
        gradients(in_chunks, outer), gradients(plain, lambda x: inner(x).sin() * shift)
    )


@ways
@pytest.mark.parametrize("fails", ["f", "hook"])
def test_a_backward_that_fails_can_be_done_again(fails: str, *, history: bool) -> None:
    leaf, shift = capture(history=history)
    x = rows(5, 4)
    broken = False

    def f(x: Tensor) -> Tensor:
        if broken and fails == "f":
            raise KeyError
        return (x * shift).exp()

    def hook(_: Tensor) -> None:
        if broken and fails == "hook":
            raise KeyError

    y = in_chunks(f, x)
    loss = y.sum()
    y.register_hook(hook)
    broken = True
    with pytest.raises(KeyError):
        torch.autograd.grad(loss, [x, leaf], retain_graph=True)
    broken = False
    assert_all_close(
        torch.autograd.grad(loss, [x, leaf]),
        torch.autograd.grad(f(x).sum(), [x, leaf]),
    )


@ways
def test_second_derivatives_of_a_result_that_is_not_joined(*, history: bool) -> None:
    """Its gradient is that of the first chunk alone, whichever derivative it is."""
    leaf, shift = capture(history=history)
    x = rows(5, 4)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * shift).sin(), shift.exp().sum()

    def derivatives(*results: Tensor) -> list[Tensor]:
        loss = (results[0] * results[1]).sum()
        first = torch.autograd.grad(loss, [x, leaf], create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(penalty, [x, leaf])]

    got = chunk_and_checkpoint(f, x, chunk_size=2, out_dim=(0, None))
    assert_all_close(derivatives(*got), derivatives(*f(x)))


@ways
def test_hooks_that_f_puts_on_what_it_is_given(*, history: bool) -> None:
    """Each run has tensors of its own, so that its hooks do not pile up."""
    leaf, shift = capture(history=history)

    def f(x: Tensor, table: Tensor) -> Tensor:
        for tensor in (x, table):
            tensor.register_hook(lambda gradient: gradient * 3)
        return (x @ table).sin() * shift

    x, table = rows(6, 4), rows(4, 4)
    inputs = [x, table, leaf]
    y = chunk_and_checkpoint(f, x, table, batch_dim=(0, None), chunk_size=2)
    # On views, since `f` itself would leave its hooks on the leaves.
    expected = f(x.view_as(x), table.view_as(table))
    assert_all_close(
        torch.autograd.grad(y.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
    )


@ways
@pytest.mark.parametrize("what", ["inplace", "data"])
def test_a_captured_weight_changed_before_backward(what: str, *, history: bool) -> None:
    _, shift = capture(history=history)
    module, x = net(), rows(5, 4)
    weight = next(module.parameters())
    y = in_chunks(lambda x: module(x) * shift, x)
    if what == "data":
        weight.data = torch.zeros_like(weight)
    else:
        with torch.no_grad():
            weight.zero_()
    with pytest.raises(RuntimeError, match=r"Sequential.0.weight.* has been modified"):
        y.sum().backward()
    assert x.grad is None
