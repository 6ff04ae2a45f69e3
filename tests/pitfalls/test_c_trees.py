"""Pitfalls C: arguments and results that are no tensors, nested ones, and keywords."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from chunkcheck import chunk_and_checkpoint, chunked
from reference import (
    Strategy,
    assert_same,
    assert_same_as_plain,
    assert_same_runs,
    run,
    strategies,
    tensors,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 3), dtype=torch.float64, device=device, requires_grad=True
    )


@strategies()
@sizes
@pytest.mark.parametrize("batch_dim", [0, (0, 0, None, None, None, None)])
def test_pytorch_17969_none_str_and_scalar_args(
    strategy: Strategy, chunk_size: int | None, batch_dim: Any, device: torch.device
) -> None:
    """None passes through, also where a dim is given, and so does any non-tensor."""
    marker = object()

    def f(
        x: Tensor,
        mask: Tensor | None,
        mode: str,
        scale: float,
        flag: bool,
        given: object,
    ) -> Tensor:
        assert (mask, mode, scale, flag) == (None, "sin", 0.5, True)
        assert given is marker
        return x.sin() * scale

    assert_same_as_plain(
        f,
        (_x(device), None, "sin", 0.5, True, marker),
        chunk_size=chunk_size,
        batch_dim=batch_dim,
        strategy=strategy,
    )


@strategies()
@sizes
def test_pytorch_52415_non_tensor_outputs(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Results that are no tensors pass through, beside results with a gradient."""
    marker = object()

    def f(x: Tensor) -> dict[str, object]:
        return {
            "none": None,
            "y": x.sin(),
            "name": "sin",
            "n": 3,
            "marker": marker,
            "nan": float("nan"),
            "nested": (None, [x * 2, 1.5]),
        }

    assert_same_as_plain(f, (_x(device),), chunk_size=chunk_size, strategy=strategy)


@strategies()
def test_pytorch_52415_non_tensor_output_that_differs_raises(
    strategy: Strategy, device: torch.device
) -> None:
    """One that differs between chunks is an error naming path, values and chunks."""

    def f(x: Tensor) -> tuple[Tensor, int]:
        return x * 2, x.shape[0]

    with pytest.raises(ValueError, match=r"result\[1\]") as caught:
        chunk_and_checkpoint(f, _x(device), chunk_size=2, strategy=strategy)
    message = str(caught.value)
    assert "rows 0:2 of 5" in message
    assert "rows 4:5 of 5" in message


@strategies()
@sizes
def test_pytorch_178568_f_changes_its_containers(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """`f` gets fresh containers in each run, so recompute sees what forward saw."""

    def f(batch: dict[str, Any]) -> Tensor:
        batch["x"] = batch["x"].sin() * batch["x"]
        batch["list"].append(batch["list"][0] * batch["x"])
        popped = batch.pop("gone")
        total: Tensor = batch["list"][-1] * popped + len(batch["list"])
        return total

    x, a, gone = _x(device), _x(device), _x(device)

    def fresh() -> dict[str, Any]:
        return {"x": x, "list": [a], "gone": gone}

    given = fresh()
    expected = run(lambda: f(fresh()), (x, a, gone))
    got = run(
        lambda: chunk_and_checkpoint(
            f, given, chunk_size=chunk_size, strategy=strategy
        ),
        (x, a, gone),
    )
    assert_same_runs(got, expected)
    assert given.keys() == {"x", "list", "gone"}
    assert given["x"] is x
    assert given["list"] == [a]


@strategies()
@sizes
@pytest.mark.parametrize("kind", [list, tuple])
def test_pytorch_55509_sequence_results_are_tracked(
    strategy: Strategy, chunk_size: int | None, kind: type, device: torch.device
) -> None:
    """A list given or returned is tracked, and stays a list."""

    def f(pair: list[Tensor] | tuple[Tensor, ...]) -> Any:
        return kind([pair[0].exp(), pair[0] * pair[1]])

    got = assert_same_as_plain(
        f,
        (kind([_x(device), _x(device)]),),
        chunk_size=chunk_size,
        strategy=strategy,
    )
    assert all(t.requires_grad for _, t in tensors(got.result))


@strategies()
@sizes
def test_pytorch_87713_dict_results_are_tracked(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """A dict given or returned is tracked, and keeps its order."""

    def f(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"z": batch["b"].exp(), "a": batch["a"] * batch["b"]}

    got = assert_same_as_plain(
        f,
        ({"b": _x(device), "a": _x(device)},),
        chunk_size=chunk_size,
        strategy=strategy,
    )
    assert all(t.requires_grad for _, t in tensors(got.result))


def test_deepspeed_598_a_strategy_sees_tensors_only(device: torch.device) -> None:
    """A strategy gets tensors only, the chunked ones first, never None or the rest."""
    seen: list[list[tuple[int, ...]]] = []

    def own(f: Any, /, *args: Tensor) -> tuple[Tensor, ...]:
        assert all(isinstance(arg, Tensor) for arg in args)
        seen.append([tuple(arg.shape) for arg in args])
        results: tuple[Tensor, ...] = f(*args)
        assert isinstance(results, tuple)
        assert all(isinstance(t, Tensor) for t in results)
        return results

    def f(
        weight: Tensor, none: None, x: Tensor, mode: str, extra: dict[str, Any]
    ) -> dict[str, Any]:
        return {"mode": mode, "y": x @ weight, "e": extra["e"] * 1.0, "none": none}

    assert_same_as_plain(
        f,
        (_x(device, 3, 2), None, _x(device), "mode", {"s": "s", "e": _x(device, 5)}),
        chunk_size=2,
        batch_dim=(None, None, 0, None, 0),
        strategy=own,
    )
    chunks = [[(rows, 3), (rows,), (3, 2)] for rows in (2, 2, 1)]
    assert seen == chunks


@strategies()
@sizes
def test_deepspeed_598_none_among_tensors(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Absent optionals at any place, in and out, disturb no gradient."""

    def f(
        none: None, x: Tensor, pair: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        left, right = pair
        assert none is left is None
        assert right is not None
        return None, x * right, None, right.exp()

    assert_same_as_plain(
        f,
        (None, _x(device), (None, _x(device))),
        chunk_size=chunk_size,
        strategy=strategy,
    )


@strategies()
@sizes
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_deepspeed_688_integer_inputs_only(
    strategy: Strategy,
    chunk_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A stage that gets integers or booleans alone has a grad_fn and trains."""
    table = _x(device, 2, 4)
    head = nn.Linear(4, 2).to(device, torch.float64)
    codes = torch.randint(2, (5, 3), device=device).to(dtype)

    def f(codes: Tensor) -> Tensor:
        result: Tensor = head(table[codes.long()])
        return result

    got = assert_same_as_plain(
        f,
        (codes,),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=(table, head),
    )
    assert isinstance(got.result, Tensor)
    assert got.result.grad_fn is not None


@strategies()
@sizes
def test_pytorch_80987_keyword_tensors_get_gradients(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Keyword tensors, nested ones too, are cut and get their gradients."""

    def f(
        x: Tensor, *, scale: Tensor, pair: dict[str, Tensor], name: str
    ) -> dict[str, Tensor]:
        assert name == "name"
        assert x.shape[0] == scale.shape[0] == pair["p"].shape[0]
        return {"y": x * scale + pair["p"].sin()}

    assert_same_as_plain(
        f,
        (_x(device),),
        kwargs={"scale": _x(device), "pair": {"p": _x(device)}, "name": "name"},
        chunk_size=chunk_size,
        strategy=strategy,
    )


@strategies()
@sizes
@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
def test_pytorch_84908_tensor_changed_before_backward_raises(
    strategy: Strategy, chunk_size: int | None, place: str, device: torch.device
) -> None:
    """Whatever way a tensor came in, a change of it before backward is an error."""
    x, changed = _x(device), _x(device).detach()

    def f(
        x: Tensor,
        positional: Tensor | None = None,
        *,
        keyword: Tensor | None = None,
        nested: list[dict[str, Tensor]] | None = None,
    ) -> Tensor:
        factor = positional if keyword is None else keyword
        if nested is not None:
            factor = nested[0]["deep"]
        assert factor is not None
        return x * factor

    g = functools.partial(chunked, f, chunk_size=chunk_size, strategy=strategy)()
    y = (
        g(x, changed)
        if place == "positional"
        else g(x, keyword=changed)
        if place == "keyword"
        else g(x, nested=[{"deep": changed}])
    )
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(y.sum())


@strategies()
@sizes
def test_pytorch_38148_integer_output_requires_no_grad(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Integer and boolean results come out unchanged and require no gradient."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * x
        return y, y.argmax(1, keepdim=True), y > 1

    got = assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy
    )
    assert isinstance(got.result, tuple)
    assert [t.dtype for t in got.result] == [torch.float64, torch.int64, torch.bool]
    assert [t.requires_grad for t in got.result] == [True, False, False]


def test_pytorch_71322_both_forms_have_the_same_options(device: torch.device) -> None:
    """The two entry points have one set of options, with one set of defaults."""
    options = [
        {
            name: parameter.default
            for name, parameter in inspect.signature(form).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        for form in (chunk_and_checkpoint, chunked)
    ]
    assert options[0] == options[1]
    assert options[0].keys() == {"chunk_size", "batch_dim", "out_dim", "strategy"}
    x = _x(device)
    for strategy in ("auto", "non_reentrant", "reentrant", "none"):
        assert_same(
            chunked(torch.sin, chunk_size=2, strategy=strategy)(x),
            chunk_and_checkpoint(torch.sin, x, chunk_size=2, strategy=strategy),
        )
