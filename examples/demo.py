"""Train one classifier three times, plainly, checkpointed and chunked, and compare.

The images are scikit-learn's digits, the model is the small Swin of `swin.py`. All
three start from the same weights and see the same batches, so that losses and gradients
ought to be equal and only memory and time differ. The demo checks its claims: it exits
with an error if one does not hold.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

from chunkcheck import chunk_and_checkpoint
from chunkcheck.diagnostics import measure_memory, phase
from swin import Swin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from chunkcheck.diagnostics import MemoryTrace


def plain(model: Swin, images: Tensor) -> Tensor:
    """Keep what backward needs, of all images and all blocks."""
    logits: Tensor = model(images, model.mask)
    return logits


def checkpointed(model: Swin, images: Tensor) -> Tensor:
    """Keep the input of each block, and recompute block after block.

    One checkpoint around the whole model would save nothing at the peak.
    """
    x = model.tokens(images)
    for block in model.blocks:
        x = checkpoint(block, x, model.mask, use_reentrant=False)
    return model.logits(x)


def chunked(model: Swin, images: Tensor) -> Tensor:
    """Recompute a few images at a time. The mask is the same for all: pass it whole."""
    logits: Tensor = chunk_and_checkpoint(
        model, images, model.mask, chunk_size=CHUNK, batch_dim=(0, None)
    )
    return logits


EPOCHS, BATCH, CHUNK, LEARNING_RATE = 18, 360, 40, 1e-2

# The claims. Differences are relative; peaks are chunked's share of another's.
FIRST_LOSSES, LOSSES_DIFFER, EXACT_DIFFERS = 20, 1e-4, 1e-10
PEAK_SHARES = {"plain": 0.35, "checkpointed": 0.6}


class Run:
    """One of the ways to train: its own copy of the model, and what became of it."""

    def __init__(
        self, forward: Callable[[Swin, Tensor], Tensor], model: Swin, steps: int
    ) -> None:
        self.name = forward.__name__
        self.forward = forward
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = OneCycleLR(self.optimizer, LEARNING_RATE, steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Do one training step and return its loss."""
        with phase("forward"):
            loss = cross_entropy(self.forward(self.model, images), labels)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def train(self, images: Tensor, labels: Tensor) -> None:
        """Do one training step and note its loss and how long it took."""
        start = perf_counter()
        self.losses.append(self.step(images, labels))
        self.seconds.append(perf_counter() - start)
        self.schedule.step()

    def exact_step(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        """Return loss and gradients in float64, and leave the model as it is."""
        model = copy.deepcopy(self.model).double()
        loss = cross_entropy(self.forward(model, images.double()), labels)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the share of the images that the model labels rightly."""
        with torch.no_grad():
            guesses = self.forward(self.model, images).argmax(1)
        return (guesses == labels).float().mean().item()


def digits() -> list[Tensor]:
    """Return images and labels for training, then images and labels for testing."""
    values, labels = load_digits(return_X_y=True)
    images = torch.tensor(values, dtype=torch.float32).view(-1, 8, 8)
    images = (images - images.mean()) / images.std()
    split = train_test_split(range(len(labels)), train_size=1440, random_state=0)
    return [x[part] for part in split for x in (images, torch.tensor(labels))]


@dataclass
class Row:
    """What is reported of a run; differences are from the plain one, and relative."""

    name: str
    memory: MemoryTrace[float]
    seconds: float
    accuracy: float
    losses_differ: float  # of the first float32 steps, the largest
    exact_differs: float  # of the loss and the gradients of a float64 step, the largest


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry of its tensor."""
    pairs = zip(found, expected, strict=True)
    shares = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    return torch.stack(shares).max().item()


def compare(device: torch.device, console: Console) -> list[Row]:
    """Train in the three ways; return a row for each, the plain one first."""
    images, labels, *test = (tensor.to(device) for tensor in digits())
    batch = images[:BATCH], labels[:BATCH]
    order = [torch.randperm(len(images)).split(BATCH) for _ in range(EPOCHS)]
    steps = [indices for epoch in order for indices in epoch]
    model = Swin().to(device)
    runs = [Run(f, model, len(steps)) for f in (plain, checkpointed, chunked)]
    exact = [run.exact_step(*batch) for run in runs]
    for indices in track(steps, "Training three times", console=console):
        for run in runs:  # by turns, so that a busy machine slows down all three alike
            run.train(images[indices], labels[indices])
    first = [torch.tensor(run.losses[:FIRST_LOSSES]) for run in runs]
    return [
        Row(
            name=run.name,
            memory=measure_memory(run.step, *batch),
            seconds=median(run.seconds),
            accuracy=run.accuracy(*test),
            losses_differ=((first[i] - first[0]) / first[0]).abs().max().item(),
            exact_differs=difference(exact[i], exact[0]),
        )
        for i, run in enumerate(runs)
    ]


def tabulate(rows: list[Row]) -> Table:
    """Put the rows into a table."""
    table = Table(
        title=f"Swin on digits, {BATCH} images a step, torch {torch.__version__}",
        caption=(
            "Peak: memory of forward, backward and optimizer step, above what was there"
            " before. Time: median step, one thread, the three by turns. The last two:"
            f" largest relative difference from plain, of the first {FIRST_LOSSES}"
            " losses in float32, of loss and gradients of one step in float64."
        ),
    )
    table.add_column("", no_wrap=True)
    for title in ("peak bytes", "of plain", "time", "accuracy", "losses", "gradients"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.memory.peak_bytes:,}",
            f"{row.memory.peak_bytes / rows[0].memory.peak_bytes:.3f}",
            f"{row.seconds / rows[0].seconds:.2f}",
            f"{row.accuracy:.1%}",
            f"{row.losses_differ:.1e}",
            f"{row.exact_differs:.1e}",
        )
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Save a picture of the memory over a training step."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for row, colour in zip(rows, ("#7f8998", "#e69f00", "#0072b2"), strict=True):
        percent = 100 / row.memory.timeline[-1][0]
        x = [seconds * percent for seconds, _ in row.memory.timeline]
        y = [held / 2**20 for _, held in row.memory.timeline]
        label = f"{row.name}: peak {row.memory.peak_bytes / 2**20:.1f} MiB"
        axes.fill_between(x, y, step="post", color=colour, alpha=0.2, linewidth=0)
        axes.step(x, y, where="post", color=colour, linewidth=1.5, label=label)
        forward = row.memory.phases["forward"]
        end = forward.stop * percent, forward.held_bytes / 2**20
        axes.plot(*end, "o", color=colour, clip_on=False, zorder=3)
    axes.plot([], [], "o", color="black", label="end of the forward pass")
    axes.set(xlim=(0, 100), xlabel="share of the training step, %")
    axes.set(ylim=(0, None), ylabel="memory held, MiB")
    axes.set_title(f"One training step on {BATCH} images; chunks of {CHUNK}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def violated(rows: list[Row]) -> Iterator[str]:
    """Say which claims do not hold."""
    peaks = {row.name: row.memory.peak_bytes for row in rows}
    for name, limit in PEAK_SHARES.items():
        share = peaks["chunked"] / peaks[name]
        if share > limit:
            yield f"chunked's peak is {share:.3f} of {name}'s, above {limit}"
    for row in rows:
        for what, found, limit in (
            (f"first {FIRST_LOSSES} losses", row.losses_differ, LOSSES_DIFFER),
            ("loss and gradients in float64", row.exact_differs, EXACT_DIFFERS),
        ):
            if not found <= limit:  # not `>`: a NaN is a violation too
                yield f"{row.name}'s {what} differ by {found:.1e}, above {limit}"


def main() -> None:
    """Train, show the table, save the picture, check the claims."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", help="the default is cuda if torch finds it, or cpu"
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler chatters
    torch.set_num_threads(1)  # so that times compare the work, not how it is shared
    torch.manual_seed(0)

    rows = compare(torch.device(options.device or found), console)
    console.print(tabulate(rows))
    picture = options.output / "memory.png"
    draw(rows, picture)
    console.print(f"Memory over one training step: {picture}")
    failures = list(violated(rows))
    if failures:
        sys.exit("A claim of the demo does not hold:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
