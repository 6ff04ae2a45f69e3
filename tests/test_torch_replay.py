"""Tests of `_torch.replay`: what a run sees besides its tensors, seen again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from chunkcheck import Fused
from chunkcheck._torch.compat import function_modes
from chunkcheck._torch.reach import reach
from chunkcheck._torch.replay import Replay
from reference import rows

HELD, GIVEN = torch.Generator(), torch.Generator()


def held() -> float:
    return torch.rand(1, generator=HELD, device="cpu").item()


def given(generators: list[Any]) -> Callable[[], float]:
    return lambda: torch.rand(1, generator=generators[0][0]).item()


class Hidden:
    """Gives `GIVEN` in a way that looking into `f` does not find."""

    def __getitem__(self, _: int) -> torch.Generator:
        return globals()["GIV" + "EN"]  # type: ignore[no-any-return]


SOURCES: dict[str, Callable[[], float]] = {
    "cpu": lambda: torch.rand(1).item(),
    "generator": held,
    "given_generator": given([Hidden()]),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 (it is what is replayed)
}
# For each, options under which it is replayed, and some under which it is not.
OPTIONS: dict[str, tuple[Fused, Fused]] = {
    "cpu": (Fused(), Fused(preserve_rng_state=False)),
    "generator": (Fused(), Fused(preserve_rng_state=False)),
    "given_generator": (Fused(generators=(GIVEN,)), Fused()),
    "python": (Fused(preserve_python_rng_state=True), Fused()),
    "numpy": (Fused(preserve_python_rng_state=True), Fused()),
}


def reset() -> None:
    torch.manual_seed(1)
    HELD.manual_seed(2)
    GIVEN.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002


def replay_of(f: Callable[..., object], options: Fused | None = None) -> Replay:
    return Replay(options or Fused(), reach(f), ())


def run_again(replay: Replay, chunk: int, f: Callable[[], Any]) -> Any:
    with replay.again(replay.records[chunk], differs=replay.differs()):
        return f()


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("replayed", [True, False])
def test_random_numbers(name: str, *, replayed: bool) -> None:
    draw = SOURCES[name]
    reset()
    stream = [draw() for _ in range(5)]
    reset()
    replay = replay_of(draw, OPTIONS[name][0 if replayed else 1])
    assert [replay.run(draw) for _ in range(2)] == stream[:2]
    again = [run_again(replay, chunk, draw) for chunk in (1, 0)]
    if replayed:
        assert again == [stream[1], stream[0]]
        assert run_again(replay, 1, draw) == stream[1]  # in a second backward
        assert draw() == stream[2]  # and the stream goes on where it was
    else:
        assert again == stream[2:4]


def test_each_run_has_its_own_draws() -> None:
    reset()
    replay = replay_of(held)
    first = replay.run(lambda: [held()])
    second: list[float] = replay.run(list)  # draws nothing
    third = replay.run(lambda: [held(), torch.rand(1).item()])
    assert run_again(replay, 2, lambda: [held(), torch.rand(1).item()]) == third
    assert run_again(replay, 1, list) == second == []
    assert run_again(replay, 0, lambda: [held()]) == first


def test_what_others_draw_between_forward_and_backward_stays() -> None:
    reset()
    replay = replay_of(held)
    value = replay.run(lambda: torch.rand(1).item())
    stream = torch.rand(3)
    reset()
    replay = replay_of(held)
    assert replay.run(lambda: torch.rand(1).item()) == value
    assert torch.equal(torch.rand(1), stream[:1])
    assert run_again(replay, 0, lambda: torch.rand(1).item()) == value
    assert torch.equal(torch.rand(2), stream[1:])


class Mode(TorchFunctionMode):
    def __enter__(self) -> Any:
        assert not hasattr(self, "entered"), "entered twice"
        self.entered = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ambient() -> tuple[object, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.empty(0).device,
        tuple(function_modes()),
    )


AMBIENT: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_fp16": lambda: torch.autocast("cpu", torch.float16),
    "default_dtype": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "mode": Mode,
}


@pytest.mark.parametrize("inside", AMBIENT)
@pytest.mark.parametrize("later", AMBIENT)
def test_ambient_state(inside: str, later: str) -> None:
    with AMBIENT[inside]():
        replay = replay_of(ambient)
        seen = replay.run(ambient)
    with AMBIENT[later]():
        before = ambient()
        assert replay.differs() == (seen != before or "autocast" in inside)
        assert run_again(replay, 0, ambient) == seen
        assert ambient() == before


def test_nested_modes_are_in_order() -> None:
    modes = Mode(), Mode()
    with modes[0], modes[1]:
        replay = replay_of(ambient)
        replay.run(ambient)
    assert run_again(replay, 0, function_modes) == list(modes)
    assert function_modes() == []


def test_inference_mode_is_left() -> None:
    def f() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    replay = replay_of(f)
    assert replay.run(f) == (False, True)
    with torch.inference_mode():
        assert replay.differs()
        assert run_again(replay, 0, f) == (False, True)
        assert f() == (True, False)


def test_casts_are_cached_for_one_run_only() -> None:
    """A cast that was cached outside belongs to another graph."""
    linear = nn.Linear(3, 3)

    def f() -> Tensor:
        out: Tensor = linear(torch.ones(1, 3))
        return out

    with torch.autocast("cpu", torch.bfloat16):
        cached = f()
        replay = replay_of(f)
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
        assert not torch.equal(f(), torch.zeros(1, 3))  # torch's cache is stale
        assert torch.equal(replay.run(f), torch.zeros(1, 3).bfloat16())
        assert torch.equal(run_again(replay, 0, f), torch.zeros(1, 3).bfloat16())
    assert cached.requires_grad


@dataclass
class World:
    """All that a run can see and change, with a module that writes to its buffers."""

    module: nn.Module = field(default_factory=lambda: nn.BatchNorm1d(3))
    leaf: Tensor = field(default_factory=lambda: rows(3))

    def f(self) -> tuple[object, ...]:
        self.module(torch.rand(2, 3, dtype=torch.float32, device="cpu"))
        return (self.module.training, self.leaf.requires_grad, held(), *ambient())

    def state(self) -> tuple[object, ...]:
        return (
            self.module.training,
            self.leaf.requires_grad,
            torch.get_rng_state().tolist(),
            HELD.get_state().tolist(),
            {k: (id(t), t.tolist()) for k, t in self.module.named_buffers()},
            *ambient(),
        )


def test_flags() -> None:
    world = World()

    def f() -> tuple[bool, bool]:
        return world.module.training, world.leaf.requires_grad

    replay = replay_of(f)
    assert replay.run(f) == (True, True)
    assert not replay.differs()
    world.module.eval()
    assert replay.differs()
    assert run_again(replay, 0, f) == (True, True)
    assert f() == (False, True)
    world.module.train()
    world.leaf.requires_grad_(False)
    assert replay.differs()
    assert run_again(replay, 0, f) == (True, True)
    assert f() == (True, False)


def test_a_context_for_forward_and_one_for_each_recompute() -> None:
    seen = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"/{name}")

    options = Fused(context_fn=lambda: (note("forward"), note("again")))
    replay = replay_of(held, options)
    for _ in range(2):
        replay.run(seen.append, "f")
    for chunk in (1, 0):
        run_again(replay, chunk, lambda: seen.append("f"))
    assert seen == ["forward", "f", "/forward"] * 2 + ["again", "f", "/again"] * 2


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("inside", AMBIENT)
def test_all_is_left_as_it_was(error: type[BaseException] | None, inside: str) -> None:
    world = World()
    reset()
    later = torch.autocast("cpu", torch.float16)
    with AMBIENT[inside]():
        replay = replay_of(world.f)
        replay.run(world.f)
        seen = replay.run(world.f)
    world.module.eval()
    world.leaf.requires_grad_(False)
    with later, default_dtype(torch.float16):
        before = world.state()
        got: object = None

        def again() -> None:
            nonlocal got
            got = world.f()
            if error is not None:
                raise error

        with nullcontext() if error is None else pytest.raises(error):
            run_again(replay, 1, again)
        assert got == seen
        assert world.state() == before


def test_rewind() -> None:
    world = World()
    reset()
    before = world.state()
    replay = replay_of(world.f, Fused(preserve_python_rng_state=True))
    replay.rewind()  # nothing has run
    assert world.state() == before
    stream = [(world.f(), random.random()) for _ in range(2)]
    after = world.state()
    world.module.load_state_dict(nn.BatchNorm1d(3).state_dict())
    reset()
    for _ in range(2):
        assert [
            replay.run(lambda: (world.f(), random.random())) for _ in range(2)
        ] == stream
        assert world.state() == after
        replay.rewind()
        assert world.state() == before
        assert replay.records == []


def test_an_error_in_the_first_run_passes() -> None:
    def f() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        replay_of(f).run(f)
