"""Tests of the workflows: they test the releases of torch that the noxfile lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Return the releases in the noxfile's table."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TORCH":
            return set(ast.literal_eval(node.value))
    raise AssertionError("the noxfile has no table TORCH")


def test_ci_tests_every_listed_torch_and_no_other() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    versions = set(re.findall(r"\b2\.\d+\.\d+\b", workflow))
    # Pins of actions are versions as well, but stand behind a comment sign.
    pins = set(re.findall(r"# v(\d+\.\d+\.\d+)", workflow))
    assert versions - pins == listed()


def test_the_default_of_the_cuda_workflow_is_listed() -> None:
    workflow = (ROOT / ".github" / "workflows" / "cuda.yml").read_text()
    assert set(re.findall(r"\b2\.\d+\.\d+\b", workflow)) <= listed()
