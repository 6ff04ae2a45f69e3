"""Owns how rows of a profile look: as text, as HTML and as a plot.

Knows nothing of how they were measured, nor of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from chunkcheck.diagnostics._rows import ProfileRow, size_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT = ("", "strategy", "note")  # columns of words


def text_table(rows: Sequence[ProfileRow], star: ProfileRow | None, unit: str) -> str:
    """Return the rows as aligned plain text, with a star at the knee.

    Args:
        rows: The rows.
        star: The one at the knee.
        unit: Whose time is 1.

    """
    lines = [_heads(rows, unit), *(_cells(row, rows, star) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if head in _LEFT else cell.rjust(width)
            for cell, width, head in zip(line, widths, lines[0], strict=True)
        ).rstrip()
        for line in lines
    )


def html_table(
    rows: Sequence[ProfileRow],
    star: ProfileRow | None,
    unit: str,
    above: str,
    below: str,
) -> str:
    """Return the rows as an HTML table between two paragraphs."""
    heads = _heads(rows, unit)

    def line(cells: Sequence[str], tag: str, style: str = "") -> str:
        aligned = [
            f'<{tag} style="text-align: {"left" if head in _LEFT else "right"}">'
            f"{escape(cell)}</{tag}>"
            for cell, head in zip(cells, heads, strict=True)
        ]
        return f"<tr{style}>{''.join(aligned)}</tr>"

    bold = ' style="font-weight: bold"'
    body = [
        line(_cells(row, rows, star), "td", bold if row is star else "") for row in rows
    ]
    return "\n".join(
        [
            f"<p>{escape(above)}</p>",
            "<table>",
            f"<thead>{line(heads, 'th')}</thead>",
            "<tbody>",
            *body,
            "</tbody>",
            "</table>",
            f"<p>{escape(below)}</p>",
        ]
    )


def _heads(rows: Sequence[ProfileRow], unit: str) -> list[str]:
    heads = ["", "strategy", "chunk size", "chunks", "peak", "after forward"]
    heads += [f"time / {unit}", "quartiles", "time"]
    return heads + _notes(rows, "note")


def _cells(
    row: ProfileRow, rows: Sequence[ProfileRow], star: ProfileRow | None
) -> list[str]:
    low, high = row.spread or (None, None)
    return [
        "*" if row is star else "",
        row.strategy,
        "-" if row.chunk_size is None else f"{row.chunk_size:,}",
        f"{row.chunks:,}",
        "-" if row.peak_bytes is None else size_text(row.peak_bytes),
        "-" if row.held_bytes is None else size_text(row.held_bytes),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        "-" if low is None or high is None else f"{low:.2f} to {high:.2f}",
        "-" if row.seconds is None else time_text(row.seconds),
        *_notes(rows, row.note),
    ]


def _notes(rows: Sequence[ProfileRow], note: str) -> list[str]:
    return [note] if any(row.note for row in rows) else []


def draw(
    rows: Sequence[ProfileRow], star: ProfileRow | None, unit: str, ax: Axes | None
) -> Axes:
    """Draw memory against time, and return the axes.

    Raises:
        ImportError: Matplotlib is not installed.

    """
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415
        from matplotlib.ticker import (  # noqa: PLC0415
            FuncFormatter,
            LogLocator,
            NullFormatter,
        )
    except ImportError as error:
        msg = "a plot needs matplotlib: pip install 'chunkcheck[plot]'"
        raise ImportError(msg) from error
    if ax is None:
        _, ax = plt.subplots(layout="constrained")
    for name in dict.fromkeys(row.strategy for row in rows):
        ran = [
            (row.costs, row.chunk_size)
            for row in rows
            if row.strategy == name and row.costs is not None
        ]
        if not ran:
            continue
        points = [(peak / 2**20, ratio) for (peak, ratio), _ in ran]
        style = "-" if len(points) > 1 else "none"
        ax.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
        for point, (_, size) in zip(points, ran, strict=True):
            if size is not None:
                ax.annotate(
                    f"{size:,}", point, (4, 4), textcoords="offset points", fontsize=8
                )
    if star is not None and star.costs is not None:
        peak, ratio = star.costs
        ax.plot(
            *([peak / 2**20], [ratio]),
            marker="*",
            markersize=16,
            linestyle="none",
            color="black",
            label=f"knee: {star}",
            zorder=3,
        )
    ax.set(xscale="log", yscale="log", xlabel="peak, MiB", ylabel=f"time / {unit}")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        wide = high / low > 3
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else range(1, 10)))
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter() if wide else plain)
    if ax.get_lines():
        ax.legend(frameon=False)
    return ax
