"""Tests of `_sizes`: policies that choose the chunk size, and their search."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812  as everyone calls it

from chunkcheck import ChunkSizePolicy, MemoryBudget, NumChunks, chunk_and_checkpoint
from chunkcheck._sizes import FURTHEST, as_bytes, largest_that_fits
from chunkcheck.diagnostics import measure_memory
from reference import Counted, net, rows

Peak = Callable[[int], float]


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [
        (1, 10, [10]),
        (3, 10, [4, 4, 2]),
        (4, 10, [3, 3, 3, 1]),
        (6, 10, [2] * 5),
        (10, 10, [1] * 10),
        (99, 10, [1] * 10),
        (3, 0, [0]),
    ],
)
def test_num_chunks(count: int, batch: int, sizes: list[int]) -> None:
    f = Counted(torch.sin)
    chunk_and_checkpoint(f, torch.ones(batch, 2), chunk_size=NumChunks(count))
    assert f.rows == sizes


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (0, ValueError, "1 or more chunks, found 0"),
        (-2, ValueError, "1 or more chunks, found -2"),
        (2.0, TypeError, "found 2.0 of type float"),
        (True, TypeError, "found True of type bool"),
        ("4", TypeError, "found '4' of type str"),
    ],
)
def test_what_is_no_number_of_chunks(
    count: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NumChunks(count)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (5, 5),
        ("7", 7),
        ("2GiB", 2 * 2**30),
        (" 1.5 kb ", 1500),
        ("3 MB", 3_000_000),
        ("0.5 TiB", 2**39),
        ("10 KiB", 10240),
        (0.25, 200),
    ],
)
def test_amounts_of_memory(memory: Any, expected: int) -> None:
    assert as_bytes(memory, free=800) == expected
    MemoryBudget(memory)


@pytest.mark.parametrize(
    "memory",
    [0, -1, "none", "0 MB", "GiB", "2 GX", "1.2.3 MB", "", 1.0, -0.5, 0.0, math.nan],
)
def test_what_is_no_amount_of_memory(memory: Any) -> None:
    with pytest.raises(ValueError, match="memory must be"):
        MemoryBudget(memory)


@pytest.mark.parametrize("memory", [None, True, [1]], ids=str)
def test_what_is_no_memory_at_all(memory: Any) -> None:
    with pytest.raises(TypeError, match="memory must be"):
        MemoryBudget(memory)


def kinked(size: int) -> float:
    """Return a peak that is the largest of three lines, as the yardstick's is."""
    return max(1000 + size, 400 + 20 * size, 100 * size - 20_000)


PEAKS: dict[str, Peak] = {
    "flat": lambda _: 500.0,
    "line": lambda size: 1000.0 + 10 * size,
    "kinked": kinked,
    "steps": lambda size: 1000.0 + 64 * -(-size // 32),
}


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 100, 4096, 131_072])
@pytest.mark.parametrize("budget", [400, 1100, 3000, 50_000, 10**9])
@pytest.mark.parametrize("name", PEAKS)
def test_the_search(name: str, budget: int, batch: int) -> None:
    peak, seen = PEAKS[name], []

    def measure(size: int) -> float:
        assert 1 <= size <= batch
        seen.append(size)
        return peak(size)

    size = largest_that_fits(batch, budget, measure)
    assert len(seen) == len(set(seen)), "each size at most once"
    assert size in seen
    fitting = [s for s in range(1, batch + 1) if peak(s) <= budget]
    if not fitting:
        assert size == 1
    else:
        assert peak(size) <= budget
        assert size >= max(fitting) // 2
    # None is run of which what was measured before says that it would not fit.
    grown = sorted(s for s in seen if s > seen[0])
    for last, following in itertools.pairwise(grown):
        assert following <= FURTHEST * last
    assert sum(peak(s) > budget for s in seen if s > seen[0]) <= 2


def test_not_even_one_row_fits(caplog: pytest.LogCaptureFixture) -> None:
    assert largest_that_fits(5000, 10, lambda size: 100.0 + size) == 1
    assert "not even chunks of one row fit into 10 bytes: they take 101" in caplog.text


def test_out_of_memory_is_infinite() -> None:
    def measure(size: int) -> float:
        return math.inf if size > 50 else 10.0 * size

    assert 25 <= largest_that_fits(4096, 10**9, measure) <= 50


class Fixed:
    """A policy of a user's own."""

    def __init__(self, size: Any) -> None:
        self.size = size
        self.asked: list[tuple[int, float]] = []

    def resolve(self, rows: int, measure: Callable[[int], float]) -> Any:
        self.asked.append((rows, measure(2)))
        return self.size


def test_a_policy_of_ones_own() -> None:
    policy, f = Fixed(3), Counted(torch.sin)
    assert isinstance(policy, ChunkSizePolicy)
    x = rows(7, 4)
    y = chunk_and_checkpoint(f, x, chunk_size=policy)
    assert f.rows[-3:] == [3, 3, 1]
    assert [rows for rows, _ in policy.asked] == [7]
    assert policy.asked[0][1] > x.nbytes
    y.sum().backward()
    assert len(policy.asked) == 1


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (2.5, TypeError), ("2", TypeError)]
)
def test_a_policy_that_gives_no_size(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="chunk_size must be a positive int"):
        chunk_and_checkpoint(torch.sin, rows(7, 4), chunk_size=Fixed(size))


class Attention(nn.Module):
    """Over windows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y: Tensor = self.out((q @ k.mT).softmax(-1) @ v)
        return y


LSTM, HEAD = nn.LSTM(16, 32, batch_first=True), nn.Linear(16, 900)


def lstm(x: Tensor) -> Tensor:
    y: Tensor = LSTM(x)[0]
    return y


def vocabulary(x: Tensor) -> Tensor:
    y: Tensor = HEAD(x)
    return y.logsumexp(1).mean()


def mlp(hidden: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))


FUNCTIONS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "mlp": (mlp(), (600, 16), "auto"),
    "attention": (Attention(), (120, 24, 16), "auto"),
    "convolution": (
        nn.Sequential(nn.Conv2d(4, 24, 3, padding=1), nn.SiLU(), nn.Conv2d(24, 4, 1)),
        (64, 4, 12, 12),
        "auto",
    ),
    "batch_norm": (
        nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256)),
        (512, 16),
        0,
    ),
    "lstm": (lstm, (100, 12, 16), "auto"),
    "transformer": (
        nn.TransformerEncoderLayer(16, 2, 64, 0.1, batch_first=True),
        (90, 10, 16),
        "auto",
    ),
    "loss": (
        vocabulary,
        (400, 16),
        "mean",
    ),
    "dropout": (nn.Sequential(mlp(), nn.Dropout(), mlp(64)), (500, 16), "auto"),
    "elementwise": (lambda x: x.sin().cos().exp(), (1000, 8), "auto"),
    "two results": (lambda x: (x @ x.mT, x.sum(-1)), (80, 20, 16), "auto"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_budget_chooses_stays_within_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The peak of the whole is seen on a few rows to 10 %, for ten different `f`."""
    f, shape, out_dim = FUNCTIONS[name]
    x = torch.randn(shape, requires_grad=True)
    modules = (f if isinstance(f, nn.Module) else None, LSTM, HEAD)
    leaves = [x, *(p for m in modules if m is not None for p in m.parameters())]

    def step(chunk_size: Any) -> None:
        y: Any = chunk_and_checkpoint(f, x, chunk_size=chunk_size, out_dim=out_dim)
        ends = [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
        torch.autograd.grad(
            ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True
        )

    def peak(chunk_size: Any) -> int:
        step(chunk_size)  # the first time, a policy measures
        return measure_memory(step, chunk_size).peak_bytes

    least, most = peak(2), peak(None)
    assert least < most
    caplog.set_level(logging.DEBUG, "chunkcheck")
    budget = int(least + 0.4 * (most - least))
    found = peak(MemoryBudget(budget))
    assert found <= 1.02 * budget
    assert found >= 0.6 * budget
    predicted: dict[int, float] = {}
    for record in caplog.records:
        if "rows take" in record.message:
            args: Any = record.args
            predicted[args[0]] = args[1]
    assert len(predicted) >= 3
    for size in sorted(predicted)[::3]:
        expected = predicted[size]
        assert peak(size) == pytest.approx(expected, rel=0.1), f"chunks of {size}"


def test_it_is_decided_once_for_calls_that_are_alike() -> None:
    model = nn.Sequential(net().float())
    budget = MemoryBudget(30_000)

    def f(x: Tensor) -> Tensor:
        calls.append(len(x))
        y: Tensor = model(x)
        return y

    def runs(x: Tensor) -> list[int]:
        calls.clear()
        chunk_and_checkpoint(lambda x: f(x) + 0, x, chunk_size=budget)
        return list(calls)

    calls: list[int] = []
    x = torch.randn(200, 4, requires_grad=True)
    first, second = runs(x), runs(x.detach().clone().requires_grad_())
    assert sum(second) == 200
    assert sum(first) > 400
    assert first[-len(second) :] == second
    assert sum(runs(torch.randn(300, 4, requires_grad=True))) > 600  # another shape
    assert sum(runs(torch.randn(200, 4))) > 400  # without gradients
    with torch.no_grad():
        assert sum(runs(x)) > 400
    model.append(nn.Linear(4, 4))
    assert sum(runs(x)) > 400  # other parameters


def test_trying_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout()).double()
    x = rows(41, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = chunk_and_checkpoint(model, x, chunk_size=3)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(before)
    torch.manual_seed(5)

    class Three:
        def resolve(self, rows: int, measure: Callable[[int], float]) -> int:
            assert measure(3) < measure(rows)
            return 3

    got = chunk_and_checkpoint(model, x, chunk_size=Three())
    assert torch.equal(got, expected)
    for key, value in model.state_dict().items():
        assert torch.equal(value, after[key]), key
    assert all(p.grad is None for p in (x, *model.parameters()))


def test_meta_tensors_are_judged_without_a_run() -> None:
    """A Llama-8B-shaped MLP on 131,072 rows, 8 GiB of which are rows and gradients."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(4096, 14336, bias=False) for _ in range(2))
            self.down = nn.Linear(14336, 4096, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
            return y

    with torch.device("meta"):
        f = Gated().bfloat16()
        x = torch.empty(131_072, 4096, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for budget in ("5 GiB", "6 GiB", "8 GiB"):
        seen = Counted(f)
        chunk_and_checkpoint(seen, x, chunk_size=MemoryBudget(budget))
        found.append(seen.rows[-2])
    assert 1024 < found[0] < found[1] < found[2] < 65_536


def test_out_of_memory_while_trying(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Tensor) -> Tensor:
        if len(x) > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        return x.sin()

    caplog.set_level(logging.INFO, "chunkcheck")
    x = rows(4096, 2)
    y = chunk_and_checkpoint(f, x, chunk_size=MemoryBudget("1 GiB"))
    assert y.shape == (4096, 2)
    assert "chose chunks of" in caplog.text

    def broken(_: Tensor) -> Tensor:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        chunk_and_checkpoint(broken, x, chunk_size=MemoryBudget("1 GiB"))


def test_a_group_must_be_there() -> None:
    group: Any = object()
    budget = MemoryBudget("1 MiB", group=group)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed to be init"):
        chunk_and_checkpoint(torch.sin, rows(7, 4), chunk_size=budget)


@pytest.mark.skipif(not distributed.is_available(), reason="built without it")
def test_a_group_of_one() -> None:
    torch_distributed: Any = distributed
    store = torch_distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        budget = MemoryBudget("1 MiB", group=distributed.group.WORLD)
        f = Counted(torch.sin)
        chunk_and_checkpoint(f, rows(7, 4), chunk_size=budget)
        assert f.rows[-1] == 7
    finally:
        distributed.destroy_process_group()


def test_a_policy_of_ones_own_need_not_be_hashable() -> None:
    class Two:
        __hash__ = None  # type: ignore[assignment]

        def resolve(self, rows: int, measure: Callable[[int], float]) -> int:
            assert measure(rows) > 0
            return 2

    f = Counted(torch.sin)
    for count in (5, 3):
        chunk_and_checkpoint(f, rows(count, 4), chunk_size=Two())
    assert f.rows[-2:] == [2, 1]
