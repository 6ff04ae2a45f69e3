"""Gradients by finite differences, and every way that torch has to ask for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward, grad, gradcheck, gradgradcheck

from chunkcheck import (
    NonReentrant,
    Reentrant,
    chunk_and_checkpoint,
    chunked,
)
from trees import NAMES, Mine, is_reentrant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trees import AnyStrategy

ROWS = 5
REENTRANT: tuple[AnyStrategy, ...] = (
    "reentrant",
    Reentrant(preserve_rng_state=False),
)
EXACT: tuple[AnyStrategy, ...] = (
    *(name for name in NAMES if name not in REENTRANT),
    NonReentrant(preserve_rng_state=False, determinism_check="none", early_stop=False),
    Mine("checkpoint"),
)
SIZES = (1, 2, None)  # 2 leaves a ragged tail
DIMS = (0, 1, -1)
DTYPES = (torch.float64, torch.complex128)


def name(strategy: AnyStrategy) -> str:
    """Return a short name for the ids of tests."""
    return strategy if isinstance(strategy, str) else type(strategy).__name__


exact = pytest.mark.parametrize("strategy", EXACT, ids=name)
reentrant = pytest.mark.parametrize("strategy", REENTRANT, ids=name)
every = pytest.mark.parametrize("strategy", [*EXACT, *REENTRANT], ids=name)
sizes = pytest.mark.parametrize("size", SIZES)
# torch says so once per process, of any backward with create_graph=True.
warned = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


@dataclass
class Setting:
    """A small function of rows with all kinds of tensors to differentiate by."""

    x: Tensor  # rows along `dim`
    one: Tensor  # one row, broadcast
    whole: Tensor
    weight: torch.nn.Parameter
    frozen: torch.nn.Parameter
    root: Tensor  # of the captured activation
    dim: int

    @classmethod
    def make(
        cls, device: torch.device, dtype: torch.dtype = torch.float64, dim: int = 0
    ) -> Setting:
        """Return it with random numbers."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            data = torch.randn(shape, generator=generator, dtype=dtype).to(device)
            return data.requires_grad_()

        shape = (ROWS, 3) if dim == 0 else (3, ROWS)
        single = (1, 3) if dim == 0 else (3, 1)
        return cls(
            x=normal(*shape),
            one=normal(*single),
            whole=normal(3),
            weight=torch.nn.Parameter(normal(3, 2).detach()),
            frozen=torch.nn.Parameter(normal(2).detach(), requires_grad=False),
            root=normal(2),
            dim=dim,
        )

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the gradients are taken by."""
        return self.x, self.one, self.whole, self.weight, self.root

    def f(
        self, x: Tensor, rest: dict[str, Tensor], activation: Tensor
    ) -> dict[str, Any]:
        """Compute two results, of which the second does not depend on all."""
        r = x.movedim(self.dim, 0) * rest["one"].movedim(self.dim, 0)
        r = (r * r + rest["whole"].sin()) @ self.weight * activation + self.frozen
        y = r / (1 + r.abs().square().sum(1, keepdim=True))
        return {
            "y": y.movedim(0, self.dim),
            "z": (x * 2).square(),
            "count": y.real.argmax(1),
        }

    def chunked(
        self, size: int | None, strategy: AnyStrategy, history: bool = True
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the function of x, one and whole, in chunks."""

        def call(x: Tensor, one: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
            activation = self.root.sin() if history else self.root
            result = chunk_and_checkpoint(
                lambda x, rest: self.f(x, rest, activation),
                x,
                {"one": one, "whole": whole},
                chunk_size=size,
                batch_dim=(self.dim, {"one": self.dim, "whole": None}),
                out_dim={"y": self.dim, "z": self.dim, "count": 0},
                strategy=strategy,
            )
            return result["y"], result["z"]

        return call

    def plain(
        self, history: bool = True
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the same function, plain."""

        def call(x: Tensor, one: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
            activation = self.root.sin() if history else self.root
            result = self.f(x, {"one": one, "whole": whole}, activation)
            return result["y"], result["z"]

        return call


def loss(outputs: Sequence[Tensor]) -> Tensor:
    """Return a real number made of all outputs."""
    total = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
    for index, output in enumerate(outputs):
        flat = output.reshape(-1)
        weights = torch.arange(1, flat.numel() + 1, device=flat.device) / flat.numel()
        total = (
            total
            + (
                (flat.real + 3 * flat.imag if flat.is_complex() else flat)
                * (weights + index)
            ).sum()
        )
    return total


def assert_equal(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None]
) -> None:
    """Assert that gradients are equal up to rounding, None where expected."""
    assert [g is None for g in found] == [g is None for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- finite differences


@exact
@sizes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradcheck(
    strategy: AnyStrategy,
    size: int | None,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    setting = Setting.make(device, dtype, dim)
    call = setting.chunked(size, strategy)
    # The captured ones are changed in place by gradcheck, so they count as inputs too.
    assert gradcheck(
        lambda x, one, whole, *_captured: call(x, one, whole),
        setting.inputs,
        fast_mode=True,
    )


@exact
@pytest.mark.parametrize("size", [2, None])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradgradcheck(
    strategy: AnyStrategy,
    size: int | None,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    setting = Setting.make(device, dtype, dim)
    call = setting.chunked(size, strategy)
    assert gradgradcheck(
        lambda x, one, whole, *_captured: call(x, one, whole),
        setting.inputs,
        fast_mode=True,
        gen_non_contig_grad_outputs=size == 2,
    )


@pytest.mark.parametrize("strategy", ["auto", "none"])
@pytest.mark.filterwarnings("ignore:Please use `torch.vmap`")  # torch 2.4's own
def test_gradcheck_in_full(strategy: AnyStrategy, device: torch.device) -> None:
    """Every element rather than a random direction, with batched gradients."""
    setting = Setting.make(device)
    call = setting.chunked(2, strategy)

    def function(x: Tensor, one: Tensor, whole: Tensor, *_captured: Tensor) -> Any:
        return call(x, one, whole)

    assert gradcheck(function, setting.inputs, check_batched_grad=True)
    assert gradgradcheck(function, setting.inputs)


@exact
def test_gradcheck_sees_a_wrong_gradient(
    strategy: AnyStrategy, device: torch.device
) -> None:
    x = torch.randn(ROWS, 3, dtype=torch.float64, device=device, requires_grad=True)

    def wrong(x: Tensor) -> Tensor:
        return x.detach() * x

    def function(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(wrong, x, chunk_size=2, strategy=strategy)

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(function, x)


# ------------------------------------------------------------------------- reentrant


@reentrant
@sizes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reentrant_backward(
    strategy: AnyStrategy,
    size: int | None,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    ours, plain = (Setting.make(device, dtype, dim) for _ in range(2))
    found = ours.chunked(size, strategy, history=False)(*ours.inputs[:3])
    expected = plain.plain(history=False)(*plain.inputs[:3])
    assert_equal(found, expected)
    backward(loss(found))
    backward(loss(expected))
    assert_equal([t.grad for t in ours.inputs], [t.grad for t in plain.inputs])
    assert ours.frozen.grad is None


@reentrant
@pytest.mark.parametrize("size", [2, None])
@warned
def test_reentrant_refuses_what_it_cannot_do(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    call = setting.chunked(size, strategy, history=False)
    inputs = setting.inputs[:3]
    with pytest.raises(RuntimeError, match=r"use_reentrant=False|non_reentrant"):
        grad(loss(call(*inputs)), inputs)
    with pytest.raises(RuntimeError, match=r"use_reentrant=False|non_reentrant"):
        backward(loss(call(*inputs)), inputs=[setting.x])
    with pytest.raises(RuntimeError, match=r"use_reentrant=False|non_reentrant"):
        gradcheck(call, inputs, fast_mode=True)
    with pytest.raises(RuntimeError, match="strategy='non_reentrant'"):
        backward(loss(call(*inputs)), create_graph=True)
    assert [t.grad for t in setting.inputs] == [None] * 5


@reentrant
def test_reentrant_refuses_a_captured_history_in_two_chunks(
    strategy: AnyStrategy, device: torch.device
) -> None:
    setting = Setting.make(device)
    call = setting.chunked(2, strategy, history=True)
    with pytest.raises(RuntimeError, match="second time"):
        backward(loss(call(*setting.inputs[:3])))


# ----------------------------------------------------------------------- autograd.grad


@exact
@sizes
def test_grad_equals_plain(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    found = setting.chunked(size, strategy)(*setting.inputs[:3])
    expected = setting.plain()(*setting.inputs[:3])
    assert_equal(
        grad(loss(found), setting.inputs), grad(loss(expected), setting.inputs)
    )
    assert [t.grad for t in setting.inputs] == [None] * 5


@exact
@sizes
def test_allow_unused(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    unrelated = torch.ones(2, device=device, requires_grad=True)
    inputs = (*setting.inputs, unrelated)
    _, found = setting.chunked(size, strategy)(*setting.inputs[:3])
    _, expected = setting.plain()(*setting.inputs[:3])
    ours = grad(loss([found]), inputs, allow_unused=True, retain_graph=True)
    theirs = grad(loss([expected]), inputs, allow_unused=True)
    assert_equal(ours, theirs)
    assert [g is None for g in ours] == [False, True, True, True, True, True]
    zeros = grad(
        loss([found]),
        inputs,
        allow_unused=True,
        materialize_grads=True,
        retain_graph=True,
    )
    assert all(isinstance(g, Tensor) for g in zeros)
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        grad(loss([found]), inputs)


@exact
@sizes
def test_is_grads_batched(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    y, _ = setting.chunked(size, strategy)(*setting.inputs[:3])
    expected, _ = setting.plain()(*setting.inputs[:3])
    basis = torch.eye(y.numel(), dtype=y.dtype, device=device)
    rows = basis.reshape(-1, *y.shape)
    assert_equal(
        grad(y, setting.inputs, rows, is_grads_batched=True),
        grad(expected, setting.inputs, rows, is_grads_batched=True),
    )


@exact
@sizes
def test_grad_of_grad(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    """A gradient penalty, trained by backward; then a third derivative."""

    def run(setting: Setting, call: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        first = grad(loss(call(*setting.inputs[:3])), setting.inputs, create_graph=True)
        penalty = loss([g.square() for g in first])
        second = grad(penalty, setting.inputs, create_graph=True)
        third = grad(loss(second), setting.inputs, retain_graph=True)
        backward(penalty)
        return [*first, *second, *third, *(t.grad for t in setting.inputs)]

    ours, plain = Setting.make(device), Setting.make(device)
    assert_equal(run(ours, ours.chunked(size, strategy)), run(plain, plain.plain()))


@exact
@sizes
@warned
def test_backward_with_create_graph(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    def run(setting: Setting, call: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        backward(loss(call(*setting.inputs[:3])), create_graph=True)
        first = [t.grad for t in setting.inputs]
        second = grad(loss([g for g in first if g is not None]), setting.inputs)
        for t in setting.inputs:
            t.grad = None  # breaks the cycle of gradient and graph
        return [*first, *second]

    ours, plain = Setting.make(device), Setting.make(device)
    found = run(ours, ours.chunked(size, strategy))
    assert_equal(found, run(plain, plain.plain()))


# ---------------------------------------------------------------------------- backward


@exact
@sizes
def test_backward_to_some_inputs(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    for chosen in itertools.combinations(range(5), 2):
        ours, plain = Setting.make(device), Setting.make(device)
        for setting, call in (
            (ours, ours.chunked(size, strategy)),
            (plain, plain.plain()),
        ):
            inputs = [setting.inputs[i] for i in chosen]
            backward(loss(call(*setting.inputs[:3])), inputs=inputs)
        found = [t.grad for t in ours.inputs]
        assert [g is not None for g in found] == [i in chosen for i in range(5)]
        assert_equal(found, [t.grad for t in plain.inputs])


@every
@sizes
def test_retain_graph_twice(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    call = setting.chunked(size, strategy, history=not is_reentrant(strategy))
    total = loss(call(*setting.inputs[:3]))
    backward(total, retain_graph=True)
    once = [t.grad.clone() for t in setting.inputs if t.grad is not None]
    backward(total, retain_graph=True)
    backward(total)
    thrice = [t.grad for t in setting.inputs]
    assert_equal(thrice, [3 * g for g in once])


@exact
@sizes
def test_outputs_backward_one_after_the_other(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    ours, plain = Setting.make(device), Setting.make(device)
    for setting, call in ((ours, ours.chunked(size, strategy)), (plain, plain.plain())):
        for output in call(*setting.inputs[:3]):
            backward(loss([output]), retain_graph=True)
    assert_equal([t.grad for t in ours.inputs], [t.grad for t in plain.inputs])


@every
@sizes
def test_gradients_accumulate_over_calls(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    ours, plain = Setting.make(device), Setting.make(device)
    history = not is_reentrant(strategy)
    for setting, call in (
        (ours, ours.chunked(size, strategy, history)),
        (plain, plain.plain(history)),
    ):
        backward(loss([*call(*setting.inputs[:3]), *call(*setting.inputs[:3])]))
        backward(loss(call(*setting.inputs[:3])))
    assert_equal([t.grad for t in ours.inputs], [t.grad for t in plain.inputs])


@every
@sizes
@pytest.mark.parametrize("what", ["x", "one", "whole", "weight", "root"])
def test_only_one_requires_a_gradient(
    strategy: AnyStrategy, size: int | None, what: str, device: torch.device
) -> None:
    ours, plain = Setting.make(device), Setting.make(device)
    history = not is_reentrant(strategy)
    for setting, call in (
        (ours, ours.chunked(size, strategy, history)),
        (plain, plain.plain(history)),
    ):
        for tensor in setting.inputs:
            tensor.requires_grad_(tensor is getattr(setting, what))
        y, z = call(*setting.inputs[:3])
        assert y.requires_grad
        assert z.requires_grad == (what == "x")
        backward(loss([y]))
    found = getattr(ours, what).grad
    assert sum(t.grad is not None for t in ours.inputs) == 1
    assert_equal([found], [getattr(plain, what).grad])


@every
@sizes
def test_what_only_an_unused_result_needs_gets_no_gradient(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    setting = Setting.make(device)
    call = setting.chunked(size, strategy, history=not is_reentrant(strategy))
    _, z = call(*setting.inputs[:3])  # the first result needs all five
    backward(loss([z]))
    assert [t.grad is None for t in setting.inputs] == [False, True, True, True, True]


@exact
@sizes
def test_chunked_calls_nest(
    strategy: AnyStrategy, size: int | None, device: torch.device
) -> None:
    """Chunks within chunks, in chains, twice differentiable."""
    x = torch.randn(ROWS, 4, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return (x * w[:, None]).sin().cumsum(0)

    def outer(x: Tensor) -> Tensor:
        columns = chunked(inner, chunk_size=size, batch_dim=1, out_dim=1)
        return columns(x.movedim(0, 1)).movedim(1, 0)

    def run(g: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first = grad(loss([g(g(x))]), (x, w), create_graph=True)
        return [*first, *grad(loss(first), (x, w))]

    def plain(x: Tensor) -> Tensor:
        return inner(x.movedim(0, 1)).movedim(1, 0)

    assert plain(x).shape == x.shape
    assert_equal(run(chunked(outer, chunk_size=2, strategy=strategy)), run(plain))
