"""Tests of `_plan`: chunk sizes, row ranges, which leaf is cut, how results join."""

from __future__ import annotations

import pytest

from chunkcheck._plan import (
    Join,
    Leaf,
    Plan,
    check_out_dim,
    check_rows,
    checked_size,
    plan_arguments,
    plan_results,
)
from chunkcheck._tree import Entry


def leaf(
    shape: tuple[int, ...] | None,
    dim: object = 0,
    *,
    exact: bool = False,
    absent: bool = False,
    path: str = "args[0]",
) -> Leaf:
    """Return a leaf with an entry of its own."""
    return Leaf(path, shape, Entry(dim, exact, "batch_dim"), absent)


def plan(*shapes: tuple[int, ...], size: int | None, dim: int = 0) -> Plan:
    """Return the plan for tensors of these shapes."""
    return plan_arguments([leaf(shape, dim) for shape in shapes], size)


@pytest.mark.parametrize(
    ("rows", "size", "ranges"),
    [
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (4, 2, [(0, 2), (2, 4)]),
        (4, 4, [(0, 4)]),
        (4, 9, [(0, 4)]),
        (4, None, [(0, 4)]),
        (1, 1, [(0, 1)]),
        (0, 3, [(0, 0)]),
        (0, None, [(0, 0)]),
    ],
)
def test_ranges_cover_all_rows_once(
    rows: int, size: int | None, ranges: list[tuple[int, int]]
) -> None:
    assert list(plan((rows, 3), size=size)) == ranges


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "positive int, or None for one chunk, found 0"),
        (-3, ValueError, "found -3"),
        (True, TypeError, "found True of type bool"),
        (2.0, TypeError, "found 2.0 of type float"),
        ("4", TypeError, "found '4' of type str"),
    ],
)
def test_chunk_size_of_the_wrong_kind(
    value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked_size(value)


def test_dims_are_normalized_per_leaf() -> None:
    result = plan_arguments([leaf((2, 5), -1), leaf((3, 4, 5), -1)], 2)
    assert result.dims == (1, 2)
    assert result.rows == 5
    assert result.shared_dim == -1


def test_size_one_passes_whole_and_none_and_scalars_too() -> None:
    result = plan_arguments(
        [leaf((6, 2)), leaf((1, 2)), leaf((6, 2), None), leaf(()), leaf(None)], 2
    )
    assert result.dims == (0, None, None, None, None)
    assert result.passes_one
    assert result.shared_dim == 0


def test_a_batch_of_one_row_is_cut() -> None:
    result = plan((1, 2), (1, 3), size=4)
    assert result.dims == (0, 0)
    assert not result.passes_one


def test_dims_that_differ_share_none() -> None:
    result = plan_arguments([leaf((4, 2), 0), leaf((2, 4), 1)], 2)
    assert result.shared_dim is None


def test_dims_written_differently_may_be_the_same() -> None:
    result = plan_arguments([leaf((2, 4), -1), leaf((2, 4), 1)], 2)
    assert result.shared_dim == 1


def test_sizes_that_differ_are_listed_with_paths() -> None:
    leaves = [
        leaf((6, 2), path="args[0]['x']"),
        leaf((5, 6), 1, path="args[1]"),
        leaf((4, 2), path="args[2]"),
        leaf((1, 2), path="args[3]"),
    ]
    with pytest.raises(ValueError, match="must agree in size") as caught:
        plan_arguments(leaves, 2)
    message = str(caught.value)
    assert "args[0]['x'] of shape (6, 2): size 6 along dim 0" in message
    assert "args[1] of shape (5, 6): size 6 along dim 1" in message
    assert "args[2] of shape (4, 2): size 4 along dim 0" in message
    assert "args[3] of shape (1, 2): size 1 along dim 0" in message


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_a_leaf_lacks(dim: int) -> None:
    with pytest.raises(
        ValueError,
        match=rf"args\[0\] has shape \(3, 4\) and so no dim {dim}.*None there",
    ):
        plan((3, 4), size=2, dim=dim)


@pytest.mark.parametrize(
    "leaves", [[], [leaf(())], [leaf((3,), None)], [leaf(None)]], ids=repr
)
def test_nothing_to_chunk(leaves: list[Leaf]) -> None:
    with pytest.raises(ValueError, match="no tensor is chunked"):
        plan_arguments(leaves, 2)


@pytest.mark.parametrize("dim", [True, 0.0, "0", (1,)])
def test_a_batch_dim_that_is_no_int(dim: object) -> None:
    with pytest.raises(TypeError, match="batch_dim must be an int or None, found"):
        plan_arguments([leaf((3, 4), dim)], 2)


def test_what_passes_whole_has_no_say_in_the_shared_dim() -> None:
    result = plan_arguments([leaf((6, 2), -2), leaf((3, 1), 1), leaf((4,), None)], 2)
    assert result.shared_dim == -2


def test_an_explicit_int_at_a_non_tensor() -> None:
    with pytest.raises(TypeError, match=r"args\[0\] is no tensor, but batch_dim is 0"):
        plan_arguments([leaf(None, exact=True), leaf((3, 4))], 2)


def test_an_explicit_int_at_an_absent_optional() -> None:
    result = plan_arguments([leaf(None, exact=True, absent=True), leaf((3, 4))], 2)
    assert result.dims == (None, 0)


def out(
    shape: tuple[int, ...] | None, dim: object = "auto", *, exact: bool = True
) -> Leaf:
    """Return a result leaf."""
    return Leaf("result", shape, Entry(dim, exact, "out_dim"), absent=False)


def test_results_join_along_the_shared_dim() -> None:
    p = plan((6, 2), size=2)
    joins = plan_results([out((2, 5)), out(None), out((3,), None)], p, 2)
    assert joins == (
        Join("result", 0, tensor=True),
        Join("result", None, tensor=False),
        Join("result", None, tensor=True),
    )


def test_negative_shared_dim_counts_from_the_end_of_each_result() -> None:
    p = plan((3, 7, 6), size=4, dim=-1)
    assert plan_results([out((2, 4))], p, 4)[0].dim == 1


@pytest.mark.parametrize("dim", [0, 1, "auto"])
def test_a_result_without_dims(dim: object) -> None:
    with pytest.raises(ValueError, match=r"0-dimensional.*use out_dim='sum' or 'mean'"):
        plan_results([out((), dim)], plan((6, 2), size=2), 2)


def test_default_dim_is_refused_where_the_row_check_cannot_tell() -> None:
    even = plan((4, 6), size=2, dim=1)
    with pytest.raises(ValueError, match=r"both dim 1 and dim 0 .* write out_dim=1"):
        plan_results([out((2, 2))], even, 2)
    # It can tell where lengths differ, where the caller says, or for one chunk.
    assert plan_results([out((2, 2), 1)], even, 2)[0].dim == 1
    assert plan_results([out((2, 2))], plan((4, 5), size=2, dim=1), 2)[0].dim == 1
    assert plan_results([out((6, 6))], plan((4, 6), size=6, dim=1), 6)[0].dim == 1
    assert plan_results([out((2, 2))], plan((6, 4), size=2), 2)[0].dim == 0


def test_default_dim_is_refused_for_one_row_beside_a_whole_one() -> None:
    p = plan((4, 2), (1, 2), size=1)
    with pytest.raises(ValueError, match=r"every chunk has one row.*write out_dim=0"):
        plan_results([out((1, 2))], p, 1)
    assert plan_results([out((1, 2), 0)], p, 1)[0].dim == 0
    assert plan_results([out((1, 2), None)], p, 1)[0].dim is None
    assert plan_results([out((2, 2))], plan((4, 2), (1, 2), size=2), 2)[0].dim == 0


def test_check_rows_never_broadcasts() -> None:
    join = Join("result[1]", 0, tensor=True)
    check_rows(join, (2, 3), 2, "rows 0:2 of 6")
    with pytest.raises(
        ValueError,
        match=r"result\[1\] has shape \(1, 3\) for rows 0:2 of 6: expected 2",
    ):
        check_rows(join, (1, 3), 2, "rows 0:2 of 6")
    with pytest.raises(ValueError, match="expected 2 rows"):
        check_rows(join, (), 2, "rows 0:2 of 6")
    check_rows(Join("result", None, tensor=True), (1, 3), 2, "rows 0:2 of 6")


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_reductions_need_no_shared_dim(name: str) -> None:
    p = plan_arguments([leaf((4, 2), 0), leaf((2, 4), 1)], 2)
    check_out_dim((0, name), p)
    check_out_dim({"loss": name}, p)


def test_weights_are_shares_of_the_rows() -> None:
    p = plan((10, 2), size=4)
    assert [p.weight(chunk) for chunk in range(3)] == [0.4, 0.4, 0.2]
    assert plan((10, 2), size=10).weight(0) == 1
    assert plan((0, 2), size=4).weight(0) == 1


@pytest.mark.parametrize("value", ["max", True, 0.5, (0, "max"), {"a": [1.0]}])
def test_out_dim_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match=r"out_dim.* must be an int, None, 'sum'"):
        check_out_dim(value, plan((6, 2), size=2))


def test_out_dim_must_be_given_where_no_dim_is_shared() -> None:
    p = plan_arguments([leaf((4, 2), 0), leaf((2, 4), 1)], 2)
    with pytest.raises(ValueError, match="share no batch dim, so out_dim must say"):
        check_out_dim("auto", p)
    check_out_dim(0, p)
    with pytest.raises(ValueError, match=r"out_dim must say along which dim result"):
        plan_results([out((2, 2))], p, 2)
    assert plan_results([out(None)], p, 2)[0].tensor is False


def test_explicit_out_dim_at_a_non_tensor() -> None:
    p = plan((6, 2), size=2)
    with pytest.raises(TypeError, match="result is no tensor, but out_dim is 0"):
        plan_results([out(None, 0)], p, 2)
    assert plan_results([out(None, 0, exact=False)], p, 2)[0].tensor is False
