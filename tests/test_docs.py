"""Tests of the documentation: every code block and every docstring example runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

import chunkcheck

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [
    "chunkcheck",
    *(
        module.name
        for module in pkgutil.walk_packages(chunkcheck.__path__, "chunkcheck.")
    ),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path) -> None:
    document = Document.parse(str(page), PythonCodeBlockParser())
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), verbose=False)
    assert results.failed == 0


def test_every_public_function_has_an_example_that_runs() -> None:
    found = {
        test.name.rpartition(".")[2]
        for module in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(module))
        if test.examples
    }
    assert {"chunk_and_checkpoint", "chunked", "profile", "check"} <= found


def commands(text: str) -> list[str]:
    """Return the commands of a page's shell blocks, a line each."""
    blocks = re.findall(
        r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [
        part.strip()
        for line in lines
        if line and not line.startswith("#")
        for part in line.split("&&")
    ]


def test_ci_runs_the_readmes_own_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    sessions = [
        command
        for command in commands((ROOT / "README.md").read_text())
        if command.startswith("nox ")
    ]
    assert sessions[:2] == ["nox -s demo", "nox -s tests"]
    for command in sessions:
        assert command in script
