"""Gradients of large weights, which products add to their sums, against plain `f`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it
from torch.utils.checkpoint import checkpoint

from chunkcheck import Fused, chunk_and_checkpoint
from chunkcheck._torch import gradients
from reference import Strategy, assert_close, assert_same_as_plain, rows

WIDTH = 200  # a square of it is large in float64
WAYS: list[Strategy] = ["auto", "grad_in_forward", Fused(keep_chunks=1)]
ways = pytest.mark.parametrize("strategy", WAYS, ids=["auto", "in_forward", "kept"])

Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows, a weight and a bias


def inside(f: Function) -> Function:
    """Return `f` under torch's own checkpoint."""
    return lambda x, w, b: checkpoint(f, x, w, b, use_reentrant=False)


def hooked(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    turned = w.t()
    if turned.requires_grad:
        turned.register_hook(lambda gradient: -3 * gradient)
    return x @ turned + b


def hooked_argument(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    w = w.view_as(w)
    w.register_hook(lambda gradient: -gradient)
    return F.linear(x, w, b)


def of_a_part(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w[:WIDTH], b) + F.linear(x[:, :7], w[:, :7], b)


def both_factors(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ (w @ w) + b


def without_x(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Backward comes to the product only for the weight."""
    return x * F.linear(torch.ones_like(x), w) + b


def tied(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    ids = (x.detach()[:, 0].abs() * 10).long() % WIDTH
    return F.linear(F.embedding(ids, w) * x, w, b)


def node_hook(name: str, *, transposed: bool) -> Function:
    """Return a product with a hook on its node, or on that of the transpose."""

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        turned = w.t()
        y = x @ turned
        node = turned.grad_fn if transposed else y.grad_fn
        if node is not None:
            if name == "register_hook":
                node.register_hook(lambda given, _: tuple(3 * g for g in given))
            else:
                node.register_prehook(lambda given: tuple(3 * g for g in given))
        return y + b

    return f


def sparse(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As one takes the logit of the target."""
    first = torch.zeros(len(x), 1, dtype=torch.int64)
    return b.sum() * torch.gather(x @ w, 1, first, sparse_grad=True)


# What adds by products, and what must not.
FUNCTIONS: dict[str, tuple[Function, bool]] = {
    "linear": (F.linear, True),
    "linear without bias": (lambda x, w, b: F.linear(x, w) * b, True),
    "right": (lambda x, w, b: x @ w + b, True),
    "transposed": (lambda x, w, b: x @ w.T + b, True),
    "t": (lambda x, w, b: x @ w.t() + b, True),
    "mT": (lambda x, w, b: x @ w.mT + b, True),
    "left": (lambda x, w, b: (w @ x.t()).t() + b, True),
    "left, transposed": (lambda x, w, b: (w.t() @ x.t()).t() + b, True),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=-0.5), True),
    "twice": (lambda x, w, b: F.linear(F.linear(x, w, b).sin(), w), True),
    "both ways": (lambda x, w, b: F.linear((x @ w).sin(), w, b), True),
    "of three dims": (lambda x, w, b: F.linear(x[:, None].cos(), w, b)[:, 0], True),
    "checkpointed": (inside(F.linear), True),
    "product of the weight": (lambda x, w, b: F.linear(x, w, b) + w.sum(), False),
    "decayed": (lambda x, w, b: F.linear(x, w * 2, b), False),
    "of a part": (of_a_part, False),
    "both factors": (both_factors, False),
    "without x": (without_x, False),
    "tied": (tied, False),
    "sparse gradient": (sparse, True),
    "hook on the transpose": (hooked, False),
    "hook on the product": (node_hook("register_hook", transposed=False), False),
    "prehook on the product": (node_hook("register_prehook", transposed=False), False),
    "hook on the transpose's node": (
        node_hook("register_hook", transposed=True),
        False,
    ),
    "prehook on the transpose's node": (
        node_hook("register_prehook", transposed=True),
        False,
    ),
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list of the products that are added from now on."""
    found: list[Tensor] = []
    add = gradients.Sum.add_product

    def noted(self: gradients.Sum, a: Tensor, b: Tensor, alpha: float) -> None:
        found.append(a)
        add(self, a, b, alpha)

    monkeypatch.setattr(gradients.Sum, "add_product", noted)
    return found


@ways
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_gradients_are_those_of_plain_f(
    name: str, strategy: Strategy, products: list[Tensor], *, captured: bool
) -> None:
    f, adds = FUNCTIONS[name]
    x, w, b = rows(5, WIDTH), rows(WIDTH, WIDTH), rows(WIDTH)

    def loss(x: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
        return f(x, w, b).sin().sum()

    assert_same_as_plain(
        loss,
        (x,) if captured else (x, w, b),
        chunk_size=2,
        batch_dim=0 if captured else (0, None, None),
        out_dim="sum",
        strategy=strategy,
        captured=(w, b),
    )
    assert bool(products) == adds


@ways
def test_a_hook_of_f_on_what_it_was_given(
    strategy: Strategy, products: list[Tensor]
) -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        w.register_hook(lambda gradient: -gradient)
        return F.linear(x, w, b).sin().sum()

    x, w, b = rows(5, WIDTH), rows(WIDTH, WIDTH), rows(WIDTH)
    expected = torch.autograd.grad(hooked_argument(x, w, b).sin().sum(), [x, w, b])
    got = chunk_and_checkpoint(
        f,
        x,
        w,
        b,
        chunk_size=2,
        batch_dim=(0, None, None),
        out_dim="sum",
        strategy=strategy,
    )
    for found, want in zip(torch.autograd.grad(got, [x, w, b]), expected, strict=True):
        assert_close(found, want, "gradient")
    assert not products


@ways
@pytest.mark.parametrize("frozen", [0, 1, 2, (0, 2), (0, 1)], ids=str)
def test_frozen_tensors(frozen: Any, strategy: Strategy) -> None:
    tensors = [rows(5, WIDTH), rows(WIDTH, WIDTH), rows(WIDTH)]
    for i in frozen if isinstance(frozen, tuple) else (frozen,):
        tensors[i].requires_grad_(False)
    assert_same_as_plain(
        lambda x, w, b: F.linear(F.linear(x, w, b).sin(), w, b).cos().sum(),
        tuple(tensors),
        chunk_size=2,
        batch_dim=(0, None, None),
        out_dim="sum",
        strategy=strategy,
    )


@ways
def test_a_deep_network_holds_no_two_gradients(
    strategy: Strategy, products: list[Tensor]
) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    ).double()
    assert_same_as_plain(
        lambda x: model(x).square().mean(),
        (rows(6, WIDTH),),
        chunk_size=2,
        out_dim="mean",
        strategy=strategy,
        captured=model,
    )
    assert products


def test_only_one_of_two_results_is_used(products: list[Tensor]) -> None:
    x, v, w = rows(5, WIDTH), rows(WIDTH, WIDTH), rows(WIDTH, WIDTH)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ v, (x @ w).sin()

    y, z = chunk_and_checkpoint(f, x, chunk_size=2)
    expected = torch.autograd.grad(f(x)[1].sum(), [x, v, w], allow_unused=True)
    found = torch.autograd.grad(
        z.sum(), [x, v, w], allow_unused=True, retain_graph=True
    )
    assert [g is None for g in found] == [g is None for g in expected]
    for i in (0, 2):
        assert_close(found[i], expected[i], "gradient")
    (of_v,) = torch.autograd.grad(y.sum(), [v])
    assert_close(of_v, torch.autograd.grad((x @ v).sum(), [v])[0], "of v alone")
    assert len(products) == 3


@ways
def test_a_factor_that_f_writes_to_is_an_error(strategy: Strategy) -> None:
    w, b = rows(WIDTH, WIDTH), rows(WIDTH)

    def f(x: Tensor) -> Tensor:
        h = x.sin()
        y = F.linear(h, w, b)
        h.mul_(2)
        return y.sum()

    x = rows(5, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chunk_and_checkpoint(
            f, x, chunk_size=2, out_dim="sum", strategy=strategy
        ).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@ways
def test_other_dtypes(dtype: torch.dtype, strategy: Strategy) -> None:
    """Where sums are wider than the gradients, no product can be added to one."""
    w = torch.randn(512, 300, dtype=dtype, requires_grad=True)
    x = torch.randn(12, 300, dtype=dtype, requires_grad=True)
    got = chunk_and_checkpoint(
        lambda x: F.linear(x, w).float().sin().sum(),
        x,
        chunk_size=5,
        out_dim="sum",
        strategy=strategy,
    )
    found = torch.autograd.grad(got, [x, w])
    expected = torch.autograd.grad(F.linear(x, w).float().sin().sum(), [x, w])
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, "gradient")


def test_gradients_of_many_at_once(products: list[Tensor]) -> None:
    w, b, x = rows(WIDTH, WIDTH), rows(WIDTH), rows(5, WIDTH)
    y = chunk_and_checkpoint(lambda x: F.linear(x, w, b), x, chunk_size=2)
    batch = torch.randn(3, 5, WIDTH, dtype=torch.float64)

    def many(y: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(y, [x, w, b], batch, is_grads_batched=True)

    for found, want in zip(many(y), many(F.linear(x, w, b)), strict=True):
        assert_close(found, want, "gradient")
    assert len(products) == 3
