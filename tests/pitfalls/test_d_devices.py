"""Pitfalls D, continued: of which devices the random state is replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import Strategy, assert_same_as_loop, strategies

fused = pytest.mark.parametrize("strategy", ["auto", "fused"])


def _mlp(device: torch.device) -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)]
    return nn.Sequential(*layers).to(device, torch.float64)


def _x(device: torch.device) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)


# A device of its own, of which there are no tensors that can be computed with. What is
# drawn on it comes from a state for each index, which nothing but the device leads to.
SCRIPT = """
import json, sys, types
import torch
from chunkcheck import Fused, chunked

torch.utils.rename_privateuse1_backend("toy")
toy = types.ModuleType("torch.toy")
states, calls = {}, []

def get_rng_state(device="toy"):
    calls.append(str(device))
    return states[torch.device(device).index].get_state()

def set_rng_state(state, device="toy"):
    calls.append(str(device))
    states[torch.device(device).index].set_state(state)

def draw_all():
    return [torch.rand((), generator=state).item() for state in states.values()]

toy.get_rng_state, toy.set_rng_state = get_rng_state, set_rng_state
toy.draw = draw_all  # under another name, or a search of f would find the states
torch._register_device_module("toy", toy)

class Toy(torch.Tensor):
    @staticmethod
    def __new__(cls, index):
        device = torch.device("toy", index)
        return torch.Tensor._make_wrapper_subclass(cls, (5,), device=device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]  # only ever detached, or looked at

def case(place, history, **options):
    for index in range(2):
        states[index] = torch.Generator().manual_seed(index)
    calls.clear()
    first, second = Toy(0), Toy(1)
    captured = [first, second] if place == "captured" else None
    leaf = torch.rand((), requires_grad=True)
    shift = -leaf if history else leaf
    seen = []

    def f(x, tree, *, keyword=None):
        captured
        drawn = toy.draw()
        seen.append(drawn)
        return x * drawn[0] * drawn[1] * shift

    tree = {"deep": [(first,), second]} if place == "nested" else None
    named = {"keyword": (first, second)} if place == "keyword" else {}
    dims = {"x": 0, "tree": None, "keyword": None}
    call = chunked(f, chunk_size=2, batch_dim=dims, strategy=Fused(**options))
    y = call(torch.ones(5, 2, requires_grad=True), tree, **named)
    after = [s.get_state().tolist() for s in states.values()]
    y.sum().backward()
    return {
        "forward": seen[:3],
        "recompute": seen[3:],
        "stream kept": after == [s.get_state().tolist() for s in states.values()],
        "calls": sorted(set(calls)),
    }

found = {}
for history in (False, True):
    for place in ("captured", "nested", "keyword", "nowhere"):
        found[f"{place} {history}"] = case(place, history)
    found[f"off {history}"] = case("captured", history, preserve_rng_state=False)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def toy() -> dict[str, dict[str, Any]]:
    """Return what runs saw on a device that only a backend of its own knows."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def _assert_replayed(found: dict[str, Any]) -> None:
    assert len(found["forward"]) == 3
    assert sorted(found["recompute"]) == sorted(found["forward"])
    assert found["stream kept"]
    assert found["calls"] == ["toy:0", "toy:1"]


@both_paths
@pytest.mark.parametrize("place", ["captured", "keyword"])
def test_pytorch_14518_devices_of_all_that_f_uses(
    toy: dict[str, dict[str, Any]], place: str, *, history: bool
) -> None:
    """Devices of captured and of keyword tensors count, each with its index."""
    _assert_replayed(toy[f"{place} {history}"])


@both_paths
def test_pytorch_121212_devices_of_nested_arguments(
    toy: dict[str, dict[str, Any]], *, history: bool
) -> None:
    """So do those of tensors in lists, tuples and dicts."""
    _assert_replayed(toy[f"nested {history}"])


@both_paths
def test_pytorch_196951_devices_of_other_backends(
    toy: dict[str, dict[str, Any]], *, history: bool
) -> None:
    """A backend is asked by the type of a tensor's device, and only if there is one."""
    _assert_replayed(toy[f"captured {history}"])
    found = toy[f"nowhere {history}"]
    assert found["calls"] == []
    assert sorted(found["recompute"]) != sorted(found["forward"])


@strategies()
@both_paths
def test_pytorch_128478_no_cuda_api(
    strategy: Strategy, *, history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU nothing of CUDA, MPS or XPU is asked for a random state."""
    cpu = torch.device("cpu")
    mlp = _mlp(cpu)
    _, shift = capture(cpu, history=history)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("asked another device than the CPU")

    x = _x(cpu)
    # torch's checkpoint imports the compiler at its first use, which asks for devices.
    chunk_and_checkpoint(mlp, x, chunk_size=2, strategy=strategy)
    for kind in ("cuda", "mps", "xpu"):
        for name in ("get_rng_state", "set_rng_state", "current_device", "_lazy_init"):
            monkeypatch.setattr(getattr(torch, kind), name, fail, raising=False)
    assert_same_as_loop(
        lambda x: mlp(x) * shift,
        (x,),
        chunk_size=2,
        strategy=strategy,
        captured=mlp,
    )


@fused
@both_paths
def test_sentence_transformers_3812_no_helper_of_torchs(
    strategy: Any,
    *,
    history: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine uses nothing of `torch.utils.checkpoint`, which knows few devices."""
    mlp = _mlp(device)
    _, shift = capture(device, history=history)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("used torch's helper")

    for name, value in vars(torch.utils.checkpoint).items():
        own = getattr(value, "__module__", "") == "torch.utils.checkpoint"
        if own and not isinstance(value, type):
            monkeypatch.setattr(torch.utils.checkpoint, name, fail)
    assert_same_as_loop(
        lambda x: mlp(x) * shift,
        (_x(device),),
        chunk_size=2,
        strategy=strategy,
        captured=mlp,
    )


@both_paths
def test_pytorch_162504_preserve_rng_state_off_asks_no_device(
    toy: dict[str, dict[str, Any]], *, history: bool
) -> None:
    """Nor is any state read, which a graph capture would not allow."""
    assert toy[f"off {history}"]["calls"] == []
