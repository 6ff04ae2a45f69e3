"""Tests of `diagnostics.profile`: figures, failures, forms, advice, and no trace."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunkcheck import Fused, NonReentrant, Reentrant, chunk_and_checkpoint
from chunkcheck.diagnostics import (
    MemoryTrace,
    Profile,
    ProfileRow,
    _profile,
    measure_memory,
    phase,
    profile,
)
from chunkcheck.diagnostics import _trials as trials
from chunkcheck.diagnostics._profile import _device, _sizes_of
from chunkcheck.diagnostics._rows import knee, size_text, time_text

quick = partial(profile, rounds=1, progress=False)


def mlp(width: int = 64, hidden: int = 1024) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def row(
    name: str,
    size: int | None,
    peak: int | None,
    ratio: float | None,
    rows: int = 64,
) -> ProfileRow:
    chunks = 1 if size is None else -(-rows // size)
    spread = None if ratio is None else (ratio, ratio)
    note = "out of memory" if peak is None else ""
    return ProfileRow(name, size, chunks, peak, peak, ratio, ratio, spread, note)


def made(*rows: ProfileRow, **others: Any) -> Profile:
    given: dict[str, Any] = {
        "rows_of_batch": 64,
        "rounds": 3,
        "backward": True,
        "given_bytes": 2 * 2**20,
        "floor_bytes": 10 * 2**20,
        "free_bytes": None,
        "threads": 1,
        "device": "cpu",
        "torch_version": "2",
    }
    return Profile(rows=rows, **(given | others))


def figures(row: ProfileRow) -> tuple[int, int, float, float, tuple[float, float]]:
    found = row.peak_bytes, row.held_bytes, row.seconds, row.ratio, row.spread
    assert None not in found
    return found  # type: ignore[return-value]


MIB = 2**20
PAYS = made(
    row("plain", None, 100 * MIB, 1.0),
    row("checkpoint", None, 100 * MIB, 1.3),
    row("auto", 32, 55 * MIB, 1.31),
    row("auto", 8, 20 * MIB, 1.4),
    row("auto", 1, 19 * MIB, 4.0),
)


# What is measured


def test_peaks_are_those_of_the_same_call() -> None:
    model, x = mlp(), torch.randn(512, 64, requires_grad=True)
    gradient = torch.ones(512, 64)

    def step(f: Callable[[Tensor], Tensor]) -> None:
        with phase("forward"):
            y = f(x)
        with phase("backward"):
            y.backward(gradient)
        model.zero_grad()
        x.grad = None

    def in_chunks(strategy: Any, size: int) -> Callable[[Tensor], Tensor]:
        return lambda x: chunk_and_checkpoint(
            model, x, chunk_size=size, strategy=strategy
        )

    found = quick(model, x, chunk_sizes=[64, 100], strategies=("auto", NonReentrant()))
    calls: list[Callable[[Tensor], Tensor]] = [
        model,
        lambda x: checkpoint(model, x, use_reentrant=False),
        *(in_chunks(s, n) for s in ("auto", "non_reentrant") for n in (100, 64)),
    ]
    assert len(found.rows) == len(calls)
    for measured, call in zip(found.rows, calls, strict=True):
        step(call)
        trace: MemoryTrace[None] = measure_memory(step, call)
        assert measured.peak_bytes == trace.peak_bytes, measured
        assert measured.held_bytes == trace.phases["forward"].held_bytes, measured


def test_the_yardstick() -> None:
    model, x = mlp(), torch.randn(1024, 64, requires_grad=True)
    found = profile(model, x, chunk_sizes=[32, 128, 5000], progress=False)
    plain, whole, one, *in_chunks = found.rows
    assert [str(r) for r in found.rows] == [
        "plain",
        "checkpoint",
        "auto, chunk_size=1024",
        "auto, chunk_size=128",
        "auto, chunk_size=32",
    ]
    assert [r.chunks for r in found.rows] == [1, 1, 1, 8, 32]
    assert figures(plain)[3:] == (1, (1, 1))
    peak, held, *_ = figures(plain)
    assert all(figures(r)[0] < min(peak, figures(whole)[0]) / 3 for r in in_chunks)
    for r in (whole, one, *in_chunks):
        _, own, seconds, ratio, (low, high) = figures(r)
        assert own < held / 4
        assert 0 < seconds < 60
        assert 0.05 < ratio < 500
        assert low <= ratio <= high
    assert found.knee in in_chunks
    assert found.reference == plain
    assert found.threads == torch.get_num_threads()
    assert (found.device, found.rounds, found.backward) == ("cpu", 5, True)
    weights = sum(p.numel() for p in model.parameters())
    assert found.given_bytes == 4 * 2 * x.numel()
    assert found.floor_bytes == 4 * (2 * x.numel() + weights)
    assert found.free_bytes is None or found.free_bytes > 0


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [1]),
        (2, [1]),
        (5, [4, 2, 1]),
        (16, [8, 4, 2, 1]),
        (300, [256, 128, 64, 32, 16, 8, 4, 2]),
        (4096, [2048, 1024, 512, 256, 128, 64, 32, 16]),
        (100_000, [65536, 32768, 16384, 8192, 4096, 2048, 1024, 512]),
    ],
)
def test_the_sizes_that_are_tried_by_default(rows: int, sizes: list[int]) -> None:
    assert _sizes_of(None, rows) == sizes


def test_sizes_that_are_one_chunk_are_one() -> None:
    assert _sizes_of([2, 9, 3, None, 5, 2, 6], 5) == [5, 3, 2]
    found = quick(torch.sin, torch.ones(5), baselines=())
    assert [r.chunk_size for r in found.rows] == [4, 2, 1]


def test_keywords_and_trees() -> None:
    weight = torch.randn(3, 3, requires_grad=True)

    def f(
        batch: dict[str, Any], scale: float, *, mask: Tensor | None = None
    ) -> dict[str, Any]:
        x, _ = batch.pop("x"), batch.pop("rest")  # its containers are fresh
        y = x @ weight * scale * mask
        return {"y": y, "label": y.argmax(-1), "loss": y.sum(), "none": None}

    batch = {"x": torch.randn(6, 3), "rest": [torch.ones(6), None]}
    found = quick(
        *(f, batch, 2.0),
        kwargs={"mask": torch.ones(6, 1)},
        chunk_sizes=[2],
        out_dim={"y": 0, "label": 0, "loss": "sum", "none": None},
    )
    assert found.backward
    assert found.floor_bytes == 6 * 3 * 4 + 6 * 8 + 4 + 9 * 4  # and that of weight
    assert "x" in batch
    assert weight.grad is None


def test_several_strategies_and_their_names() -> None:
    def own(f: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> tuple[Tensor, ...]:
        return f(*args)

    x = torch.randn(8, 4, requires_grad=True)
    found = quick(
        *(lambda x: x.sin().sum(), x),
        chunk_sizes=[4],
        strategies=("grad_in_forward", Fused(), Fused(keep_chunks=1), own),
        baselines=("plain",),
        out_dim="sum",
    )
    names = ["plain", "grad_in_forward", "Fused()", "Fused(keep_chunks=1)", "own"]
    assert [r.strategy for r in found.rows] == names


@pytest.mark.parametrize("off", [False, True])
def test_without_gradients_forward_runs_alone(off: bool) -> None:
    with torch.set_grad_enabled(not off):
        x = torch.randn(64, 8)
        found = quick(mlp(8, 64).requires_grad_(off), x, chunk_sizes=[4])
    assert not found.backward
    assert "forward only" in str(found)
    assert "Nothing required a gradient" in found.advice
    assert all(r.peak_bytes for r in found.rows)


# No trace is left


class Odd(nn.Module):
    """Has all that a run may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
        self.generator = torch.Generator().manual_seed(1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.linear(x)))
        y = y * torch.rand(y.shape, generator=self.generator) * random.random()
        if self.fails:
            self.norm.eval()
            raise ZeroDivisionError
        return y


def state(model: Odd, x: Tensor) -> list[Any]:
    return [
        *(t.clone() for t in model.state_dict().values()),
        *(None if t.grad is None else t.grad.clone() for t in [*model.parameters(), x]),
        *(module.training for module in model.modules()),
        *(torch.get_rng_state(), model.generator.get_state(), random.getstate()),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(fails: bool) -> None:
    model, x = Odd(), torch.randn(8, 4, requires_grad=True)
    model(x).sum().backward()
    gradients = [t.grad for t in [*model.parameters(), x]]
    model.drop.eval()
    model.fails = fails
    before = state(model, x)
    if fails:
        with pytest.raises(ZeroDivisionError):
            quick(model, x, chunk_sizes=[4])
    else:
        quick(model, x, chunk_sizes=[4], strategies=("auto", "non_reentrant"))
    assert [id(t.grad) for t in [*model.parameters(), x]] == list(map(id, gradients))
    for was, now in zip(before, state(model, x), strict=True):
        assert torch.equal(was, now) if isinstance(was, Tensor) else was == now


def test_graphs_of_the_user_are_not_run() -> None:
    w = torch.randn(4, requires_grad=True)
    captured = w.sin()  # whose backward needs what it saved
    x = (w * torch.ones(6, 4)).sin()
    found = quick(lambda x: (x * captured).sin() * w, x, chunk_sizes=[2])
    assert found.backward
    assert all(r.costs for r in found.rows)
    (captured.sum() + x.sum()).backward()
    assert w.grad is not None


def test_hooks_that_wait_for_gradients_do_not_run() -> None:
    model = mlp(4, 8)
    calls: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    quick(model, torch.randn(8, 4), chunk_sizes=[2])
    assert calls == []


@pytest.mark.parametrize("own", [False, True])
def test_objects_are_frozen_meanwhile_alone(own: bool) -> None:
    counts: list[int] = []

    def f(x: Tensor) -> Tensor:
        counts.append(gc.get_freeze_count())
        return x.sin()

    if own:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        quick(f, torch.ones(4), chunk_sizes=[2], baselines=())
        assert (gc.get_freeze_count() > 0) == own
        assert all(counts)
        assert not own or max(counts) <= before
    finally:
        gc.unfreeze()


def test_reentrant_checkpoints() -> None:
    model, x = mlp(4, 8), torch.randn(8, 4, requires_grad=True)
    x.grad = before = torch.zeros(8, 4)

    def f(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=True)
        return y.sin()

    weights = sum(p.numel() for p in model.parameters())
    for g, strategy in ((f, Fused(fall_back=True)), (model, Reentrant())):
        found = quick(g, x, chunk_sizes=[4], strategies=(strategy,))
        assert all(r.costs for r in found.rows)
        assert found.floor_bytes == 4 * (2 * x.numel() + weights)
    assert x.grad is before
    assert not before.any()
    assert all(p.grad is None for p in model.parameters())


# What runs out of memory


def hungry(x: Tensor, most: int, error: type[Exception], words: str) -> Tensor:
    if len(x) > most:
        raise error(words)
    return x.sin()


OUT = [
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
    (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
]


@pytest.mark.parametrize(("error", "words"), OUT)
def test_what_runs_out_of_memory_is_a_row(error: type[Exception], words: str) -> None:
    x = torch.randn(32, 4, requires_grad=True)
    f = partial(hungry, most=16, error=error, words=words)
    found = quick(f, x, chunk_sizes=[32, 16, 4])
    *out, first, last = found.rows
    assert len(out) == 3
    for r in out:
        assert (r.peak_bytes, r.held_bytes, r.seconds, r.ratio, r.spread) == (None,) * 5
        assert r.note == "out of memory"
    assert not first.note + last.note
    assert (found.reference, first.ratio) == (first, 1.0)
    assert "time / auto, chunk_size=16" in str(found)
    assert found.advice.startswith("The whole batch ran out of memory. chunk_size=")
    assert Profile.from_dict(json.loads(found.to_json())) == found
    assert x.grad is None


def test_all_may_run_out_of_memory() -> None:
    f = partial(hungry, most=0, error=MemoryError, words="")
    found = quick(f, torch.ones(4), chunk_sizes=[2])
    assert found.knee is found.reference is None
    assert found.advice == "Every chunk size tried ran out of memory: try smaller ones."
    assert "out of memory" in str(found)
    assert "out of memory" in found._repr_html_()


def test_other_errors_pass() -> None:
    f = partial(hungry, most=3, error=RuntimeError, words="sizes do not match")
    with pytest.raises(RuntimeError, match="do not match"):
        quick(f, torch.ones(4), chunk_sizes=[2])


def test_the_gradients_of_results_are_there_once() -> None:
    outside = trials.Outside([], [])
    one, other = (torch.ones(4, requires_grad=True).sin() for _ in range(2))
    assert outside.ones(0, one) is outside.ones(0, other)
    assert outside.ones(1, one) is not outside.ones(0, one)
    assert outside.ones(0, other.double()).dtype == torch.float64


# The forms


HEADS = ["strategy", "chunk size", "chunks", "peak", "after forward", "time / plain"]
HEADS += ["quartiles", "time"]


def _line(
    name: str, size: str, chunks: str, peak: str, ratio: str, time: str
) -> list[str]:
    spread = f"{ratio} to {ratio}"
    return [name, size, chunks, f"{peak} MiB", f"{peak} MiB", ratio, spread, time]


def test_the_text() -> None:
    lines = str(PAYS).splitlines()
    assert lines[0] == (
        "64 rows, forward and backward, on cpu with 1 thread, torch 2; medians of 3"
        " rounds"
    )
    cells = [re.split(r" {2,}", line.strip()) for line in lines[2:8]]
    assert cells == [
        HEADS,
        _line("plain", "-", "1", "100.0", "1.00", "1.0 s"),
        _line("checkpoint", "-", "1", "100.0", "1.30", "1.3 s"),
        _line("auto", "32", "2", "55.0", "1.31", "1.3 s"),
        ["*", *_line("auto", "8", "8", "20.0", "1.40", "1.4 s")],
        _line("auto", "1", "64", "19.0", "4.00", "4.0 s"),
    ]
    assert len(set(map(len, lines[2:8]))) == 1  # aligned
    assert " ".join(lines[9:]) == PAYS.advice
    assert max(map(len, lines[9:])) <= 88


def test_the_html_is_escaped() -> None:
    found = made(*PAYS.rows[:2], row("<b>&", 8, 20 * MIB, 1.4), device="<i>")
    html = found._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert html.count("<tr") == 4
    assert html.count("font-weight: bold") == 1


def test_json_and_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    text = PAYS.to_json(path)
    assert path.read_text() == text + "\n"
    values = json.loads(text)
    assert values == PAYS.to_dict()
    assert values["knee"] == 3
    assert values["advice"] == PAYS.advice
    assert Profile.from_dict(values) == PAYS


def test_the_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="plots need it")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    axes = PAYS.plot()
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["plain", "checkpoint", "auto", "knee: auto, chunk_size=8"]
    star = lines["knee: auto, chunk_size=8"]
    assert (star.get_marker(), list(star.get_data())) == ("*", [[20.0], [1.4]])
    assert [text.get_text() for text in axes.texts] == ["32", "8", "1"]
    plt.close("all")
    own = Figure().add_subplot()
    assert made(row("plain", None, None, None)).plot(own) is own


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'chunkcheck\[plot\]'"):
        PAYS.plot()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text
    assert size_text(5 * 2**50) == "5120.0 TiB"


def test_times_for_people() -> None:
    assert [time_text(s) for s in (2.5, 0.0123, 1.5e-5)] == [
        "2.5 s",
        "12.3 ms",
        "15 us",
    ]


# The knee


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({64: (100, 1.0), 8: (20, 1.2), 1: (19, 9.0)}, 8),
        ({64: (100, 1.0), 8: (20, 1.2)}, 8),  # on the line, the leanest
        ({64: (100, 1.0), 32: (90, 1.9), 1: (50, 2.0)}, 1),  # above the line
        ({64: (100, 1.0), 8: (99, 1.01), 1: (98, 3.0)}, 64),  # nothing is saved
        ({64: (100, 1.0), 8: (20, 0.9)}, 8),
        ({64: (100, 1.0), 8: (0, 1.0)}, 8),
    ],
)
def test_the_knee(points: Mapping[int, tuple[int, float]], expected: int) -> None:
    rows = [row("auto", size, *point) for size, point in points.items()]
    found = knee([*rows, row("auto", 2, None, None)])
    assert found is not None
    assert found.chunk_size == expected


# The advice


def test_advice_where_it_pays() -> None:
    assert PAYS.advice == (
        "chunk_size=8 is the knee: a peak of 20.0 MiB in place of 100.0 MiB (5.0 times"
        " less) for 1.40 times the time of plain. Smaller chunks cost more than they"
        " save: chunk_size=1 takes 4.0 times the time of plain for a peak of 19.0 MiB."
    )


def test_advice_names_the_strategy_among_several() -> None:
    rows = [*PAYS.rows, row("none", 8, 90 * MIB, 1.1)]
    assert "chunk_size=8 with strategy auto is the knee" in made(*rows).advice


def test_advice_on_a_batch_that_fits() -> None:
    fits = "Plain f fits as it is: its peak of 100.0 MiB is little of the 2.0 GiB"
    assert fits in replace(PAYS, free_bytes=2**31).advice
    assert "fits" not in replace(PAYS, free_bytes=2**29).advice


def test_advice_where_smaller_chunks_may_save_more() -> None:
    assert made(*PAYS.rows[:4]).advice.endswith("they may save more.")
    assert "may save" not in made(*PAYS.rows[:3], row("auto", 1, MIB, 1.5)).advice


def test_advice_where_checkpoint_is_the_knee() -> None:
    rows = [
        row("plain", None, 100 * MIB, 1.0),
        row("checkpoint", None, 20 * MIB, 1.1),
        row("auto", 1, 15 * MIB, 9.0),
    ]
    found = made(*rows)
    assert found.knee is found.rows[1]
    assert found.advice == (
        "checkpoint is the knee: a peak of 20.0 MiB in place of 100.0 MiB (5.0 times"
        " less) for 1.10 times the time of plain. The least is a peak of 15.0 MiB for"
        " 9.00 times the time of plain, with auto, chunk_size=1."
    )


def test_advice_where_plain_alone_runs_out_of_memory() -> None:
    rows = [row("plain", None, None, None), row("checkpoint", None, 100 * MIB, 1.0)]
    assert made(*rows, row("auto", 1, 20 * MIB, 1.2)).advice == (
        "Plain f ran out of memory. chunk_size=1 is the knee: a peak of 20.0 MiB in"
        " place of 100.0 MiB (5.0 times less) for 1.20 times the time of checkpoint."
    )


def test_advice_on_small_intermediates() -> None:
    x = torch.randn(1024, 64, requires_grad=True)  # 256 KiB
    found = quick(torch.sin, x, chunk_sizes=[512, 64], baselines=("plain",))
    assert re.fullmatch(
        r"Chunking does not pay here: it saves at most \d+\.\d KiB of the 1\.2 MiB that"
        r" plain and its arguments take \(\d\d%\), with chunk_size=64, since the"
        r" intermediates \(256\.0 KiB\) are small against arguments, results and"
        r" gradients \(1\.0 MiB\)\.( Plain f fits .*)?",
        found.advice,
    )


def test_advice_where_a_strategy_saves_nothing() -> None:
    found = made(PAYS.rows[0], row("none", 8, 95 * MIB, 1.4))
    assert found.advice == (
        "Chunking does not pay here: it saves at most 5.0 MiB of the 102.0 MiB that"
        " plain and its arguments take (5%), with chunk_size=8."
    )


def test_advice_where_nothing_is_saved() -> None:
    found = made(PAYS.rows[0], row("auto", 8, 101 * MIB, 1.4))
    assert found.knee is found.rows[0]
    assert found.advice == (
        "Chunking does not pay here: it saves nothing of the 102.0 MiB that plain and"
        " its arguments take."
    )


def test_advice_on_one_chunk() -> None:
    one = torch.ones(1, 3, requires_grad=True)
    found = quick(torch.sin, one, baselines=())
    assert found.advice == "A batch of one row cannot be chunked."
    found = quick(torch.sin, one.expand(40, 3), chunk_sizes=[40, 64], baselines=())
    assert found.advice == (
        "The batch of 40 rows is one chunk at every size tried, which saves nothing:"
        " try sizes below 40."
    )
    assert len(found.rows) == 1


# What is asked wrongly


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"chunk_sizes": []}, ValueError, "chunk_sizes is empty"),
        ({"chunk_sizes": [4, 0]}, ValueError, r"chunk_sizes\[1\] must be a positive"),
        ({"chunk_sizes": [-1]}, ValueError, r"chunk_sizes\[0\] must be a positive"),
        ({"chunk_sizes": [True]}, TypeError, r"chunk_sizes\[0\] must be a positive"),
        ({"chunk_sizes": [2.0]}, TypeError, r"chunk_sizes\[0\] must be a positive"),
        ({"chunk_sizes": 4}, TypeError, "chunk_sizes must be several sizes"),
        ({"strategies": ()}, ValueError, "strategies is empty"),
        ({"strategies": ["atuo"]}, ValueError, r"strategies\[0\]: .*mean 'auto'"),
        ({"strategies": [None]}, TypeError, r"strategies\[0\]: .*None"),
        ({"strategies": "auto"}, TypeError, "strategies must be several of them"),
        ({"rounds": 0}, ValueError, "rounds must be a positive int, found 0"),
        ({"rounds": True}, TypeError, "rounds must be a positive int, found True"),
        ({"rounds": 2.5}, TypeError, "rounds must be a positive int"),
        ({"baselines": "plain"}, TypeError, "baselines must be several"),
        ({"baselines": ["bare"]}, ValueError, r"baselines\[0\] must be 'plain'"),
        ({"kwargs": [1]}, TypeError, "kwargs must be a mapping"),
        ({"batch_dim": 3}, ValueError, "so no dim 3"),
        ({"out_dim": "max"}, TypeError, "out_dim must be"),
        ({"device": "meta"}, NotImplementedError, "no peak memory counters"),
    ],
)
def test_what_is_wrong_is_named(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        profile(torch.sin, torch.ones(4, 2), **options)


def test_f_comes_first_and_the_batch_has_rows() -> None:
    with pytest.raises(TypeError, match="f must be callable, found a Tensor"):
        profile(torch.ones(4), torch.sin)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the batch is empty"):
        profile(torch.sin, torch.ones(0, 2))


# The bar


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_progress(
    terminal: bool,
    asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        pytest.importorskip("rich", reason="the bar needs it")
    monkeypatch.setattr(trials, "_PATIENCE", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    one = partial(quick, chunk_sizes=[2], baselines=())
    one(torch.sin, torch.ones(4), progress=asked)
    shown = "profile" in capsys.readouterr().err
    assert shown == (terminal and asked)


def test_no_bar_on_short_runs_or_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    one = partial(quick, chunk_sizes=[2], baselines=(), progress=True)
    one(torch.sin, torch.ones(4))
    monkeypatch.setattr(trials, "_PATIENCE", 0)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    one(torch.sin, torch.ones(4))
    assert capsys.readouterr().err == ""


def test_the_device_is_that_of_the_accelerator(device: torch.device) -> None:
    model, x = mlp().to(device), torch.randn(512, 64, device=device)
    found = quick(model, x, chunk_sizes=[32])
    plain, _, last = found.rows
    assert torch.device(found.device).type == device.type
    assert figures(last)[0] < figures(plain)[0] / 2


def test_the_device_is_asked_for_where_there_are_several() -> None:
    on = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1")]
    more: Any = [*on, SimpleNamespace(device=torch.device("cuda:0"))]
    assert _device([], None) == torch.device("cpu")
    assert _device(more[:2], None) == torch.device("cuda:1")
    assert _device(more, "cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"uses cuda:0 and cuda:1: .*device='cuda:0'"):
        _device(more, None)


def test_free_memory_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(device: torch.device) -> int:
        raise RuntimeError(f"not known for {device}")

    monkeypatch.setattr(_profile, "free_memory", unknown)
    found = quick(torch.sin, torch.ones(4), chunk_sizes=[2], baselines=("plain",))
    assert found.free_bytes is None
    assert "fits" not in found.advice
