"""Tests of `_arguments`: calls taken apart, and what batch_dim says of each leaf."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from chunkcheck._arguments import Call, batch_entries

# A string stands for an array, anything else for a non-tensor.
ARRAY = "array"


def attend(x: object, table: object = None, *rest: object, mask: object = None) -> Any:
    """Return the arguments as `f` sees them."""
    return x, table, rest, mask


def said(
    batch_dim: object, *args: object, f: Any = attend, **kwargs: object
) -> dict[str, object]:
    """Return the dim of each leaf by path."""
    call, leaves = Call.split(f, args, kwargs)
    entries = batch_entries(call, batch_dim, [leaf == ARRAY for leaf in leaves])
    assert len(entries) == len(leaves)
    values = [entry.value for entry in entries]
    return dict(zip(call.paths, values, strict=True))


def test_invoke_calls_f_with_fresh_containers() -> None:
    inner = {"k": 1}
    call, leaves = Call.split(attend, (inner, 2), {"mask": [3]})
    assert leaves == [1, 2, 3]
    x, table, rest, mask = call.invoke([10, 20, 30])
    assert (x, table, rest, mask) == ({"k": 10}, 20, (), [30])
    assert call.invoke(leaves)[0] is not inner
    assert call.paths == ["args[0]['k']", "args[1]", "kwargs['mask'][0]"]


def test_an_int_holds_for_keywords_too() -> None:
    assert said(1, ARRAY, mask=ARRAY) == {"args[0]": 1, "kwargs['mask']": 1}


def test_a_tuple_describes_positional_arguments() -> None:
    assert said((0, {"a": None, "b": 1}), ARRAY, {"a": ARRAY, "b": ARRAY}, mask=3) == {
        "args[0]": 0,
        "args[1]['a']": None,
        "args[1]['b']": 1,
        "kwargs['mask']": None,
    }


def test_a_tuple_beside_a_keyword_tensor_prints_the_mapping() -> None:
    with pytest.raises(TypeError, match="says nothing of the keyword") as caught:
        said((0, None), ARRAY, ARRAY, mask=ARRAY)
    assert "batch_dim={'x': 0, 'table': None, 'mask': 0}" in str(caught.value)


def test_a_tuple_beside_a_keyword_tensor_of_an_f_without_signature() -> None:
    with pytest.raises(TypeError, match="hold tensors: pass them by position"):
        said((0,), ARRAY, f=torch.add, other=ARRAY)


def test_a_mapping_covers_positional_and_keyword_arguments() -> None:
    dims = {"x": 0, "table": None, "mask": {"m": 1}}
    assert said(dims, ARRAY, ARRAY, mask={"m": ARRAY}) == {
        "args[0]": 0,
        "args[1]": None,
        "kwargs['mask']['m']": 1,
    }
    assert said(dims, ARRAY, table=ARRAY, mask={"m": ARRAY}) == {
        "args[0]": 0,
        "kwargs['table']": None,
        "kwargs['mask']['m']": 1,
    }


def test_a_mapping_takes_star_args_under_their_own_name() -> None:
    dims = {"x": 0, "table": 0, "rest": (None, 1)}
    assert said(dims, ARRAY, ARRAY, ARRAY, ARRAY) == {
        "args[0]": 0,
        "args[1]": 0,
        "args[2]": None,
        "args[3]": 1,
    }


def test_a_mapping_takes_star_kwargs_by_their_names() -> None:
    def f(x: object, **extra: object) -> object:
        return x, extra

    assert said({"x": 0, "bias": None}, ARRAY, f=f, bias=ARRAY) == {
        "args[0]": 0,
        "kwargs['bias']": None,
    }


def test_a_mapping_may_leave_out_what_holds_no_tensor() -> None:
    assert said({"x": 0}, ARRAY, 3, mask="text") == {
        "args[0]": 0,
        "args[1]": None,
        "kwargs['mask']": None,
    }


def test_a_mapping_may_name_a_parameter_that_is_not_given() -> None:
    assert said({"x": 0, "mask": 0, "rest": ()}, ARRAY) == {"args[0]": 0}


def test_a_mapping_that_leaves_out_a_tensor() -> None:
    with pytest.raises(TypeError, match="leaves out 'table', 'mask', where") as caught:
        said({"x": 1}, ARRAY, {"t": ARRAY}, mask=[ARRAY])
    assert "'table': 0 to cut along dim 0, or 'table': None" in str(caught.value)


def test_a_mapping_with_a_name_that_f_does_not_have() -> None:
    with pytest.raises(TypeError, match="names 'tabel', but the parameters") as caught:
        said({"x": 0, "tabel": 0}, ARRAY)
    assert "'x', 'table', 'rest', 'mask'" in str(caught.value)


def test_a_mapping_reads_the_forward_of_a_module() -> None:
    module = torch.nn.MultiheadAttention(4, 1)
    assert said({"query": 1, "key": 1, "value": 1}, ARRAY, ARRAY, ARRAY, f=module) == {
        "args[0]": 1,
        "args[1]": 1,
        "args[2]": 1,
    }


def test_a_mapping_reads_methods_and_partials() -> None:
    class Block:
        def attend(self, x: object, bias: object) -> object:
            return x, bias

    assert said({"x": 0, "bias": None}, ARRAY, ARRAY, f=Block().attend) == {
        "args[0]": 0,
        "args[1]": None,
    }
    f = functools.partial(attend, ARRAY)
    assert said({"table": 1}, ARRAY, f=f) == {"args[0]": 1}


def test_a_mapping_for_an_f_without_signature() -> None:
    with pytest.raises(TypeError, match=r"no signature .* write a tuple"):
        said({"x": 0}, ARRAY, f=torch.relu)


def test_too_many_arguments_for_f() -> None:
    def f(x: object) -> object:
        return x

    with pytest.raises(TypeError, match=r"takes 1 positional arguments \(x\), found 2"):
        said({"x": 0}, ARRAY, ARRAY, f=f)


@pytest.mark.parametrize(
    ("batch_dim", "message"),
    [
        ((0,), r"batch_dim is \(0,\), but args is a tuple of 2"),
        ((0, (0, 0)), r"batch_dim\[1\] is \(0, 0\), but args\[1\] is a single value"),
        (
            {"x": (0, 0), "table": 0},
            r"batch_dim\['x'\] is .* but args\[0\] is a single",
        ),
    ],
)
def test_an_entry_that_does_not_fit(batch_dim: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        said(batch_dim, ARRAY, ARRAY)


def test_a_list_is_told_to_be_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"the list \[0, None\]: write the tuple \(0"):
        said([0, None], ARRAY, ARRAY)
