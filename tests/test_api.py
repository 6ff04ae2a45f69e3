"""Tests of `_api`: the two forms, and the rules that hold across the layers."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import NonReentrant, chunk_and_checkpoint, chunked
from reference import (
    Counted,
    Strategy,
    assert_same,
    assert_same_as_plain,
    rows,
    strategies,
)


class Out(NamedTuple):
    """A result with names."""

    y: Tensor
    aux: dict[str, Any]


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(5, 11), nn.GELU(), nn.Linear(11, 5)).to(dtype)


# The original's call: tensors only, batch_dim 0 and 1, a ragged tail.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 7, 100])
def test_the_original_call(chunk_size: int, batch_dim: int, dtype: torch.dtype) -> None:
    def f(x1: Tensor, x2: Tensor) -> Tensor:
        return torch.tanh(x1 * x2) + x1.square()

    shape = (7, 3) if batch_dim == 0 else (3, 7)
    assert_same_as_plain(
        f,
        (rows(*shape, dtype=dtype), rows(*shape, dtype=dtype)),
        chunk_size=chunk_size,
        batch_dim=batch_dim,
        strategy="auto",
    )


def test_the_original_call_by_one_argument_and_default_dim() -> None:
    net = mlp(torch.float32)
    x = rows(6, 5, dtype=torch.float32)
    torch.testing.assert_close(chunk_and_checkpoint(net, x, chunk_size=4), net(x))


@pytest.mark.parametrize(
    ("args", "batch_dim", "error"),
    [
        ((), 0, ValueError),
        ((torch.ones(3), [1.0, 2.0]), 1, ValueError),
        ((torch.ones(3),), 1, ValueError),
        ((torch.ones(3, 2), torch.ones(4, 2)), 0, ValueError),
        ((torch.ones(3, 2), torch.ones(3)), 1, ValueError),
    ],
    ids=["none", "list", "dim", "sizes", "dims"],
)
def test_what_the_original_refused(
    args: tuple[Any, ...], batch_dim: int, error: type[Exception]
) -> None:
    f = Counted(lambda *xs: xs[0])
    with pytest.raises(error):
        chunk_and_checkpoint(f, *args, chunk_size=2, batch_dim=batch_dim)
    assert f.rows == []


# Trees.


@strategies()
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 8, None])
def test_any_trees_in_and_out(chunk_size: int | None, strategy: Strategy) -> None:
    net = mlp()

    def f(
        batch: dict[str, Any], bias: Tensor, pair: tuple[Tensor, list[Tensor]], k: int
    ) -> Out:
        y = net(batch["x"]) * bias + pair[0] * k
        return Out(
            y,
            {
                "label": y.argmax(-1),
                "detached": y.detach(),
                "none": batch["absent"],
                "all": [y.square(), (pair[1][0].sum(-1), "text", float("nan"))],
            },
        )

    got = assert_same_as_plain(
        f,
        (
            {"x": rows(8, 5), "absent": None},
            rows(1, 5),
            (rows(8, 5), [rows(8, 2)]),
            3,
        ),
        chunk_size=chunk_size,
        batch_dim=0,
        out_dim=0,
        strategy=strategy,
        captured=net,
    )
    assert isinstance(got.result, Out)


def test_the_result_has_the_structure_of_f() -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        return (
            [x],
            OrderedDict(b=x, a=x),
            defaultdict(list, {"k": x}),
            deque([x], maxlen=3),
            x.max(dim=1),
            (),
            {},
        )

    x = rows(6, 5)
    got = chunk_and_checkpoint(f, x, chunk_size=4)
    assert_same(got, f(x))
    assert got[2].default_factory is list
    assert got[3].maxlen == 3
    assert list(got[1]) == ["b", "a"]


def test_keys_may_come_in_another_order_in_another_chunk() -> None:
    def f(x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": -x} if len(x) == 4 else {"b": -x, "a": x}

    x = rows(6, 5)
    got = chunk_and_checkpoint(f, x, chunk_size=4)
    assert list(got) == ["a", "b"]
    assert torch.equal(got["a"], x)
    assert torch.equal(got["b"], -x)


def test_f_gets_fresh_containers_in_every_run() -> None:
    net = mlp()

    def f(batch: dict[str, Any]) -> Tensor:
        assert batch["log"] == [], "seen by another run"
        batch["log"].append(1)
        x: Tensor = batch.pop("x")
        return net(x)  # type: ignore[no-any-return]

    batch = {"x": rows(6, 5), "log": []}
    y = chunk_and_checkpoint(f, batch, chunk_size=4)
    y.sum().backward()
    assert list(batch) == ["x", "log"]
    assert batch["log"] == []


def test_non_tensors_pass_by_identity() -> None:
    class Thing:
        pass

    thing = Thing()
    seen = []

    def f(x: Tensor, given: Thing) -> tuple[Tensor, Thing]:
        seen.append(given)
        return x * 2, given

    _, returned = chunk_and_checkpoint(f, rows(6, 5), thing, chunk_size=4)
    assert returned is thing
    assert all(one is thing for one in seen)


# What is cut, what passes whole.


@strategies()
def test_whole_tensors_get_their_gradients(strategy: Strategy) -> None:
    def f(x: Tensor, table: Tensor, ones: Tensor, scalar: Tensor) -> Tensor:
        assert table.shape == (8, 5)
        assert ones.shape == (1, 5), "a size of 1 passes unexpanded"
        return torch.tanh(x @ table.T) @ table * ones * scalar

    assert_same_as_plain(
        f,
        (rows(8, 5), rows(8, 5), rows(1, 5), rows()),
        chunk_size=3,
        batch_dim=(0, None, 0, 0),
        strategy=strategy,
    )


@pytest.mark.parametrize(
    ("batch_dim", "out_dim"), [(-1, "auto"), (2, -1), ((-2, 2), 2), ((1, -1), -1)]
)
def test_negative_dims_count_from_the_end_of_each_leaf(
    batch_dim: Any, out_dim: Any
) -> None:
    first = -1 if batch_dim in (-1, 2) else 1
    x = rows(2, 3, 7).movedim(-1, first)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.movedim(first, -1).sin() * y

    assert_same_as_plain(
        f,
        (x.detach().requires_grad_(), rows(2, 3, 7)),
        chunk_size=3,
        batch_dim=batch_dim,
        out_dim=out_dim,
        strategy="auto",
    )


@pytest.mark.parametrize(("size", "calls"), [(2, 4), (3, 3), (7, 1), (9, 1), (None, 1)])
def test_chunk_size_is_rows_per_chunk(size: int | None, calls: int) -> None:
    f = Counted(torch.sin)
    chunk_and_checkpoint(f, rows(7, 2), chunk_size=size)
    assert len(f.rows) == calls
    assert sum(f.rows) == 7
    assert max(f.rows) == min(size or 7, 7)


@strategies(without=["none"])
def test_one_chunk_is_still_recomputed_in_backward(strategy: Strategy) -> None:
    f = Counted(mlp())
    chunk_and_checkpoint(
        f, rows(4, 5), chunk_size=None, strategy=strategy
    ).sum().backward()
    assert f.rows == [4, 4]


@strategies()
def test_an_empty_batch_runs_f_once(strategy: Strategy) -> None:
    f = Counted(mlp())
    x = rows(0, 5)
    y = chunk_and_checkpoint(f, x, chunk_size=3, strategy=strategy)
    assert f.rows == [0]
    assert y.shape == (0, 5)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 5)


def test_a_chunk_is_as_contiguous_as_its_whole() -> None:
    contiguous = rows(3, 8, 5)
    channels_last = rows(8, 3, 4, 8).to(memory_format=torch.channels_last)
    transposed = rows(8, 3).T
    expanded = rows(1, 5).expand(8, 5)

    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        assert a.view(-1).numel() == a.numel()
        assert b.is_contiguous(memory_format=torch.channels_last)
        assert not c.is_contiguous(), "what was no contiguous whole is not copied"
        assert d.stride() == (0, 1)
        return a.sum((0, 2)) + b.sum((0, 1, 2)) + c.sum(0) + d.sum(1)

    got = chunk_and_checkpoint(
        f,
        contiguous,
        channels_last,
        transposed,
        expanded,
        chunk_size=4,
        batch_dim=(1, 3, 1, 0),
        out_dim=0,
    )
    expected = (
        contiguous.sum((0, 2))
        + channels_last.sum((0, 1, 2))
        + transposed.sum(0)
        + expanded.sum(1)
    )
    torch.testing.assert_close(got, expected)


# Joining.


@strategies()
def test_out_dim_none_is_the_first_chunk(strategy: Strategy) -> None:
    scale = rows()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * scale, scale.exp()

    x = rows(6, 2)
    y, once = chunk_and_checkpoint(
        f, x, chunk_size=4, out_dim=(0, None), strategy=strategy
    )
    once.backward()
    torch.testing.assert_close(once, scale.exp())
    torch.testing.assert_close(scale.grad, scale.exp().detach())
    assert y.shape == (6, 2)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            lambda x: x.new_ones(len(x)),
            r"result is a Tensor of .* and shape \(4,\) for",
        ),
        (lambda x: x.new_ones(1).to([torch.int8, torch.int16][len(x) == 4]), "int16"),
        (
            lambda x: x.new_ones(1) if len(x) == 4 else nn.Parameter(x.new_ones(1)),
            "a Parameter of",
        ),
        (
            lambda x: x.new_ones(1) if len(x) == 4 else None,
            "but None for rows 4:6 of 6",
        ),
    ],
    ids=["shape", "dtype", "type", "none"],
)
def test_out_dim_none_must_agree_in_all_chunks(f: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_and_checkpoint(f, rows(6, 2), chunk_size=4, out_dim=None)


def test_joined_leaves_agree_in_all_but_the_rows() -> None:
    def wider(x: Tensor) -> dict[str, Tensor]:
        return {"y": x.new_ones(len(x), len(x))}

    def other(x: Tensor) -> Tensor:
        return x.double() if len(x) == 4 else x.float()

    with pytest.raises(
        ValueError,
        match=r"result\['y'\] is .*\(4, 4\) for rows 0:4 of 6, but .*\(2, 2\)",
    ):
        chunk_and_checkpoint(wider, rows(6, 2), chunk_size=4)
    with pytest.raises(
        ValueError, match=r"float64 .* rows 0:4 of 6.*float32 .* rows 4:6"
    ):
        chunk_and_checkpoint(other, rows(6, 2), chunk_size=4)


@pytest.mark.parametrize(
    "f",
    [lambda x: x.sum(0, keepdim=True), lambda x: x.repeat(2, 1), lambda x: x[:-1]],
    ids=["one row", "twice the rows", "a row less"],
)
def test_a_joined_leaf_has_as_many_rows_as_its_chunk(f: Any) -> None:
    with pytest.raises(
        ValueError, match=r"result has shape .* for rows 0:4 of 6: expected"
    ):
        chunk_and_checkpoint(f, rows(6, 2), chunk_size=4)


def test_non_tensor_results_must_agree() -> None:
    def f(x: Tensor) -> tuple[Tensor, dict[str, object]]:
        return x, {"n": len(x)}

    with pytest.raises(
        ValueError,
        match=r"result\[1\]\['n'\] is 4 for rows 0:4 of 6, but 2 for rows 4:6",
    ):
        chunk_and_checkpoint(f, rows(6, 2), chunk_size=4)
    assert chunk_and_checkpoint(f, rows(6, 2), chunk_size=3)[1] == {"n": 3}


def test_a_structure_that_differs_between_chunks() -> None:
    def f(x: Tensor) -> dict[str, Tensor]:
        return {"a": x} if len(x) == 4 else {"b": x}

    with pytest.raises(
        ValueError,
        match=r"result of rows 4:6 of 6 differs .* from that of rows 0:4 of 6",
    ):
        chunk_and_checkpoint(f, rows(6, 2), chunk_size=4)


# Aliasing and writing.


@strategies()
@pytest.mark.parametrize("chunk_size", [2, None])
@pytest.mark.parametrize("grad", [True, False])
def test_results_never_share_memory_with_arguments(
    chunk_size: int | None, strategy: Strategy, *, grad: bool
) -> None:
    x, table = rows(4, 2, grad=grad), rows(3, grad=grad)
    before = x.detach().clone(), table.detach().clone()

    def f(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[:, :1], table[1:]

    results = chunk_and_checkpoint(
        f,
        x,
        table,
        chunk_size=chunk_size,
        batch_dim=(0, None),
        out_dim=(0, 0, None),
        strategy=strategy,
    )
    with torch.no_grad():
        for result in results:
            result.zero_()
    assert torch.equal(x, before[0])
    assert torch.equal(table, before[1])


# Up to torch 2.9 its checkpoint, used directly by the user's own strategy, leaves its
# hooks behind after an error.


@strategies(without=["own_checkpoint"])
@pytest.mark.parametrize("whole", [True, False])
def test_f_that_writes_into_a_tensor_is_an_error(
    strategy: Strategy, *, whole: bool
) -> None:
    def f(batch: dict[str, Tensor], table: Tensor) -> Tensor:
        (table if whole else batch["x"]).add_(1)
        return batch["x"] * table

    path = r"args\[1\]" if whole else r"args\[0\]\['x'\]"
    with pytest.raises(
        RuntimeError,
        match=rf"f wrote into {path} while running rows 0:2 of 4.*clone it",
    ):
        chunk_and_checkpoint(
            f,
            {"x": rows(4, 2, grad=False)},
            rows(2, grad=False),
            chunk_size=2,
            batch_dim=(0, None),
            strategy=strategy,
        )


@strategies(without=["own_checkpoint"])
def test_f_that_writes_into_a_chunk_with_a_gradient_is_an_error(
    strategy: Strategy,
) -> None:
    x = rows(4, 2) * 1
    with pytest.raises(RuntimeError, match=r"inplace|wrote into") as caught:
        chunk_and_checkpoint(lambda x: x.add_(1), x, chunk_size=2, strategy=strategy)
    notes = "\n".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert "rows 0:2 of 4" in notes
    assert "clone it" in notes


def test_arguments_are_left_as_they_were() -> None:
    x = rows(6, 5)
    batch: dict[str, Any] = {"x": x, "rest": [x, None, 3]}
    version = x._version
    chunk_and_checkpoint(lambda b: b["x"].sin(), batch, chunk_size=4).sum().backward()
    assert list(batch) == ["x", "rest"]
    assert batch["x"] is x
    assert x._version == version


# No gradient needed.


@strategies()
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=str
)
def test_without_gradients_f_runs_once_per_chunk(mode: Any, strategy: Strategy) -> None:
    f = Counted(mlp().requires_grad_(requires_grad=False))
    x = rows(5, 5, grad=False)
    with mode():
        y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
        assert y.is_inference() == (mode is torch.inference_mode)
    assert f.rows == [2, 2, 1]
    assert not y.requires_grad
    torch.testing.assert_close(y, f.f(x))


# Errors.


def test_an_error_in_f_keeps_its_type_and_says_where() -> None:
    class OwnError(Exception):
        pass

    def f(x: Tensor) -> Tensor:
        if len(x) < 4:
            raise OwnError("mine")
        return x

    with pytest.raises(OwnError, match="mine") as caught:
        chunk_and_checkpoint(f, rows(10, 2), chunk_size=4)
    assert caught.value.__notes__ == ["while running rows 8:10 of 10"]


def test_an_error_in_f_says_what_was_cut() -> None:
    def f(batch: dict[str, Tensor], weight: Tensor, table: Tensor) -> Tensor:
        return batch["x"] @ weight @ table

    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        chunk_and_checkpoint(
            f,
            {"x": rows(8, 8)},
            rows(8, 3),
            rows(3, 3),
            chunk_size=4,
            batch_dim=(0, 0, None),
        )
    assert caught.value.__notes__ == [
        "while running rows 0:4 of 8",
        (
            "f was given these chunks: args[0]['x'] (4, 8), args[1] (4, 3); and whole:"
            " args[2] (3, 3)"
        ),
    ]


@strategies()
def test_f_may_hang_hooks_on_its_arguments(strategy: Strategy) -> None:
    def reverse(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: -gradient)
            bias.register_hook(lambda gradient: 2 * gradient)
        return (x.square() + bias.exp()) * scale

    x, bias, scale = rows(6, 3), rows(3), rows(6, 3)
    assert_same_as_plain(
        lambda x, scale, bias: reverse(x * 1, bias * 1, scale),
        (x, scale, bias),
        chunk_size=4,
        batch_dim=(0, 0, None),
        strategy=strategy,
    )
    y = chunk_and_checkpoint(
        reverse, x, bias, scale, chunk_size=4, batch_dim=(0, None, 0), strategy=strategy
    )
    y.sum().backward()
    plain = [t.detach().clone().requires_grad_() for t in (x, bias)]
    ((plain[0].square() + plain[1].exp()) * scale.detach()).sum().backward()
    torch.testing.assert_close(x.grad, -plain[0].grad)  # type: ignore[operator]
    torch.testing.assert_close(bias.grad, 2 * plain[1].grad)  # type: ignore[operator]


@strategies(without=["own_checkpoint"])  # which stops early, as is torch's default
def test_f_may_set_back_at_its_end_what_it_set(strategy: Strategy) -> None:
    module = nn.Sequential(mlp(), nn.Dropout(0.5)).train()

    def f(x: Tensor) -> Tensor:
        module.eval()
        y: Tensor = module(x).tanh()
        module.train()
        return y

    chunk_and_checkpoint(
        f, rows(6, 5), chunk_size=4, strategy=strategy
    ).sum().backward()
    assert module.training
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("batch_dim", [0, (0, None)])
def test_an_iterator_would_be_used_up(batch_dim: Any) -> None:
    x = rows(4, 2)
    with pytest.raises(TypeError, match=r"args\[1\] is an iterator \(generator\)"):
        chunk_and_checkpoint(
            lambda x, _: x, x, (i for i in range(3)), chunk_size=2, batch_dim=batch_dim
        )
    with pytest.raises(TypeError, match=r"result is an iterator \(list_iterator\)"):
        chunk_and_checkpoint(lambda x: iter([x]), x, chunk_size=None)


def test_an_empty_batch_beside_a_size_of_one() -> None:
    y = chunk_and_checkpoint(torch.add, rows(0, 4), rows(1, 4), chunk_size=2)
    assert y.shape == (0, 4)


def test_under_no_grad_the_result_has_no_graph() -> None:
    with torch.no_grad():
        y = chunk_and_checkpoint(
            torch.enable_grad()(torch.sin), rows(4, 2), chunk_size=3
        )
    assert not y.requires_grad


@strategies()
def test_a_recompute_with_other_keys_or_another_order(strategy: Strategy) -> None:
    calls = 0

    def f(x: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        a, b = x.sin(), 3 * x.cos()
        return {"a": a, "b": b} if calls == 1 else {"b": b, "a": a}

    x = rows(4, 2)
    out = chunk_and_checkpoint(f, x, chunk_size=None, strategy=strategy)
    (out["a"] + 2 * out["b"]).sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() - 6 * x.sin()).detach())


@strategies(without=["none", "own_checkpoint"])
def test_a_recompute_with_another_structure(strategy: Strategy) -> None:
    calls = 0

    def f(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x.sin() if calls == 1 else (x.sin(),)

    y = chunk_and_checkpoint(f, rows(4, 2), chunk_size=None, strategy=strategy)
    with pytest.raises(
        RuntimeError,
        match=r"recompute of rows 0:4 of 4 gave .* is a single value there",
    ):
        y.sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be a positive int"),
        ({"chunk_size": True}, TypeError, "chunk_size .* found True of type bool"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size .* found 2.0 of type float"),
        (
            {"batch_dim": True},
            TypeError,
            "batch_dim must be an int or None, found True",
        ),
        ({"batch_dim": 3}, ValueError, r"args\[0\] has shape \(4, 2\) and so no dim 3"),
        ({"batch_dim": (0, 0)}, ValueError, "args is a tuple of 1"),
        ({"batch_dim": None}, ValueError, "no tensor is chunked"),
        ({"out_dim": "max"}, TypeError, "out_dim must be an int, None, 'sum', 'mean'"),
        ({"strategy": None}, TypeError, "strategy is None"),
        ({"strategy": "fussed"}, ValueError, "'fussed' is none of"),
    ],
    ids=str,
)
def test_bad_arguments_raise_before_f_has_run(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    f = Counted(torch.sin)
    with pytest.raises(error, match=message):
        chunk_and_checkpoint(f, rows(4, 2), **{"chunk_size": 2, **options})
    assert f.rows == []


def test_chunk_size_has_no_default() -> None:
    with pytest.raises(TypeError, match="chunk_size"):
        chunk_and_checkpoint(torch.sin, rows(4, 2))  # type: ignore[call-arg]


def test_f_comes_first() -> None:
    with pytest.raises(TypeError, match="f must be callable, found a Tensor"):
        chunk_and_checkpoint(rows(4, 2), torch.sin, chunk_size=2)  # type: ignore[arg-type]


def test_a_keyword_of_f_in_the_immediate_form_prints_the_line_to_write() -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    x = rows(4, 2)
    with pytest.raises(TypeError, match="no option 'mask'") as caught:
        chunk_and_checkpoint(attend, x, mask=x, chunk_size=2)  # type: ignore[arg-type]
    line = "chunked(attend, chunk_size=2, batch_dim=0)(..., mask=mask)"
    assert line in str(caught.value)
    f: Any = attend
    options: Any = {"mask": x, "out_dim": "sum", "strategy": "none", "batch_dim": (0,)}
    with pytest.raises(TypeError) as caught:
        chunk_and_checkpoint(f, x, chunk_size=None, **options)
    line = "chunk_size=None, batch_dim=(0,), out_dim='sum', strategy='none')(..., mask"
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_chunks": 2}, r"write strategy=Fused\(keep_chunks=2\)"),
        ({"dim": 1}, r"did you mean batch_dim\?|did you mean out_dim\?"),
        ({"chunksize": 3, "chunk_size": 3}, r"did you mean chunk_size\?"),
    ],
)
def test_keywords_that_belong_elsewhere(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        chunk_and_checkpoint(torch.sin, rows(4, 2), **{"chunk_size": 2, **options})


def test_the_log_tells_what_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    x, table = rows(5, 2), rows(2)
    with caplog.at_level("INFO", "chunkcheck"):
        chunk_and_checkpoint(
            lambda x, _: x["a"], {"a": x}, table, chunk_size=2, batch_dim=(0, None)
        )
        chunk_and_checkpoint(torch.sin, x, chunk_size=8)
    first, second = (r.message for r in caplog.records if "rows in" in r.message)
    assert first == (
        "5 rows in 3 chunks of 2 rows: cut args[0]['a'] along dim 0; whole: args[1]"
    )
    assert second == "5 rows in 1 chunk: cut args[0] along dim 0; whole: nothing"


# The curried form.


class Scaled(nn.Module):
    """Of this module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@strategies()
def test_chunked_takes_keywords(strategy: Strategy) -> None:
    def f(x: Tensor, *, mask: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        return (x * mask) @ table * scale

    assert_same_as_plain(
        f,
        (rows(6, 4),),
        kwargs={"mask": rows(6, 4), "table": rows(4, 6), "scale": 2.0},
        batch_dim={"x": 0, "mask": 0, "table": None},
        chunk_size=4,
        strategy=strategy,
    )


def test_chunked_with_an_int_chunks_keywords_too() -> None:
    seen = []

    def f(x: Tensor, mask: Tensor) -> Tensor:
        seen.append((len(x), len(mask)))
        return x * mask

    x = rows(6, 4)
    chunked(f, chunk_size=4)(x, mask=x)
    assert seen == [(4, 4), (2, 2)]


def test_chunked_is_a_decorator_on_functions_and_methods() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        @functools.partial(chunked, chunk_size=2)
        def forward(self, x: Tensor) -> Tensor:
            """Run the block."""
            assert len(x) <= 2
            return self.net(x)  # type: ignore[no-any-return]

    block = Block()
    x = rows(5, 5)
    torch.testing.assert_close(block(x), block.net(x))
    assert Block.forward.__doc__ == "Run the block."
    assert list(inspect.signature(Block.forward).parameters) == ["self", "x"]


def test_chunked_of_a_module_does_not_take_over_its_parameters() -> None:
    net = mlp()
    assert not hasattr(chunked(net, chunk_size=2), "_parameters")


def test_a_model_whose_forward_is_chunked_is_copied_with_its_own() -> None:
    """As one does with a model of another library; the copy must not use the original.

    Averaged models are such copies.
    """
    model = nn.Sequential(Scaled(), nn.Tanh()).double()
    inner: Any = model[0]
    inner.forward = chunked(inner.forward, chunk_size=2)
    x = rows(5, 4)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(copied(x), expected)
        copied(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is not None for p in copied.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)


@pytest.mark.parametrize(
    ("f", "options", "error"),
    [
        (None, {"chunk_size": 2}, TypeError),
        (torch.sin, {"chunk_size": 0}, ValueError),
        (torch.sin, {"chunk_size": 2, "strategy": None}, TypeError),
    ],
    ids=["f", "chunk_size", "strategy"],
)
def test_chunked_checks_its_options_at_once(
    f: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        chunked(f, **options)


def test_calls_nest() -> None:
    net = mlp()

    def inner(x: Tensor) -> Tensor:
        y: Tensor = chunk_and_checkpoint(net, x, chunk_size=2, batch_dim=1)
        return y

    assert_same_as_plain(
        inner, (rows(4, 3, 5),), chunk_size=3, strategy=NonReentrant(), captured=net
    )


def test_forces_in_evaluation() -> None:
    module = mlp()

    def energy_and_force(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            energy = module(x).square().sum(1)
            (slope,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), -slope

    x = rows(7, 5)
    with torch.no_grad():
        found = chunk_and_checkpoint(energy_and_force, x, chunk_size=3)
        assert_same(found, energy_and_force(x))
