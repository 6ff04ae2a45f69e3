"""Tests of `_torch.results`: chunks checked against the first one and joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from chunkcheck import Fused, chunk_and_checkpoint
from chunkcheck._plan import Leaf, Plan, plan_arguments
from chunkcheck._torch.results import Results
from chunkcheck._tree import Entry, flatten


def plan(rows: int = 6, size: int = 4) -> Plan:
    """Return the plan for a tensor of two columns."""
    leaf = Leaf("args[0]", (rows, 2), Entry(0, exact=False, where="batch_dim"))
    return plan_arguments([leaf], size)


def joined(
    *chunks: Any, out_dim: object = "auto", arguments: tuple[Tensor, ...] = ()
) -> Any:
    """Return what the results of some chunks become."""
    p = plan()
    results = Results(p, out_dim)
    for index, chunk in enumerate(chunks):
        values, tree = flatten(chunk)
        results.put(results.accept(tree, values, index), index)
    return results.rebuilt(results.join(arguments))


def test_each_leaf_is_joined_as_planned() -> None:
    first, last = torch.ones(4, 2), torch.zeros(2, 2)
    constant = torch.tensor([7.0])
    got = joined(
        {"y": first, "n": 3, "c": constant},
        {"c": constant + 1, "n": 3.0, "y": last},
        out_dim={"y": 0, "n": None, "c": None},
    )
    assert list(got) == ["y", "n", "c"]
    assert torch.equal(got["y"], torch.cat([first, last]))
    assert got["n"] == 3
    assert got["c"] is constant


def test_what_shares_memory_with_an_argument_is_copied() -> None:
    argument = torch.ones(3)
    got = joined(argument[:2], argument[:2], out_dim=None, arguments=(argument,))
    assert torch.equal(got, argument[:2])
    got.zero_()
    assert torch.equal(argument, torch.ones(3))


@pytest.mark.parametrize("there", [float("nan"), "a", None, 2, torch.float32])
def test_equal_values_agree(there: object) -> None:
    got, _ = joined((there, torch.ones(4, 2)), (there, torch.ones(2, 2)))
    assert got is there


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (
            (1, 2),
            r"result is 1 for rows 0:4 of 6, but 2 for rows 4:6 of 6: ",
        ),
        (
            (torch.ones(4, 2), None),
            r"a Tensor of torch.float32 and shape .* None",
        ),
        ((None, torch.ones(2, 2)), r"result is None for rows 0:4 of 6, but a Tensor"),
        ((torch.ones(4, 2), torch.ones(2, 3)), r"\(2, 3\).*agree in all else"),
        ((torch.ones(4, 2), torch.ones(2, 2, 1)), r"\(2, 2, 1\).*agree in all else"),
        ((torch.ones(4, 2), torch.ones(2, 2).int()), r"torch.int32.*agree in all else"),
        (
            (torch.ones(4, 2), torch.ones(1, 2)),
            r"result has shape \(1, 2\) for rows 4",
        ),
        (([1], (1,)), r"differs in structure .* result is a list .* is a tuple"),
    ],
)
def test_a_chunk_that_differs_from_the_first(
    chunks: tuple[Any, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        joined(*chunks)


def test_a_result_that_holds_tensors_out_of_reach() -> None:
    with pytest.raises(TypeError, match=r"result\['s'\] is of type builtins.set"):
        joined({"s": {torch.ones(4)}}, {"s": {torch.ones(2)}})


def test_values_that_are_not_there_are_not_compared() -> None:
    """Under fake tensors, recompute has shapes to compare and no values."""
    x = torch.ones(4, 3, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = chunk_and_checkpoint(
            torch.sin, x, chunk_size=2, strategy=Fused(determinism_check="values")
        )
        (gradient,) = torch.autograd.grad(y.sum(), [x])
    assert gradient.shape == x.shape
