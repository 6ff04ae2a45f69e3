"""Tables: the figures for a terminal, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rich.table import Table
from rich.text import Text

from benchmarks.figures import Figure, Part

NUMBERS = ("found", "limit")
HEAD = ("figure", "found", "limit", "met", "beside it")
HOW = (
    "All ratios of time are medians over rounds in which the ways run by turns, in one"
    " process, on one thread. X is the bytes of the input; weights do not count."
)


def tabulate(part: Part) -> Table:
    """Put the figures of one part into a table for a terminal."""
    table = Table(title=part.title, title_justify="left", expand=True)
    for name in HEAD:
        justify: Literal["left", "right"] = "right" if name in NUMBERS else "left"
        ratio = {"figure": 3, "beside it": 4}.get(name)
        table.add_column(name, justify=justify, ratio=ratio)
    for figure in part.figures:
        style = {True: "green", False: "red", None: ""}[figure.met]
        label, found, limit, met, note = row(figure)
        table.add_row(label, found, limit, Text(met, style), note)
    return table


def markdown(parts: Iterable[Part], missing: Mapping[str, str]) -> str:
    """Return the figures as Markdown, a table for each part."""
    blocks = []
    for part in parts:
        rows: list[tuple[str, ...]] = [HEAD, ("---", "---:", "---:", "---", "---")]
        rows.extend(row(figure) for figure in part.figures)
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        blocks.append("\n".join([f"### {part.title}", "", *lines]))
    blocks.extend(absences(missing))
    return "\n\n".join(blocks) + "\n"


def absences(missing: Mapping[str, str]) -> list[str]:
    """Say which contenders are not here, and why."""
    return [f"{label}: not installable here: {why}" for label, why in missing.items()]


def row(figure: Figure) -> tuple[str, ...]:
    """Return the cells of one figure, in the order of `HEAD`."""
    limit = "" if figure.limit is None else _number(figure, figure.limit)
    if figure.aim is not None:
        limit += f", aim {_number(figure, figure.aim)}"
    return (
        figure.label,
        "not measured" if figure.value is None else _number(figure, figure.value),
        limit,
        {True: "yes", False: "no", None: ""}[figure.met],
        figure.note,
    )


def _number(figure: Figure, value: float) -> str:
    match figure.unit:
        case "X":
            return f"{value:.2f} X"
        case "ratio":
            return f"{value:.2f}"
        case "share":
            return f"{value:.1%}"
        case "error":
            return f"{value:.1e}"
        case "bytes":
            return f"{value:,.0f}"
        case "seconds":
            return f"{value:.3g} s"
