"""Pitfalls L: leaks and lifetime.

Bytes are those of the library's own meter, exact on the CPU; what dies does so by its
reference count, the garbage collector being off.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from chunkcheck import NoCheckpoint, chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory
from reference import STRATEGIES, Strategy, strategies, without_gc

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
saving = strategies(without=("none",))

ROWS, FEATURES, HIDDEN = 32, 16, 512
HIDDEN_BYTES = ROWS * HIDDEN * 4  # one activation of the whole batch


class Mlp:
    """An `f` that a weak reference can follow, and its activations."""

    def __init__(self, device: torch.device) -> None:
        self.up = torch.randn(FEATURES, HIDDEN, device=device, requires_grad=True)
        self.down = torch.randn(HIDDEN, FEATURES, device=device, requires_grad=True)
        self.activations: list[weakref.ref[Any]] = []
        self.failing = -1  # the call that fails
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        hidden = x @ self.up
        active = torch.nn.functional.gelu(hidden)
        for t in (hidden, active):
            self.activations.append(weakref.ref(t.untyped_storage()))
        if self.calls == self.failing:
            raise ZeroDivisionError
        self.calls += 1
        return active @ self.down

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.activations)


def _x(device: torch.device, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, FEATURES, device=device, requires_grad=True)


@pytest.fixture(autouse=True, scope="module")
def warm(device: torch.device) -> None:
    """Let torch make at its first call what it keeps: lazy imports, workspaces."""
    for strategy in STRATEGIES:
        f = Mlp(device)
        y = chunk_and_checkpoint(f, _x(device, 3), chunk_size=2, strategy=strategy)
        backward(y.sum())


@strategies(without=("reentrant",))
@sizes
def test_pytorch_84413_f_not_kept_after_backward_while_output_lives(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """After backward neither `f`, what it captured nor an argument is kept."""

    def call() -> tuple[Tensor, dict[str, weakref.ref[Any]]]:
        f, x = Mlp(device), _x(device, 5)
        captured = x.detach() * 2

        def g(x: Tensor) -> Tensor:
            return f(x) * captured.sum()

        y = chunk_and_checkpoint(g, x, chunk_size=chunk_size, strategy=strategy)
        backward(y.sum())
        kept = {"f": f, "g": g, "captured": captured}
        return y, {name: weakref.ref(value) for name, value in kept.items()}

    with without_gc():
        y, kept = call()
        assert [name for name, ref in kept.items() if ref() is not None] == []
        assert y.grad_fn is not None


@strategies()
@sizes
def test_pytorch_84413_f_not_kept_once_the_output_is_gone(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Nor is it kept, without a backward, once the output is gone."""
    with without_gc():
        f, x = Mlp(device), _x(device, 5)
        kept: list[weakref.ref[Any]] = [*map(weakref.ref, (f, x, f.up))]
        y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        del f, x, y
        assert [ref() for ref in kept] == [None] * 3


@saving
def test_pytorch_82776_activations_not_held_after_forward(
    strategy: Strategy, device: torch.device
) -> None:
    """Between forward and backward the result is held, and no activation."""
    f, x = Mlp(device), _x(device)

    def step() -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=8, strategy=strategy)

    step()
    trace = measure_memory(step, device=device)
    result = trace.result.untyped_storage().nbytes()
    # Per chunk a random state (5,056 bytes on the CPU) and a dummy of torch's.
    assert result <= trace.held_bytes <= result + 4 * 6_144
    # One chunk's activations at a time, and the chunks' results before they are joined.
    assert trace.peak_bytes <= 2 * result + 4 * 6_144 + HIDDEN_BYTES // 4 * 3.5


@saving
def test_pytorch_82482_backward_holds_one_chunk_at_a_time(
    strategy: Strategy, device: torch.device
) -> None:
    """Each chunk's recomputed activations are dead when the next chunk's are made."""
    f, x = Mlp(device), _x(device)
    alive: list[int] = []

    def g(x: Tensor) -> Tensor:
        alive.append(f.alive)
        return f(x)

    with without_gc():
        y = chunk_and_checkpoint(g, x, chunk_size=8, strategy=strategy)
        assert f.alive == 0
        backward(y.sum())
        assert f.alive == 0
    assert alive == [0] * 8


@saving
def test_pytorch_77284_peak_of_a_training_step(
    strategy: Strategy, device: torch.device
) -> None:
    """The peak of a whole step is far below plain's, and below its activations."""
    f, x = Mlp(device), _x(device)

    def step(call: Callable[[Tensor], Tensor]) -> None:
        backward(call(x).sum())
        x.grad = f.up.grad = f.down.grad = None

    def in_chunks(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=4, strategy=strategy)

    step(f)
    step(in_chunks)
    plain = measure_memory(step, f, device=device).peak_bytes
    peak = measure_memory(step, in_chunks, device=device).peak_bytes
    weights = 2 * FEATURES * HIDDEN * 4
    # Gradients of the weights and a temporary; x, y, their gradients; one chunk.
    assert plain > 3 * HIDDEN_BYTES
    assert peak < 1.5 * weights + 4 * ROWS * FEATURES * 4 + HIDDEN_BYTES


@strategies()
@sizes
@pytest.mark.parametrize("end", ["forward", "backward", "no_grad", "retained"])
def test_torchtitan_1230_no_reference_cycle(
    strategy: Strategy, chunk_size: int | None, end: str, device: torch.device
) -> None:
    """A call leaves no cycle: all that it touched dies with its last reference."""

    def call() -> list[weakref.ref[Any]]:
        f, x = Mlp(device), _x(device, 5)
        with torch.set_grad_enabled(end != "no_grad"):
            y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        if end in ("backward", "retained"):
            backward(y.sum(), retain_graph=end == "retained")
            assert x.grad is not None
        return [
            *map(weakref.ref, (f, x, y, x.untyped_storage(), y.untyped_storage())),
            *f.activations,
        ]

    with without_gc():
        left = call()
        assert len(left) > 5
        assert [ref() for ref in left] == [None] * len(left)


@contextlib.contextmanager
def _swallowed() -> Iterator[None]:
    try:
        yield
    except ZeroDivisionError:
        pass
    else:
        pytest.fail("nothing was raised")


@strategies()
@pytest.mark.parametrize("failing", [1, 3], ids=["second_chunk", "recompute"])
def test_deepspeed_1698_nothing_left_after_an_exception(
    strategy: Strategy, failing: int, device: torch.device
) -> None:
    """When `f` raises, in forward or in recompute, what chunks held is released."""
    if failing == 3 and strategy == "none":
        pytest.skip("nothing is recomputed")

    def call() -> list[weakref.ref[Any]]:
        f, x = Mlp(device), _x(device, 5)
        f.failing = failing
        with _swallowed():
            y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
            backward(y.sum())
        return [*map(weakref.ref, (f, x, f.up)), *f.activations]

    with without_gc():
        left = call()
        # torch's queue keeps what a failed backward left to do, until the next one.
        backward(torch.ones(1, requires_grad=True).sum())
        assert [ref() for ref in left] == [None] * len(left)


@strategies()
def test_deepspeed_1698_twenty_calls_hold_nothing(
    strategy: Strategy, device: torch.device
) -> None:
    """After twenty training steps as many bytes are held as before them: none."""
    f, x = Mlp(device), _x(device, 5)

    def steps(count: int) -> None:
        for _ in range(count):
            y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
            backward(y.sum())
            x.grad = f.up.grad = f.down.grad = None

    steps(1)
    with without_gc():
        one = measure_memory(steps, 1, device=device)
        twenty = measure_memory(steps, 20, device=device)
    assert one.held_bytes == twenty.held_bytes == 0
    assert twenty.peak_bytes == one.peak_bytes > 0


def test_fairseq2_474_debug_mode_does_not_leak(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's debug mode holds no activation from step to step."""
    # torch changes the logger of its traces for good, which pytest's capture minds.
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)
    f, x = Mlp(device), _x(device, 5)

    def steps(count: int) -> None:
        for _ in range(count):
            with set_checkpoint_debug_enabled(True):
                y = chunk_and_checkpoint(f, x, chunk_size=2)
                backward(y.sum())
            x.grad = f.up.grad = f.down.grad = None

    steps(1)
    assert measure_memory(steps, 4, device=device).held_bytes == 0
    assert f.alive == 0


@pytest.mark.parametrize("strategy", ["none", NoCheckpoint()], ids=["name", "instance"])
def test_reformer_9_chunk_loop_without_checkpoint_saves_nothing(
    strategy: Strategy, device: torch.device
) -> None:
    """The loop alone keeps all activations, as plain does; the docstring says so."""
    f, x = Mlp(device), _x(device)

    def step() -> Tensor:
        return chunk_and_checkpoint(f, x, chunk_size=8, strategy=strategy)

    step()
    f(x)
    plain = measure_memory(f, x, device=device).held_bytes
    held = measure_memory(step, device=device).held_bytes
    assert plain > 2 * HIDDEN_BYTES
    assert held >= plain
    assert "nothing" in str(NoCheckpoint.__doc__)


@saving
def test_reformer_9_checkpointed_loop_does_save(
    strategy: Strategy, device: torch.device
) -> None:
    """And no other strategy does: what is alive after forward tells them apart."""
    f, g, x = Mlp(device), Mlp(device), _x(device)
    with without_gc():
        y = chunk_and_checkpoint(f, x, chunk_size=8, strategy=strategy)
        z = chunk_and_checkpoint(g, x, chunk_size=8, strategy="none")
        assert f.alive == 0
        assert g.alive >= 4
    assert y.shape == z.shape
