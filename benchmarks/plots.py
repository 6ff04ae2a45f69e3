"""Plots: the curves as pictures."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import FuncFormatter

from benchmarks.figures import Curves

# Colours that the colour-blind can tell apart, after Okabe and Ito.
STYLES = {
    "chunkcheck": ("#0072b2", "o"),
    "plain f": ("#7f8998", ""),
    "checkpoint, whole": ("#000000", ""),
    "loop of checkpoint": ("#e69f00", "s"),
    "bare loop": ("#56b4e9", "^"),
    "chunkcheck 0.1.1": ("#cc79a7", "v"),
    "Liger's tiled MLP": ("#009e73", "x"),
    "DeepSpeed's tiled MLP": ("#d55e00", "+"),
    "time": ("#0072b2", "o"),
    "peak memory": ("#e69f00", "s"),
}


def draw(curves: Curves, path: Path) -> None:
    """Save one plot; equal curves give an equal file."""
    picture = Picture(figsize=(9, 4.5), layout="constrained")
    axes = picture.add_subplot()
    for label, y in curves.y.items():
        colour, marker = STYLES.get(label, (None, "."))
        values = [float("nan") if value is None else value for value in y]
        axes.plot(
            *(curves.x, values),
            color=colour,
            marker=marker or None,
            linestyle="-" if marker else "--",
            linewidth=2.5 if label == "chunkcheck" else 1.5,
            zorder=3 if label == "chunkcheck" else 2,
            label=label,
        )
    if curves.level is not None:
        axes.axhline(curves.level, color="#7f8998", linewidth=1, linestyle=":")
    if curves.log:
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(curves.x, [f"{x:,}" for x in curves.x])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.minorticks_off()
        low, high = axes.get_ylim()
        axes.set_yticks([t for t in TICKS if low <= t <= high])
    else:
        axes.set(ylim=(0, None), xticks=curves.x)
    axes.set_title(curves.title, loc="left", fontsize="medium")
    axes.set(xlabel=curves.x_label, ylabel=curves.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    picture.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": curves.key}):
        picture.savefig(path, metadata={"Date": None})


TICKS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
