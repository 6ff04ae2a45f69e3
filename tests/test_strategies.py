"""Tests of `_strategies`: declarations, names, and what is no strategy."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, get_args

import pytest
import torch

import chunkcheck
from chunkcheck import (
    Fused,
    GradInForward,
    NoCheckpoint,
    NonReentrant,
    Reentrant,
)
from chunkcheck._strategies import resolve_strategy


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("auto", Fused(fall_back=True)),
        ("fused", Fused()),
        ("grad_in_forward", GradInForward()),
        ("non_reentrant", NonReentrant()),
        ("reentrant", Reentrant()),
        ("none", NoCheckpoint()),
    ],
)
def test_names_stand_for_the_default_options(name: str, strategy: object) -> None:
    assert resolve_strategy(name) == strategy


def test_every_name_is_known() -> None:
    for name in get_args(chunkcheck.StrategyName):
        resolve_strategy(name)


@pytest.mark.parametrize(
    "strategy",
    [
        Fused(keep_chunks=2, accumulate_dtype=None, determinism_check="values"),
        GradInForward(accumulate_dtype=None),
        NonReentrant(preserve_rng_state=False, determinism_check="none"),
        Reentrant(preserve_rng_state=False),
        NoCheckpoint(),
    ],
    ids=repr,
)
def test_instances_are_values(
    strategy: Fused | GradInForward | NonReentrant | Reentrant | NoCheckpoint,
) -> None:
    assert resolve_strategy(strategy) is strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert len({strategy, dataclasses.replace(strategy)}) == 1
    assert type(strategy).__name__ in repr(strategy)
    for field in dataclasses.fields(strategy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, field.name, None)


def test_each_has_only_its_own_options() -> None:
    def options(strategy: type) -> list[str]:
        return [field.name for field in dataclasses.fields(strategy)]

    assert options(NoCheckpoint) == []
    assert options(Reentrant) == ["preserve_rng_state"]
    assert options(Fused) == [
        "preserve_rng_state",
        "preserve_python_rng_state",
        "generators",
        "determinism_check",
        "context_fn",
        "accumulate_dtype",
        "keep_chunks",
        "fall_back",
    ]
    assert options(GradInForward) == ["accumulate_dtype"]
    assert options(NonReentrant) == [
        "preserve_rng_state",
        "determinism_check",
        "context_fn",
        "early_stop",
    ]


def test_any_callable_is_a_strategy() -> None:
    own: Any = print
    assert resolve_strategy(own) is own


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "strategy is None: write strategy='none'"),
        (
            NonReentrant,
            TypeError,
            r"the class NonReentrant: .*strategy=NonReentrant\(\)",
        ),
        (7, TypeError, "must be one of 'auto'.*found 7 of type int"),
        ("nonreentrant", ValueError, "did you mean 'non_reentrant'"),
        (
            "zzz",
            ValueError,
            "'zzz' is none of 'auto', 'fused', 'grad_in_forward', 'non_reentrant', ",
        ),
    ],
)
def test_what_is_no_strategy(
    value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_strategy(value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"determinism_check": "foo"}, ValueError, "'default' or 'none', found 'foo'"),
        ({"context_fn": 3}, TypeError, "a callable that returns two .* found 3"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NonReentrant(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"determinism_check": "all"}, ValueError, "'values' or 'none', found 'all'"),
        ({"context_fn": 3}, TypeError, "a callable that returns two .* found 3"),
        ({"preserve_rng_state": None}, TypeError, "must be a bool, found None"),
        ({"keep_chunks": -1}, ValueError, "0 or more chunks, found -1"),
        ({"keep_chunks": 1.0}, TypeError, "must be an int, found 1.0 of type float"),
        ({"keep_chunks": True}, TypeError, "must be an int, found True of type bool"),
        ({"accumulate_dtype": "float32"}, TypeError, "torch.float32.*found 'float32'"),
        ({"accumulate_dtype": torch.int32}, TypeError, "floating .*found torch.int32"),
        ({"generators": [torch.Generator()]}, TypeError, r"a tuple of torch.Generat"),
        ({"generators": (1,)}, TypeError, r"a tuple of torch.Generator, found \(1,\)"),
    ],
    ids=str,
)
def test_options_of_the_engine_of_the_wrong_kind(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Fused(**options)
