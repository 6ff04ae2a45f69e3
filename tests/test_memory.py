"""The peak meter against sums by hand, in bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunkcheck._torch import meter
from chunkcheck.diagnostics import MemoryTrace, measure_memory, phase

if TYPE_CHECKING:
    from collections.abc import Callable

KB = 1000
MB = 1000 * KB
BORN_BEFORE: list[Tensor] = []


def block(kilobytes: int) -> Tensor:
    return torch.empty(kilobytes * KB, dtype=torch.uint8)


def levels(trace: MemoryTrace[object]) -> list[int]:
    return [held // KB for _, held in trace.timeline]


def test_one_after_the_other() -> None:
    def step() -> None:
        for size in (3, 7, 5):
            block(size)

    trace = measure_memory(step)
    assert trace.peak_bytes == 7 * KB
    assert trace.held_bytes == 0
    assert levels(trace) == [0, 3, 0, 7, 0, 5, 0, 0]


def test_overlapping_blocks_add_up() -> None:
    def step() -> Tensor:
        first = block(3)
        second = block(5)
        del first
        third = block(1)
        del second
        return third

    trace = measure_memory(step)
    assert trace.peak_bytes == 8 * KB
    assert trace.held_bytes == 1 * KB
    assert levels(trace) == [0, 3, 8, 5, 6, 1, 1]


def test_what_is_returned_is_held_and_handed_over() -> None:
    trace = measure_memory(lambda: block(4))
    assert trace.held_bytes == trace.result.untyped_storage().nbytes() == 4 * KB
    assert trace.device == torch.device("cpu")


def test_arguments_are_passed_on_and_do_not_count() -> None:
    x = torch.ones(250)
    trace = measure_memory(torch.add, x, x)
    assert trace.result.eq(2).all()
    assert trace.peak_bytes == trace.held_bytes == 1 * KB


@pytest.mark.parametrize("measured_before", [False, True])
def test_blocks_born_before_do_not_count_when_freed(measured_before: bool) -> None:
    """The profiler forgets blocks from before it ever ran, and reports the others."""

    def prepare() -> None:
        BORN_BEFORE.append(block(50))

    def step() -> None:
        kept = block(2)
        BORN_BEFORE.clear()
        block(3)
        del kept

    if measured_before:
        assert measure_memory(prepare).held_bytes == 50 * KB
    else:
        prepare()
    trace = measure_memory(step)
    assert trace.peak_bytes == 5 * KB
    assert trace.held_bytes == 0
    assert min(levels(trace)) == 0


def test_addresses_are_used_again() -> None:
    addresses: list[int] = []

    def step() -> list[Tensor]:
        addresses.extend(block(1000).data_ptr() for _ in range(50))
        return [block(1), block(1)]

    trace = measure_memory(step)
    assert len(set(addresses)) < 50
    assert trace.peak_bytes == 1000 * KB
    assert trace.held_bytes == 2 * KB


def test_views_and_in_place_operations_add_nothing() -> None:
    def step() -> None:
        torch.zeros(250).view(5, 50).transpose(0, 1).neg_().relu_()

    trace = measure_memory(step)
    assert trace.peak_bytes == 1 * KB
    assert levels(trace) == [0, 1, 0, 0]


def test_growing_a_storage_holds_old_and_new() -> None:
    def step() -> None:
        x = block(2)
        x.resize_(3 * KB)

    trace = measure_memory(step)
    assert trace.peak_bytes == 5 * KB
    assert trace.held_bytes == 0


def test_backward_in_other_threads_is_seen() -> None:
    """On the CPU, backward changes threads when it is nested more than 60 deep."""
    depth = 70
    main, last = threading.get_ident(), []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            if ctx.depth:
                backward_of(ctx.depth - 1)
            else:
                last.append(threading.get_ident())
                block(1000)
            return grad, None

    def backward_of(depth: int) -> None:
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            y = Nested.apply(x, depth)  # type: ignore[no-untyped-call]
            torch.autograd.backward(y)

    trace = measure_memory(backward_of, depth)
    assert last != [main]
    # at each depth x, its clone and a gradient, of 4 bytes each
    assert trace.peak_bytes == 1000 * KB + (depth + 1) * 3 * 4
    assert trace.held_bytes == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_in_a_kernel_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.ones(500_000, requires_grad=True)  # enough for several threads
        trace = measure_memory(lambda: torch.autograd.backward(x.exp().sum()))
    finally:
        torch.set_num_threads(before)
    # x.exp() and x.grad, the sum and its gradient
    assert trace.peak_bytes == 2 * 2 * MB + 2 * 4
    assert trace.held_bytes == 2 * MB


def test_threads_of_the_step_are_not_seen() -> None:
    """They are missing from the count, and do not corrupt it."""
    kept: list[Tensor] = []

    def step() -> None:
        thread = threading.Thread(target=lambda: kept.append(block(9)))
        thread.start()
        thread.join()
        block(2)
        kept.clear()

    trace = measure_memory(step)
    assert trace.peak_bytes == 2 * KB
    assert min(levels(trace)) == 0


class TestYardstick:
    """The MLP of the design, 64 -> 1024 -> 64, x = (4096, 64), X = bytes of x."""

    x = 4096 * 64 * 4
    w = 64 * 1024 * 4  # of each weight, X / 4

    @pytest.fixture
    def mlp(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))

    def run(self, mlp: nn.Module, f: Callable[[Tensor], Tensor]) -> MemoryTrace[None]:
        def step() -> None:
            x = torch.randn(4096, 64, requires_grad=True)
            with phase("forward"):
                y = f(x)
            with phase("backward"):
                torch.autograd.backward(y, torch.ones_like(y))

        mlp.zero_grad()
        return measure_memory(step)

    def test_plain(self, mlp: nn.Module) -> None:
        trace = self.run(mlp, mlp)
        # x; the hidden before and after GELU, 16 X each; y
        assert trace.phases["forward"].peak_bytes == (1 + 16 + 16 + 1) * self.x
        assert trace.phases["forward"].held_bytes == (1 + 16 + 16 + 1) * self.x
        # those, dy, the gradient of the hidden, and the last layer's gradients
        last = self.w + 64 * 4
        assert trace.peak_bytes == (34 + 1 + 16) * self.x + last
        assert trace.phases["backward"].peak_bytes == trace.peak_bytes
        # the gradients of the parameters
        assert trace.held_bytes == last + self.w + 1024 * 4

    def test_checkpoint_saves_nothing_at_the_peak(self, mlp: nn.Module) -> None:
        plain = self.run(mlp, mlp)
        trace = self.run(mlp, lambda x: checkpoint(mlp, x, use_reentrant=False))
        rng_state = torch.get_rng_state().nbytes
        # x and y; in the forward's peak the hidden twice as well
        assert trace.phases["forward"].peak_bytes == (1 + 16 + 16) * self.x + rng_state
        assert trace.phases["forward"].held_bytes == (1 + 1) * self.x + rng_state
        assert trace.peak_bytes == plain.peak_bytes + rng_state
        assert trace.held_bytes == plain.held_bytes

    def test_the_same_every_time(self, mlp: nn.Module) -> None:
        first, *others = (self.run(mlp, mlp).timeline for _ in range(6))
        for other in others:
            assert [held for _, held in other] == [held for _, held in first]


class TestPhases:
    def test_peak_and_held_of_each(self) -> None:
        def step() -> None:
            with phase("a"):
                kept = block(2)
                block(6)
            between = block(9)
            del between
            with phase("b"):
                block(1)
            del kept
            with phase("c"):
                pass

        phases = measure_memory(step).phases
        assert list(phases) == ["a", "b", "c"]
        assert [p.peak_bytes for p in phases.values()] == [8 * KB, 3 * KB, 0]
        assert [p.held_bytes for p in phases.values()] == [2 * KB, 2 * KB, 0]

    def test_their_times_are_in_order_and_on_the_timeline(self) -> None:
        def step() -> None:
            with phase("a"):
                block(2)
            with phase("b"):
                block(4)

        trace = measure_memory(step)
        a, b = trace.phases.values()
        (at_a,) = (time for time, held in trace.timeline if held == 2 * KB)
        (at_b,) = (time for time, held in trace.timeline if held == 4 * KB)
        end = trace.timeline[-1][0]
        assert 0 <= a.start < at_a < a.stop <= b.start < at_b < b.stop <= end

    def test_nested(self) -> None:
        def step() -> None:
            with phase("outer"):
                block(5)
                with phase("inner"):
                    block(3)

        phases = measure_memory(step).phases
        assert list(phases) == ["outer", "inner"]
        assert phases["outer"].peak_bytes == 5 * KB
        assert phases["inner"].peak_bytes == 3 * KB

    def test_a_name_used_again_is_one_phase(self) -> None:
        def step() -> list[Tensor]:
            kept = []
            for size in (1, 8, 2):
                with phase("batch"):
                    block(size)
                    kept.append(block(1))
            return kept

        trace = measure_memory(step)
        (batch,) = trace.phases.values()
        assert batch.peak_bytes == (1 + 8) * KB
        assert batch.held_bytes == 3 * KB

    def test_outside_a_measurement_a_phase_does_nothing(self) -> None:
        with phase("forward"):
            x = block(1)
        assert x.numel() == KB


class TestErrors:
    def test_an_exception_passes_and_the_profiler_stops(self) -> None:
        def step() -> None:
            with phase("forward"):
                block(3)
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            measure_memory(step)
        assert not torch.autograd.profiler._is_profiler_enabled
        assert measure_memory(lambda: block(2)).peak_bytes == 2 * KB

    def test_nested(self) -> None:
        def step() -> None:
            with pytest.raises(RuntimeError, match=r"cannot be nested.*`phase`"):
                measure_memory(block, 1)
            block(7)

        assert measure_memory(step).peak_bytes == 7 * KB

    def test_inside_the_profiler(self) -> None:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as outer:
            with pytest.raises(RuntimeError, match="profiler is running"):
                measure_memory(block, 1)
            torch.ones(3)
        assert "aten::ones" in {event.key for event in outer.key_averages()}

    def test_two_devices(self) -> None:
        with pytest.raises(ValueError, match=r"uses cpu and meta.*device='cpu'"):
            measure_memory(torch.add, torch.ones(1), torch.ones(1, device="meta"))

    def test_a_device_without_counters(self) -> None:
        with pytest.raises(NotImplementedError, match="'meta'"):
            measure_memory(torch.sin, torch.ones(1, device="meta"))


class FakeDevice:
    """An accelerator: counters as `torch.cuda` has them, and memory taken by hand."""

    def __init__(self, held: int) -> None:
        self.held = self.peak = held

    def take(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def current_device(self) -> int:
        return 1

    def synchronize(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def memory_allocated(self, device: torch.device) -> int:
        assert device.type == "cuda"
        return self.held

    def max_memory_allocated(self, device: torch.device) -> int:
        assert device.type == "cuda"
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.peak = self.held


class TestAccelerator:
    """How the counters are used; what they say is checked where there is a device."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        device = FakeDevice(held=100)
        device.take(1000)
        device.take(-1000)  # a peak from before the step
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        return device

    def test_peaks_are_read_at_the_edges_of_phases(self, device: FakeDevice) -> None:
        def step() -> str:
            with phase("a"):
                device.take(7)
                device.take(-4)
            device.take(20)
            device.take(-20)
            with phase("b"):
                device.take(2)
            block(50)  # on the CPU: not this device's
            return "done"

        trace = measure_memory(step, device="cuda")
        assert trace.result == "done"
        assert trace.device == torch.device("cuda:1")
        assert (trace.peak_bytes, trace.held_bytes) == (23, 5)
        a, b = trace.phases["a"], trace.phases["b"]
        assert (a.peak_bytes, a.held_bytes) == (7, 3)
        assert (b.peak_bytes, b.held_bytes) == (5, 5)
        held = [held for _, held in trace.timeline]
        assert held == [0, 0, 0, 0, 7, 3, 23, 3, 5, 5, 5, 5]

    def test_phases_of_another_thread_are_not_ours(self, device: FakeDevice) -> None:
        def elsewhere() -> None:
            with phase("elsewhere"):
                device.take(4)

        def step() -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

        trace = measure_memory(step, device="cuda")
        assert trace.peak_bytes == 4
        assert dict(trace.phases) == {}

    def test_an_exception_ends_the_measurement(self, device: FakeDevice) -> None:
        def step() -> None:
            device.take(3)
            raise KeyError

        with pytest.raises(KeyError):
            measure_memory(step, device="cuda:1")
        assert measure_memory(device.take, 5, device="cuda:1").peak_bytes == 5

    def test_a_step_that_turns_out_to_use_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events = [meter._Event(5, 16, 100, torch.device("cuda:0"))]
        windows = [meter._Window(meter._STEP, 0, 10)]
        monkeypatch.setattr(meter, "_record", lambda _: (None, events, windows))
        with pytest.raises(ValueError, match=r"uses cuda:0.*device='cuda:0'"):
            measure_memory(lambda: None)
        assert measure_memory(lambda: None, device="cpu").peak_bytes == 0

    def test_counters_that_are_not_all_there(
        self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(FakeDevice, "max_memory_allocated")
        with pytest.raises(NotImplementedError, match="max_memory_allocated"):
            measure_memory(device.take, 5, device="mps")


class TestReplay:
    """Orders of events that a test on the CPU cannot bring about."""

    whole = meter._Window("step", 0, 100)

    def held(self, *events: tuple[int, int, int]) -> list[int]:
        cpu = torch.device("cpu")
        points = meter._replay([meter._Event(*e, cpu) for e in events], self.whole)
        return [point.held for point in points]

    def test_a_block_freed_unseen_makes_room_at_its_address(self) -> None:
        assert self.held((1, 16, 5), (2, 16, 3), (3, 16, -3)) == [0, 5, 3, 0, 0]

    def test_a_free_of_nothing_changes_nothing(self) -> None:
        assert self.held((1, 16, -5), (2, 32, 3), (3, 16, -5)) == [0, 0, 3, 3, 3]

    def test_what_is_outside_the_step_does_not_count(self) -> None:
        assert self.held((-1, 16, 5), (1, 32, 3), (101, 48, 9)) == [0, 3, 3]
