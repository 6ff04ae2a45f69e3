"""The benchmarks run, and what they find is plausible; not whether limits are met."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  as everyone calls it

pytest.importorskip("matplotlib", reason="the benchmarks need the group `bench`")
pytest.importorskip("psutil", reason="the benchmarks need the group `bench`")
pytest.importorskip("rich", reason="the benchmarks need the group `bench`")

from benchmarks import host, keeping, loss, memory, precision, speed, walk
from benchmarks.__main__ import BEGIN, END, PARTS, write
from benchmarks.contenders import contenders
from benchmarks.figures import Curves, Figure, Part, Setting
from benchmarks.timing import Times, interleaved

ROOT = Path(__file__).parent.parent

# Stands for the release, which a test cannot download.
RELEASED = """
import torch
from torch.utils.checkpoint import checkpoint


def chunk_and_checkpoint(f, x, *, chunk_size):
    return torch.cat(
        [checkpoint(f, rows, use_reentrant=False) for rows in x.split(chunk_size)]
    )
"""


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    released = tmp_path / "chunkcheck.py"
    released.write_text(RELEASED)
    ways, _ = contenders(released)
    tiled = ("liger", "deepspeed")  # here or not, the same is tested
    ways = {key: way for key, way in ways.items() if key not in tiled}
    return Setting(ways, quick=True)


def figures(part: Part) -> dict[str, Figure]:
    found = {figure.key: figure for figure in part.figures}
    assert len(found) == len(part.figures)
    for figure in part.figures:
        assert figure.value is not None
        assert math.isfinite(figure.value)
    for curves in part.curves:
        assert all(len(y) == len(curves.x) for y in curves.y.values())
    assert json.loads(json.dumps(part.as_dict()))["key"] == part.key
    return found


def value(part: Part, key: str) -> float:
    found = figures(part)[key].value
    assert found is not None
    return found


def test_memory(setting: Setting) -> None:
    part = memory.measure(setting)
    assert set(figures(part)) == {
        *("few", "many", "forward", "closure", "history_8", "history_32"),
        "wide",
    }
    (curves,) = part.curves
    labels = {way.label for way in setting.contenders.values()}
    assert set(curves.y) == labels
    assert value(part, "many") < value(part, "few") < 20
    for peak in curves.y["plain f"]:
        assert peak == pytest.approx(53, abs=0.1)  # 51 X, and 2 of weight gradients
    assert value(part, "forward") > 2  # at least the input and the result
    assert value(part, "closure") == pytest.approx(1, abs=0.05)
    assert value(part, "wide") > 2
    notes = [figures(part)[key].note for key in ("history_8", "history_32")]
    assert set(notes) == {"each chunk keeps its own graph"}


def test_speed(setting: Setting) -> None:
    part = speed.measure(setting)
    assert set(figures(part)) == {"loop", "release", "twice", "checkpoint"}
    for key in figures(part):
        assert 0.05 < value(part, key) < 20
    (curves,) = part.curves
    assert list(curves.y["plain f"]) == [1.0] * len(curves.x)


def test_walk(setting: Setting) -> None:
    part = walk.measure(setting)
    assert set(figures(part)) == {"walk"}
    assert 0 < value(part, "walk") < 0.5


def test_precision(setting: Setting) -> None:
    part = precision.measure(setting)
    assert set(figures(part)) == {"ours", "narrow", "loop", "time", "bytes"}
    assert 0.5 < value(part, "ours") < 1.5 < value(part, "narrow")
    assert value(part, "narrow") == pytest.approx(value(part, "loop"), rel=0.5)
    assert value(part, "bytes") > 0


def test_loss(setting: Setting) -> None:
    part = loss.measure(setting)
    chunked = {
        f"{k}_{n}" for k in ("torch", "torch_matched") for n in ("memory", "time")
    }
    found = set(figures(part))
    assert found - chunked == {"memory", "loop", "plain"}
    assert chunked <= found or not hasattr(F, "linear_cross_entropy")
    assert 0 < value(part, "memory") < 1
    for key in found:
        assert 0.01 < value(part, key) < 100


def test_keeping(setting: Setting) -> None:
    part = keeping.measure(setting)
    assert set(figures(part)) == {"time", "memory"}
    assert value(part, "memory") == pytest.approx(1, abs=0.1)
    (curves,) = part.curves
    first, *_, last = curves.y["peak memory"]
    assert first is not None
    assert last is not None
    assert first < last


def test_host(setting: Setting) -> None:
    part = host.measure(setting)
    assert set(figures(part)) == {"one_node", "own_graph", "loop"}
    assert value(part, "one_node") < value(part, "own_graph")
    assert value(part, "one_node") < value(part, "loop")


def test_what_is_not_here_is_named_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "chunkcheck.py"
    broken.write_text("raise ImportError('of no use here (/a/path/x.so)')")
    ways, missing = contenders(broken)
    assert missing["chunkcheck 0.1.1"] == "of no use here"
    assert "release" not in ways
    _, missing = contenders(None)
    assert "--release" in missing["chunkcheck 0.1.1"]


def test_ratios_are_medians_of_those_within_a_round() -> None:
    times = Times({"a": [1, 9, 4], "b": [2, 3, 4], "c": [1, 1, 1]})
    assert times.ratio("a", "b") == 1
    assert times.ratio(["a", "c"], "b") == 1.25
    assert times.ratio("b", ["c", "c"]) == 1.5
    assert times.median("a") == 4


def test_slow_steps_take_fewer_rounds() -> None:
    class Slow:
        def prepare(self) -> None:
            pass

        def __call__(self) -> None:
            torch.ones(1)

    steps: Any = {"a": Slow(), "b": Slow()}
    assert len(interleaved(steps, rounds=5, budget=60).seconds["a"]) == 5
    assert len(interleaved(steps, rounds=5, budget=-1, least=2).seconds["b"]) == 2


def test_what_is_written(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    curves = Curves("plot", "A plot", "x", "y", [1, 2], {"ours": [1.0, None]})
    figure = Figure("peak", "the peak", 2.0, "X", 1.5, 1.2, note="beside")
    part = Part("part", "A part", [figure], [curves])
    for _ in range(2):  # writing again replaces, and changes nothing
        write([part], {"Liger": "no module"}, tmp_path / "results", page.parent)
        text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| the peak | 2.00 X | 1.50 X, aim 1.20 X | no | beside |" in text
    assert "Liger: not installable here: no module" in text
    found = json.loads((tmp_path / "results" / "part.json").read_text())
    assert found["figures"][0]["met"] is False
    assert found["environment"]["torch"] == torch.__version__
    assert (page.parent / "benchmarks" / "plot.svg").stat().st_size > 1000


def test_every_part_can_be_run() -> None:
    for name in PARTS:
        assert callable(import_module(f"benchmarks.{name}").measure)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    return done.stdout


def test_the_command(tmp_path: Path) -> None:
    folders = f"--results={tmp_path}", f"--docs={tmp_path}"
    shown = run("benchmarks", "--quick", "--only", "walk", *folders)
    assert "Graph walk" in shown
    assert (tmp_path / "walk.json").exists()
    assert (tmp_path / "figures.md").exists()


def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    run("benchmarks.gpu", "--device=cpu", "--tiny", f"--output={output}")
    found = json.loads(output.read_text())
    assert found["torch"] == torch.__version__
    assert [(row["layer"], row["way"]) for row in found["rows"]] == [
        (layer, way)
        for layer in ("gated MLP", "attention")
        for way in ("plain", "checkpoint", "loop of checkpoint", "chunkcheck")
    ]
    for row in found["rows"]:
        assert row["error"] is None
        assert row["peak_bytes"] > 0
        assert row["tokens_per_second"] > 0
        assert row["longest"] == found["sizes"]["most"]


def test_chunks_of_attention_are_exact() -> None:
    from benchmarks.gpu import WAYS
    from benchmarks.llama import Attention, GatedMLP

    for layer in (Attention(16, 4, 2).double(), GatedMLP(16, 8).double()):
        x = torch.randn(1, 12, 16, dtype=torch.double, requires_grad=True)
        found = []
        for way in WAYS.values():
            y = way(layer, x, 5)
            inputs = [x, *layer.parameters()]
            found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-10)
