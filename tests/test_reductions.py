"""`out_dim="sum"` and `"mean"`: results reduced over the chunks, on every strategy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import Fused, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_close,
    assert_same_as_plain,
    net,
    rows,
    strategies,
)

CPU = torch.device("cpu")
NO_JIT = "ignore:`torch.jit.script` is"
SIZES = pytest.mark.parametrize("size", [1, 3, 5, 10, None])  # 3: a ragged last chunk


@strategies()
@SIZES
def test_sum_of_a_scalar(strategy: Strategy, size: int | None) -> None:
    model = net()
    assert_same_as_plain(
        lambda x, t: F.mse_loss(model(x), t, reduction="sum"),
        (rows(10, 4), rows(10, 4)),
        chunk_size=size,
        out_dim="sum",
        strategy=strategy,
        captured=model,
    )


@strategies()
@SIZES
def test_mean_is_weighted_by_rows(strategy: Strategy, size: int | None) -> None:
    model = net()
    assert_same_as_plain(
        lambda x, t: F.mse_loss(model(x), t),
        (rows(10, 4), rows(10, 4)),
        chunk_size=size,
        out_dim="mean",
        strategy=strategy,
        captured=model,
    )


@strategies()
@SIZES
def test_mixed_with_joined_and_unchunked_leaves(
    strategy: Strategy, size: int | None
) -> None:
    model = net()

    def f(x: Tensor, scale: Tensor) -> dict[str, Any]:
        y = model(x) * scale
        return {
            "y": y,
            "moments": (y.sum(0), y.square().mean(0)),
            "count": (y > 0).sum(),
            "scale": scale * 2,
            "missing": None,
            "name": "net",
        }

    got = assert_same_as_plain(
        f,
        (rows(10, 4), rows(4)),
        chunk_size=size,
        batch_dim=(0, None),
        out_dim={
            "y": 0,
            "moments": ("sum", "mean"),
            "count": "sum",
            "scale": None,
            "missing": "sum",
            "name": None,
        },
        strategy=strategy,
        captured=model,
    )
    assert isinstance(got.result, dict)
    assert got.result["count"].dtype == torch.int64


@strategies()
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128]
)
def test_the_dtype_stays(strategy: Strategy, dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(6, 2)
    total = chunk_and_checkpoint(
        lambda x: x.to(dtype).sum(0, dtype=dtype),
        x,
        chunk_size=4,
        out_dim="sum",
        strategy=strategy,
    )
    assert total.dtype == dtype
    assert total.tolist() == [30, 36]


@strategies()
def test_another_batch_dim(strategy: Strategy) -> None:
    model = net()
    assert_same_as_plain(
        lambda x: (model(x.mT).mean((0, 1)), x.sum()),
        (rows(2, 4, 7),),
        chunk_size=3,
        batch_dim=-1,
        out_dim=("mean", "sum"),
        strategy=strategy,
        captured=model,
    )


def masked(head: nn.Linear, weight: Tensor | None) -> Callable[..., Any]:
    """Return a cross-entropy that gives its sum and what that is to be divided by."""

    def f(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(head(x), target, weight, reduction="sum")
        kept = target != -100
        count = weight[target.clamp(min=0)] * kept if weight is not None else kept
        return loss, count.sum()

    return f


@strategies()
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_sum_and_its_count_give_the_exact_mean(
    strategy: Strategy, size: int, *, weighted: bool
) -> None:
    """DeepSpeed PR #8587: a mean of means over shards with uneven masks is wrong."""
    head = nn.Linear(4, 7).double()
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    x, target = rows(10, 4), torch.randint(7, (10,))
    target[:4] = -100  # all rows of the first chunks
    target[6] = -100
    plain = F.cross_entropy(head(x), target, weight)
    expected = torch.autograd.grad(plain, [x, *head.parameters()])
    loss, count = chunk_and_checkpoint(
        masked(head, weight),
        x,
        target,
        chunk_size=size,
        out_dim=("sum", "sum"),
        strategy=strategy,
    )
    assert count.dtype == (torch.float64 if weighted else torch.int64)
    mean = loss / count
    assert_close(mean, plain, "mean")
    mean.backward()
    found = [x.grad, *(p.grad for p in head.parameters())]
    for got, want in zip(found, expected, strict=True):
        assert got is not None
        assert_close(got, want, "gradient")


@strategies()
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_batch_gives_what_f_gives(strategy: Strategy, reduction: str) -> None:
    x = torch.empty(0, 4, requires_grad=True)
    out: Any = reduction
    got = chunk_and_checkpoint(
        lambda x: x.sum() + 3, x, chunk_size=2, out_dim=out, strategy=strategy
    )
    assert got.item() == 3
    got.backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


@strategies()
def test_without_gradients(strategy: Strategy) -> None:
    model = net()
    x = rows(10, 4)
    with torch.no_grad():
        got = chunk_and_checkpoint(
            lambda x: (model(x).sum(0), model(x).mean()),
            x,
            chunk_size=3,
            out_dim=("sum", "mean"),
            strategy=strategy,
        )
    assert not any(t.requires_grad for t in got)
    assert_close(got[0], model(x).sum(0), "sum")
    assert_close(got[1], model(x).mean(), "mean")


@strategies(without={"reentrant"})
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@both_paths
def test_higher_derivatives(
    strategy: Strategy, reduction: str, *, history: bool
) -> None:
    leaf, w = capture(CPU, 3, history=history)
    x = rows(5, 3)
    out: Any = reduction

    def f(x: Tensor) -> Tensor:
        y = (x * w).sin()
        return y.sum(0) if reduction == "sum" else y.mean(0)

    def call(x: Tensor, _leaf: Tensor) -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=2, out_dim=out, strategy=strategy)

    def gradients(f: Callable[..., Tensor]) -> list[Tensor]:
        (first,) = torch.autograd.grad(f(x).pow(3).sum(), [x], create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), [x, leaf], create_graph=True)
        return [first, *second, *torch.autograd.grad(second[0].sum(), [x, leaf])]

    for got, want in zip(gradients(lambda x: call(x, leaf)), gradients(f), strict=True):
        assert_close(got, want, "derivative")


@both_paths
@pytest.mark.parametrize("keep", [0, 2, 9])
def test_kept_chunks(keep: int, *, history: bool) -> None:
    leaf, w = capture(CPU, 4, history=history)
    assert_same_as_plain(
        lambda x: ((x * w).cos().mean(), x.sum(0)),
        (rows(10, 4),),
        chunk_size=3,
        out_dim=("mean", "sum"),
        strategy=Fused(keep_chunks=keep),
        captured=leaf,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_half_precision_adds_up_in_float32(dtype: torch.dtype, *, grad: bool) -> None:
    x = torch.ones(4096, 1, dtype=dtype, requires_grad=grad)
    total = chunk_and_checkpoint(torch.sum, x, chunk_size=1, out_dim="sum")
    assert total.dtype == dtype
    assert total.item() == 4096  # bf16 by itself stays at 256, fp16 at 2,048
    mean = chunk_and_checkpoint(torch.mean, x, chunk_size=1, out_dim="mean")
    assert mean.item() == 1


@strategies()
def test_nothing_as_long_as_the_batch_is_held(strategy: Strategy) -> None:
    """The values of the chunks are gone as soon as they are added."""
    seen: list[weakref.ref[Tensor]] = []

    def f(x: Tensor) -> Tensor:
        gc.collect()
        assert sum(ref() is not None for ref in seen) <= 1
        y = x.square().sum(0)
        seen.append(weakref.ref(y))
        return y

    x = torch.ones(12, 3)
    got = chunk_and_checkpoint(f, x, chunk_size=2, out_dim="sum", strategy=strategy)
    assert got.tolist() == [12, 12, 12]
    assert len(seen) == 6


@strategies()
def test_the_result_is_not_the_callers(strategy: Strategy) -> None:
    table = torch.ones(3)
    got = chunk_and_checkpoint(
        lambda _, table: table,
        torch.ones(2, 3),
        table,
        chunk_size=2,
        batch_dim=(0, None),
        out_dim="sum",
        strategy=strategy,
    )
    got.zero_()
    assert table.tolist() == [1, 1, 1]


@strategies()
@pytest.mark.parametrize(
    ("f", "out_dim", "message"),
    [
        (torch.sum, "auto", r"0-dim.*use out_dim='sum' or 'mean', as f does"),
        (lambda x: (x > 0).any(), "sum", "result is of torch.bool, .* count in f"),
        (lambda x: x.long().sum(), "mean", "result is of torch.int64, .* no mean"),
        (len, "sum", r"result is no tensor, but out_dim is 'sum'"),
        (lambda x: (x, 1.5), (0, "mean"), r"result\[1\] is no tensor, .* 'mean'"),
        (lambda x: x.sum(1), "sum", r"for rows 4:5 of 5: .*reduce over the rows in"),
    ],
)
def test_what_cannot_be_reduced(
    strategy: Strategy, f: Callable[..., Any], out_dim: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        chunk_and_checkpoint(
            f, rows(5, 3), chunk_size=2, out_dim=out_dim, strategy=strategy
        )


@both_paths
def test_other_values_in_recompute_are_found(*, history: bool) -> None:
    _, w = capture(CPU, 4, history=history)
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(0)
        return (x * w).sum() * (2 if len(calls) == 5 else 1)

    x = rows(6, 4)
    strategy = Fused(determinism_check="values")
    same = chunk_and_checkpoint(
        lambda x: (x * w).sum(), x, chunk_size=2, out_dim="sum", strategy=strategy
    )
    same.backward()
    got = chunk_and_checkpoint(f, x, chunk_size=2, out_dim="sum", strategy=strategy)
    with pytest.raises(RuntimeError, match="gave other values of result"):
        got.backward()


@strategies(without={"reentrant"})
def test_gradients_of_many_results_at_once(strategy: Strategy) -> None:
    """`is_grads_batched`: the incoming gradients are those of a batch."""
    model = net()
    x = rows(7, 4)
    batch = torch.randn(3, 4, dtype=torch.float64)

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            y, [x, *model.parameters()], batch, is_grads_batched=True
        )

    got = chunk_and_checkpoint(
        lambda x: model(x).mean(0), x, chunk_size=3, out_dim="mean", strategy=strategy
    )
    for found, want in zip(gradients(got), gradients(model(x).mean(0)), strict=True):
        assert_close(found, want, "gradient")


@pytest.mark.filterwarnings(NO_JIT)
def test_under_transforms() -> None:
    w = rows(4, grad=False)
    x = rows(6, 4, grad=False)

    def call(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(
            lambda x: (x * w).sin().mean(0), x, chunk_size=4, out_dim="mean"
        )

    def plain(x: Tensor) -> Tensor:
        return (x * w).sin().mean(0)

    assert_close(torch.func.jacrev(call)(x), torch.func.jacrev(plain)(x), "jacrev")
    assert_close(torch.func.jacfwd(call)(x), torch.func.jacfwd(plain)(x), "jacfwd")
    many = torch.stack([x, -x, 2 * x])
    assert_close(torch.func.vmap(call)(many), torch.func.vmap(plain)(many), "vmap")


@strategies()
def test_two_thousand_chunks(strategy: Strategy) -> None:
    x = rows(2000, 2)
    got = chunk_and_checkpoint(
        lambda x: x.square().sum(), x, chunk_size=1, out_dim="sum", strategy=strategy
    )
    got.backward()
    assert x.grad is not None
    assert_close(x.grad, 2 * x.detach(), "x.grad")


@strategies(without={"reentrant"})  # whose graph does not tell
@pytest.mark.parametrize(
    ("f", "out_dim"),
    [
        (lambda x, w: (x * w).sum(), None),
        (lambda x, w: (x * w, (x * w).norm()), (0, None)),
        (lambda x, w: {"y": x, "n": [x.mean(0) + w]}, {"y": 0, "n": None}),
    ],
)
def test_what_depends_on_the_rows_is_not_the_first_chunks(
    strategy: Strategy, f: Callable[..., Any], out_dim: Any
) -> None:
    """A loss under None would train on the first chunk."""
    w = rows(3)
    with pytest.raises(ValueError, match=r"is computed from args\[0\], which is cut"):
        chunk_and_checkpoint(
            lambda x: f(x, w),
            rows(5, 3),
            chunk_size=2,
            out_dim=out_dim,
            strategy=strategy,
        )
    chunk_and_checkpoint(  # of one chunk it is the whole
        lambda x: f(x, w), rows(5, 3), chunk_size=5, out_dim=out_dim, strategy=strategy
    )


def test_a_warning_of_one_entry_per_row(caplog: pytest.LogCaptureFixture) -> None:
    """With unequal chunks it is an error."""
    x = torch.ones(6, 3)
    chunk_and_checkpoint(lambda x: x.sum(1), x, chunk_size=2, out_dim="sum")
    assert "result has as many entries as a chunk has rows" in caplog.text
    caplog.clear()
    caplog.set_level("WARNING")
    chunk_and_checkpoint(lambda x: x.sum(0), x, chunk_size=2, out_dim="sum")
    chunk_and_checkpoint(lambda x: x.sum(1), x, chunk_size=2)
    assert not caplog.text


@strategies()
def test_what_does_not_depend_on_the_rows_is_the_first_chunks(
    strategy: Strategy,
) -> None:
    w, table = rows(3), rows(4, 3)
    assert_same_as_plain(
        lambda x, table: (x * w, w.norm(), table.sum(), x.detach().max() * 0),
        (rows(5, 3), table),
        chunk_size=2,
        batch_dim=(0, None),
        out_dim=(0, None, None, None),
        strategy=strategy,
        captured=w,
    )
