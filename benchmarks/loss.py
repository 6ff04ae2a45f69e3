"""A loss over a large vocabulary: cross-entropy of a head's logits.

Beside torch's own `linear_cross_entropy` in its chunked mode, where torch has it, with
its default options and with chunks of as many rows as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from examples.recipes.language_model import language_model_loss
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everyone calls it
from torch.utils.checkpoint import checkpoint

from benchmarks.figures import Figure, Part, Setting
from benchmarks.timing import interleaved
from chunkcheck import StrategyName, chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory

Loss = Callable[[], Tensor]
LABELS = {
    "plain": "plain f",
    "loop": "loop of checkpoint",
    "auto": "chunkcheck, auto",
    "in_forward": "chunkcheck, grad_in_forward",
    "fast": "the recipe with cross_entropy_",
    "torch": "linear_cross_entropy, default options",
    "torch_matched": "linear_cross_entropy, as many rows",
}


class Head:
    """Hidden states, a head and targets, and the ways to their loss."""

    def __init__(self, rows: int, width: int, classes: int, size: int) -> None:
        self.x = torch.randn(rows, width, requires_grad=True)
        self.weight = (torch.randn(classes, width) * 0.02).requires_grad_()
        self.target = torch.randint(classes, (rows,))
        self.size = size

    def mean(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of some rows."""
        return F.cross_entropy(F.linear(x, self.weight), target)

    def _sum(self, x: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        return F.cross_entropy(logits, target, reduction="sum")

    def _loop(self) -> Tensor:
        pieces = zip(self.x.split(self.size), self.target.split(self.size), strict=True)
        total = torch.zeros(())
        for x, target in pieces:
            loss: Any = checkpoint(self._sum, x, target, use_reentrant=False)
            total = total + loss
        return total / len(self.x)

    def _ours(self, strategy: StrategyName) -> Tensor:
        return chunk_and_checkpoint(
            self.mean,
            self.x,
            self.target,
            chunk_size=self.size,
            out_dim="mean",
            strategy=strategy,
        )

    def _fast(self) -> Tensor:
        return language_model_loss(
            self.x,
            self.target,
            self.weight,
            chunk_size=self.size,
            fast=True,
            strategy="grad_in_forward",
        )

    def _torch(self, **options: Any) -> Tensor:
        chunked: Any = torch.nn.LinearCrossEntropyOptions(**options)
        loss: Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined, unused-ignore]
            self.x, self.weight, self.target, options=chunked
        )
        return loss

    def ways(self) -> Mapping[str, Loss]:
        """Return the ways by key."""
        found: dict[str, Loss] = {
            "plain": lambda: self.mean(self.x, self.target),
            "loop": self._loop,
            "auto": lambda: self._ours("auto"),
            "in_forward": lambda: self._ours("grad_in_forward"),
            "fast": self._fast,
        }
        if hasattr(F, "linear_cross_entropy"):
            found["torch"] = self._torch
            found["torch_matched"] = lambda: self._torch(batch_chunk_size=self.size)
        return found

    def prepare(self) -> None:
        """Forget the gradients."""
        self.x.grad = self.weight.grad = None


class _Step:
    """Forward and backward, for `interleaved`."""

    def __init__(self, head: Head, loss: Loss) -> None:
        self.prepare = head.prepare
        self._loss = loss

    def __call__(self) -> None:
        torch.autograd.backward(self._loss())


def measure(setting: Setting) -> Part:
    """Return peaks and times relative to plain, to the loop and to torch's own."""
    sizes = (64, 16, 512, 16) if setting.quick else (2048, 256, 32768, 128)
    head = Head(*sizes)
    steps = {key: _Step(head, loss) for key, loss in head.ways().items()}
    peaks = {}
    for key, step in steps.items():
        setting.say(f"loss: memory, {LABELS[key]}")
        step.prepare()
        peaks[key] = measure_memory(step).peak_bytes
    setting.say("loss: time")
    times = interleaved(steps, rounds=3 if setting.quick else 7, budget=60)
    rows, width, classes, size = sizes
    what = f"{rows:,} rows, {width} -> {classes:,} classes, chunks of {size} rows"
    ours = LABELS["in_forward"]
    memory = ", ".join(f"{LABELS[k]} {peaks[k] / peaks['plain']:.3f}" for k in peaks)
    medians = ", ".join(f"{LABELS[k]} {times.median(k):.2f} s" for k in steps)
    figures = [
        Figure(
            "memory",
            f"{ours}, peak relative to plain",
            peaks["in_forward"] / peaks["plain"],
            "ratio",
            limit=0.115,
            note=memory,
        ),
        Figure(
            "loop",
            f"{ours}, time relative to the loop of checkpoint",
            times.ratio("in_forward", "loop"),
            "ratio",
            limit=0.85,
            note=medians,
        ),
        Figure(
            "plain",
            f"{ours}, time relative to plain",
            times.ratio("in_forward", "plain"),
            "ratio",
            aim=1.05,
        ),
    ]
    for key in ("torch", "torch_matched") if "torch" in steps else ():
        figures += [
            Figure(
                f"{key}_{name}",
                f"{LABELS['fast']}, {name} relative to {LABELS[key]}",
                round(value, 4),  # a few bytes are the count of the rows
                "ratio",
                limit=1.0,
                note=note,
            )
            for name, value, note in (
                (
                    "memory",
                    peaks["fast"] / peaks[key],
                    f"{ours}: {peaks['in_forward'] / peaks[key]:.2f}",
                ),
                (
                    "time",
                    times.ratio("fast", key),
                    f"{ours}: {times.ratio('in_forward', key):.2f}",
                ),
            )
        ]
    details = {
        "peaks in bytes": peaks,
        "seconds per round": {key: times.seconds[key] for key in steps},
    }
    return Part("loss", f"Cross-entropy: {what}", figures, (), details)
