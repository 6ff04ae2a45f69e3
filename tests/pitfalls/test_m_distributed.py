"""Pitfalls M: DistributedDataParallel and FSDP2, on two ranks of gloo.

Two processes train all cases once; each test looks at one of them, on both ranks, and
compares with one process on the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import backward
from torch.distributed import device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths
from reference import (
    STRATEGIES,
    Strategy,
    assert_close,
    assert_same_gradients,
    own_checkpoint,
    strategies,
)

RANKS = 2
ROWS = 5  # of each rank, in chunks of 2
STEPS = 2

# "reentrant" refuses process groups.
parallel = strategies(without=("reentrant",))
IN_FORWARD: Final = "grad_in_forward"
NAMES = {s if isinstance(s, str) else own_checkpoint.__name__: s for s in STRATEGIES}
del NAMES["reentrant"]


@dataclass(frozen=True)
class Case:
    """How to train: `chunks` is the name of a strategy, or "" for plain."""

    kind: str  # the wrapper and what it wraps
    option: str = ""
    chunks: str = ""
    history: bool = False

    @property
    def plain(self) -> Case:
        return replace(self, chunks="")


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "no_sync": {},
    "whole_model": {},
}
SHARDED = ("unit_in_f", "loop_in_unit", "nested_units")

Outcome: TypeAlias = dict[str, Tensor] | str  # or the error


def _cases() -> Iterator[Case]:
    for option in DDP_OPTIONS:
        for name in NAMES:
            for history in (False, True):
                yield Case("ddp", option, name, history)
        if option != "whole_model":
            yield Case("ddp", option, IN_FORWARD)
    for kind in SHARDED:
        for option in ("default", "two_calls", "mixed_precision"):
            for history in (False, True):
                yield Case(kind, option, "", history)
                for name in NAMES:
                    yield Case(kind, option, name, history)


class Block(nn.Module):
    """A residual MLP, chunked."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift.exp() if self.case.history else self.shift

        def f(x: Tensor) -> Tensor:
            result: Tensor = self.mlp(x + shift.to(x.dtype))
            return result

        return x + _chunked(self.case, f, x)


class Model(nn.Module):
    """Two of them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        outside = case.option == "whole_model"  # chunked as a whole, from outside
        self.in_forward = case.chunks == IN_FORWARD
        inner = case.plain if outside or self.in_forward else case
        self.first, self.second = Block(inner), Block(inner)
        if case.option == "find_unused_parameters":
            self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result, or under "grad_in_forward" the loss."""
        if not self.in_forward:
            result: Tensor = self.second(self.first(x))
            return result
        return chunk_and_checkpoint(
            lambda x: _loss(self.second(self.first(x))),
            x,
            chunk_size=2,
            out_dim="mean",
            strategy=IN_FORWARD,
        )


def _loss(y: Tensor) -> Tensor:
    return y.double().sin().mean() if y.dim() else y


def _chunked(case: Case, f: Any, x: Tensor) -> Tensor:
    if case.chunks:
        f = functools.partial(
            chunk_and_checkpoint, f, chunk_size=2, strategy=NAMES[case.chunks]
        )
    result: Tensor = f(x)
    return result


def _model(case: Case) -> Model:
    torch.manual_seed(3)
    return Model(case).double()


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, RANKS, ROWS, 4, dtype=torch.float64, generator=generator)


def _train(case: Case, model: nn.Module, inner: nn.Module, ranks: slice) -> Outcome:
    """Train on the rows of some ranks; return parameters, gradients, and hook calls."""
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    named = dict(inner.named_parameters())
    found: dict[str, Tensor] = {}
    calls: list[object] = []
    for parameter in named.values():
        parameter.register_post_accumulate_grad_hook(calls.append)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = (half[ranks].flatten(0, 1) for half in _batch(step))

        def loss(x: Tensor) -> Tensor:
            y = _chunked(case, model, x) if case.option == "whole_model" else model(x)
            return _loss(y)

        if case.option == "two_calls":
            backward(loss(first) + 2 * loss(second))
        else:
            silent = model.no_sync() if _accumulates(case, model) else None  # type: ignore[operator]
            with silent or contextlib.nullcontext():
                backward(loss(first))
            if case.option == "no_sync":
                backward(loss(second))
        for name, parameter in named.items():
            if parameter.grad is not None:
                found[f"{step} {name}.grad"] = _whole(parameter.grad).clone()
        optimizer.step()
    found.update({name: _whole(p).detach().clone() for name, p in named.items()})
    if case.kind == "ddp":  # FSDP2 sets the gradients by itself
        found["hook calls"] = torch.tensor(len(calls))
    return found


def _accumulates(case: Case, model: nn.Module) -> bool:
    return case.option == "no_sync" and isinstance(model, DistributedDataParallel)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _shard(case: Case, model: Model) -> None:
    name = "torch.distributed.fsdp"
    if not hasattr(importlib.import_module(name), "fully_shard"):
        name = "torch.distributed._composable.fsdp"
    fsdp: Any = importlib.import_module(name)
    mesh = device_mesh.init_device_mesh("cpu", (RANKS,))
    given: dict[str, Any] = {"mesh": mesh}
    if case.option == "mixed_precision":
        given["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in (model.first, model.second):
        units: dict[str, list[nn.Module]] = {
            "unit_in_f": [block.mlp],
            "loop_in_unit": [block],
            "nested_units": [block.mlp[0], block.mlp[2], block],
        }
        for unit in units[case.kind]:
            fsdp.fully_shard(unit, **given)
    fsdp.fully_shard(model, mesh=mesh)


def _on_rank(case: Case, rank: int) -> Outcome:
    model = _model(case)
    mine = slice(rank, rank + 1)
    if case.kind == "ddp":
        wrapped = DistributedDataParallel(model, **DDP_OPTIONS[case.option])
        return _train(case, wrapped, model, mine)
    _shard(case, model)
    return _train(case, model, model, mine)


def work(rank: int, folder: str) -> None:
    """Train all cases in one of the processes."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    outcomes: dict[Case, Outcome] = {}
    for case in _cases():
        try:
            outcomes[case] = _on_rank(case, rank)
        except Exception:  # noqa: BLE001 (the case's test shows it)
            outcomes[case] = traceback.format_exc()
    refused = ""
    try:
        chunk_and_checkpoint(
            nn.Linear(4, 4), torch.ones(3, 4), chunk_size=2, strategy="reentrant"
        )
    except RuntimeError as error:
        refused = str(error)
    torch.save((list(outcomes.items()), refused), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Ranks:
    """What the two processes found."""

    outcomes: list[dict[Case, Outcome]]
    refused: list[str]

    def of(self, case: Case) -> list[dict[str, Tensor]]:
        found = []
        for outcomes in self.outcomes:
            outcome = outcomes[case]
            assert not isinstance(outcome, str), outcome
            found.append(outcome)
        return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = str(tmp_path_factory.mktemp("ranks"))
    spawn(work, (folder,), nprocs=RANKS)
    found = [
        torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
        for rank in range(RANKS)
    ]
    return Ranks([dict(items) for items, _ in found], [refused for _, refused in found])


def _name(strategy: Strategy) -> str:
    return next(name for name, value in NAMES.items() if value is strategy)


def _expected(case: Case) -> dict[str, Tensor]:
    """Train in this process on the rows of all ranks."""
    model = _model(case.plain)
    outcome = _train(case.plain, model, model, slice(None))
    assert not isinstance(outcome, str)
    return outcome


def _assert_same(ranks: Ranks, case: Case) -> None:
    expected = _expected(case)
    for found in ranks.of(case):
        assert_same_gradients(found, expected)


@parallel
@both_paths
def test_pytorch_24005_two_chunked_mlps(
    ranks: Ranks, strategy: Strategy, *, history: bool
) -> None:
    """No parameter is ready twice under DDP, and gradients are those of one process."""
    _assert_same(ranks, Case("ddp", "default", _name(strategy), history))


def test_pytorch_24005_reentrant_refuses(ranks: Ranks) -> None:
    assert all("process group of 2 ranks" in refused for refused in ranks.refused)


@parallel
@both_paths
@pytest.mark.parametrize(
    "option", ["find_unused_parameters", "static_graph", "bucket_view"]
)
def test_pytorch_69060_ddp_options(
    ranks: Ranks, strategy: Strategy, option: str, *, history: bool
) -> None:
    """The flags of DDP work: a parameter that is never used, a static graph, views."""
    case = Case("ddp", option, _name(strategy), history)
    expected = _expected(case)
    for found in ranks.of(case):
        for name, tensor in expected.items():
            assert_close(found[name], tensor, name)


@parallel
@both_paths
def test_pytorch_109191_no_sync(
    ranks: Ranks, strategy: Strategy, *, history: bool
) -> None:
    """Gradients accumulated under no_sync are the true mean, the same on each rank."""
    case = Case("ddp", "no_sync", _name(strategy), history)
    _assert_same(ranks, case)
    first, second = ranks.of(case)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@parallel
@both_paths
def test_ms_swift_3171_whole_ddp_model_chunked(
    ranks: Ranks, strategy: Strategy, *, history: bool
) -> None:
    """As the guide says: DDP's model may itself be `f`."""
    _assert_same(ranks, Case("ddp", "whole_model", _name(strategy), history))


@pytest.mark.parametrize("option", [o for o in DDP_OPTIONS if o != "whole_model"])
def test_gradients_in_forward_under_ddp(ranks: Ranks, option: str) -> None:
    _assert_same(ranks, Case("ddp", option, IN_FORWARD))


def _skip_without_fsdp(ranks: Ranks, case: Case) -> None:
    """Skip where FSDP2 of this torch fails without us: gloo, or a recompute of a unit.

    Up to 2.9 it neither gathers nor casts again for torch's own checkpoint, either.
    """
    recomputes = case.chunks not in ("", "none")
    witness = "own_checkpoint" if recomputes else ""
    outcome = ranks.outcomes[0][replace(case, chunks=witness)]
    if isinstance(outcome, str):
        errors = [line for line in outcome.splitlines() if "Error: " in line]
        pytest.skip(f"FSDP2 itself fails here: {errors[-1]}")


@parallel
@both_paths
@pytest.mark.parametrize("kind", SHARDED)
def test_pytorch_82203_fsdp2(
    ranks: Ranks, strategy: Strategy, kind: str, *, history: bool
) -> None:
    """Sharded units in `f`, which gather as they run, and the loop within a unit."""
    case = Case(kind, "default", _name(strategy), history)
    _skip_without_fsdp(ranks, case)
    expected = _expected(case)
    for found in ranks.of(case):
        assert_same_gradients(found, expected)


@parallel
@both_paths
@pytest.mark.parametrize("kind", SHARDED)
def test_pytorch_153354_fsdp2_two_calls_one_backward(
    ranks: Ranks, strategy: Strategy, kind: str, *, history: bool
) -> None:
    """Two forwards before one backward leave no mixture of tensors and DTensors."""
    case = Case(kind, "two_calls", _name(strategy), history)
    _skip_without_fsdp(ranks, case)
    expected = _expected(case)
    for found in ranks.of(case):
        assert_same_gradients(found, expected)


@parallel
@both_paths
@pytest.mark.parametrize("kind", SHARDED)
def test_pytorch_159359_fsdp2_mixed_precision(
    ranks: Ranks, strategy: Strategy, kind: str, *, history: bool
) -> None:
    """The casts of FSDP2 happen in recompute as well: right up to bf16's rounding."""
    case = Case(kind, "mixed_precision", _name(strategy), history)
    _skip_without_fsdp(ranks, case)
    for found, plain in zip(ranks.of(case), ranks.of(case.plain), strict=True):
        for name in plain:
            assert found[name].dtype == plain[name].dtype == torch.float64
            assert_close(found[name].bfloat16(), plain[name].bfloat16(), name)
