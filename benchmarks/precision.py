"""Precision: weight gradients in bf16, which are sums over all chunks.

The reference is float64 on the same bf16 values, the error that of all weight gradients
together, in the Frobenius norm.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.contenders import Function
from benchmarks.figures import Figure, Part, Setting
from benchmarks.models import mlp
from benchmarks.timing import Step, interleaved
from chunkcheck import Fused, chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory

WIDTH, HIDDEN, SIZE = 64, 256, 32
TILED = ("liger", "deepspeed")


def measure(setting: Setting) -> Part:
    """Return the errors, and what a sum in float32 costs."""
    count = 32 if setting.quick else 1024
    rows = count * SIZE
    model = mlp(WIDTH, HIDDEN).bfloat16()
    x = torch.randn(rows, WIDTH).bfloat16().requires_grad_()
    gradient = torch.randn(rows, WIDTH).bfloat16()

    def narrow(x: Tensor) -> Tensor:
        strategy = Fused(accumulate_dtype=None)
        y: Tensor = chunk_and_checkpoint(model, x, chunk_size=SIZE, strategy=strategy)
        return y

    ways: dict[str, Function] = {
        way.key: way.on(model, SIZE)
        for key, way in setting.contenders.items()
        if key in ("plain", "loop", "ours", *TILED)
    }
    ways["narrow"] = narrow
    setting.say(f"precision: {count:,} chunks in bf16")
    errors = _errors(ways, model, x, gradient)
    steps = {
        key: Step(ways[key], x, gradient, tuple(model.parameters()))
        for key in ("ours", "narrow")
    }
    rounds = 3 if setting.quick else 9
    times = interleaved(steps, rounds=rounds, budget=15)
    peaks = {key: _peak(steps[key]) for key in steps}
    chunks = f"{count:,} chunks of {SIZE} rows in bf16"
    more = peaks["ours"] - peaks["narrow"]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    others = {
        "loop": "loop of checkpoint",
        **{key: setting.contenders[key].label for key in TILED if key in ways},
    }
    return Part(
        "precision",
        "Sums over chunks in bf16: error of the weight gradients",
        [
            Figure(
                "ours",
                f"{chunks}, relative to unchunked",
                errors["ours"] / errors["plain"],
                "ratio",
                limit=1.2,
                note=f"error {errors['ours']:.1e}, unchunked {errors['plain']:.1e}",
            ),
            *(
                Figure(
                    key,
                    f"the same, {label}",
                    errors[key] / errors["plain"],
                    "ratio",
                    note=f"error {errors[key]:.1e}",
                )
                for key, label in {"narrow": "accumulate_dtype=None", **others}.items()
            ),
            Figure(
                "time",
                "float32 sums, time relative to accumulate_dtype=None",
                times.ratio("ours", "narrow"),
                "ratio",
                note=" and ".join(
                    f"{1e6 * times.median(key) / count:.0f}"
                    for key in ("ours", "narrow")
                )
                + " µs a chunk",
            ),
            Figure(
                "bytes",
                "float32 sums, more bytes at the peak",
                more,
                "bytes",
                note=f"{peaks['ours']:,} and {peaks['narrow']:,}; the weights take"
                f" {weights:,}",
            ),
        ],
        (),
        {"errors": errors, "peak bytes": peaks, "seconds per round": times.seconds},
    )


def _errors(
    ways: Mapping[str, Function], model: nn.Module, x: Tensor, gradient: Tensor
) -> dict[str, float]:
    exact = copy.deepcopy(model).double()
    torch.autograd.backward(exact(x.detach().double()), gradient.double())
    expected = _gradients(exact)
    errors = {}
    for key, forward in ways.items():
        Step(forward, x, gradient, tuple(model.parameters())).prepare()
        torch.autograd.backward(forward(x), gradient)
        difference = _gradients(model) - expected
        errors[key] = (difference.norm() / expected.norm()).item()
    return errors


def _gradients(model: nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.double().flatten() for gradient in found])


def _peak(step: Step) -> int:
    step.prepare()
    return measure_memory(step).peak_bytes
