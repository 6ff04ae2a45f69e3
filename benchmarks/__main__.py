"""Run the benchmarks, show the figures beside their limits, and write them down.

A figure that is above its limit is shown and no error: a busy machine may be the cause.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.contenders import contenders
from benchmarks.figures import Part, Setting, environment
from benchmarks.plots import draw
from benchmarks.tables import HOW, absences, markdown, tabulate

PARTS = ("memory", "speed", "walk", "precision", "keeping", "loss", "host")
BEGIN, END = "<!-- begin of the figures -->", "<!-- end of the figures -->"


def main() -> None:
    """Read the options, run the parts, show and write what they found."""
    options = _options()
    console = Console()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler chatters
    torch.set_num_threads(1)  # so that times compare the work, not how it is shared
    ways, missing = contenders(options.release)
    console.print(HOW, *absences(missing), sep="\n")
    if options.quick:
        console.print("Quick: the sizes are too small for the limits.")
    found: list[Part] = []
    with console.status("starting") as status:
        setting = Setting(ways, options.quick, status.update)
        for name in options.only:
            torch.manual_seed(0)
            module: Any = import_module(f"benchmarks.{name}")
            part: Part = module.measure(setting)
            console.print("", tabulate(part))
            found.append(part)
    write(found, missing, options.results, options.docs)
    console.print(f"Written: {options.results} and {options.docs}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        nargs="+",
        default=PARTS,
        help="parts to run, instead of all",
    )
    parser.add_argument(
        "--release", type=Path, help="chunkcheck.py of the release 0.1.1"
    )
    parser.add_argument("--results", type=Path, help="folder for JSON and Markdown")
    parser.add_argument("--docs", type=Path, help="folder for the plots and the page")
    options = parser.parse_args()
    # What shows nothing goes where git does not look.
    scratch = Path(".cache/benchmarks")
    shown = not options.quick and set(options.only) == set(PARTS)
    options.results = options.results or (
        Path("benchmarks/results") if shown else scratch / "results"
    )
    options.docs = options.docs or (Path("docs") if shown else scratch / "docs")
    return options


def write(
    parts: list[Part], missing: dict[str, str], results: Path, docs: Path
) -> None:
    """Write a JSON file for each part, the tables in Markdown, and the plots.

    Where `docs` has the page on the benchmarks, the tables go into it as well.
    """
    results.mkdir(parents=True, exist_ok=True)
    for part in parts:
        content = {
            "environment": environment(),
            "not installable here": missing,
            **part.as_dict(),
        }
        path = results / f"{part.key}.json"
        path.write_text(json.dumps(content, indent=2) + "\n")
        for curves in part.curves:
            draw(curves, docs / "benchmarks" / f"{curves.key}.svg")
    tables = markdown(parts, missing)
    (results / "figures.md").write_text(tables)
    page = docs / "benchmarks.md"
    if page.exists():
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        machine = ", ".join(f"{key} {value}" for key, value in environment().items())
        text = f"{BEGIN}\n\nMeasured with {machine}.\n\n{tables}\n{END}"
        page.write_text(before + text + after)


if __name__ == "__main__":
    main()
