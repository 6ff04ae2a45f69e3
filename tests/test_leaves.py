"""Tests of `_leaves`: what takes part, and what is refused with a remedy."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chunkcheck import _torch
from chunkcheck._leaves import classify, is_array
from chunkcheck._tree import Entry


@dataclasses.dataclass
class Batch:
    """A container that nobody registered."""

    x: Any


@dataclasses.dataclass(eq=False)
class Module(torch.nn.Module):
    """A module that happens to be a dataclass."""

    weight: Any

    def __post_init__(self) -> None:
        super().__init__()


def entry(dim: object = 0, *, exact: bool = False) -> Entry:
    """Return what batch_dim says of a leaf."""
    return Entry(dim, exact, "batch_dim")


def test_a_tensor_gives_its_shape() -> None:
    leaf = classify("args[0]", torch.ones(2, 3), entry(), _torch)
    assert (leaf.path, leaf.shape, leaf.absent) == ("args[0]", (2, 3), False)


@pytest.mark.parametrize(
    "value", [1, "s", object(), torch.float32, Batch(1), {1}, np.float64(3), print]
)
def test_anything_else_has_no_shape(value: object) -> None:
    assert classify("args[0]", value, entry(), _torch).shape is None


def test_none_is_an_absent_optional() -> None:
    leaf = classify("args[0]", None, entry(exact=True), _torch)
    assert leaf.absent
    assert leaf.shape is None


OPAQUE = [
    pytest.param(Batch(torch.ones(2)), "tests?.*Batch", id="dataclass"),
    pytest.param(Batch({"a": [torch.ones(2)]}), "Batch", id="nested"),
    pytest.param(UserDict(x=torch.ones(2)), "UserDict", id="mapping"),
    pytest.param(type("D", (dict,), {})(x=torch.ones(2)), "D", id="dict subclass"),
    pytest.param({torch.ones(2)}, "builtins.set", id="set"),
    pytest.param({"x": torch.ones(2)}.values(), "dict_values", id="values"),
    pytest.param(SimpleNamespace(x=torch.ones(2)), "SimpleNamespace", id="namespace"),
    pytest.param(
        torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)]), "PackedSequence", id="rnn"
    ),
]


@pytest.mark.parametrize(("value", "name"), OPAQUE)
def test_an_unregistered_container_of_tensors(value: object, name: str) -> None:
    with pytest.raises(
        TypeError,
        match=rf"args\[0\] is of type .*{name}.*, which holds tensors.*register",
    ):
        classify("args[0]", value, entry(), _torch)
    assert classify("args[0]", value, entry(None), _torch).shape is None


def test_a_container_that_holds_itself() -> None:
    cyclic = Batch([])
    cyclic.x.append(cyclic)
    assert classify("args[0]", cyclic, entry(), _torch).shape is None


def test_a_module_is_no_batch() -> None:
    module = Module(torch.ones(3))
    assert classify("args[0]", module, entry(), _torch).shape is None


def test_an_array_of_another_library() -> None:
    with pytest.raises(TypeError, match=r"another library \(numpy.ndarray\): convert"):
        classify("args[0]", np.ones(3), entry(), _torch)
    assert classify("args[0]", np.ones(3), entry(None), _torch).shape is None


def named() -> torch.Tensor:
    value: Any = torch.ones(2, 3)
    found: torch.Tensor = value.refine_names("N", "C")
    return found


TENSORS = [
    pytest.param(lambda: torch.eye(3).to_sparse(), r"sparse_coo.*to_dense", id="coo"),
    pytest.param(
        lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr.*to_dense", id="csr"
    ),
    pytest.param(
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested tensor.*padded",
        id="nested",
    ),
    pytest.param(
        named,
        r"named tensor.*\.rename\(None\)",
        id="named",
        marks=[
            pytest.mark.skipif(
                not hasattr(torch.Tensor, "refine_names"),
                reason="torch has no named tensors any more",
            ),
            pytest.mark.filterwarnings("ignore:Named tensors"),
        ],
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "message"), TENSORS)
def test_a_tensor_that_cannot_be_cut(
    make: Callable[[], torch.Tensor], message: str
) -> None:
    value = make()
    assert is_array(value)
    with pytest.raises(
        TypeError, match=rf"args\[0\] is a .*{message}.*None for its dim"
    ):
        classify("args[0]", value, entry(), _torch)
    classify("args[0]", value, entry(None), _torch)


def test_is_array() -> None:
    assert is_array(torch.ones(1))
    assert is_array(np.ones(1))
    assert not is_array(torch.tensor(1.0))
    assert not is_array(np.float64(1))
    assert not is_array([1])
    assert not is_array(torch.nn.Linear(2, 2))
