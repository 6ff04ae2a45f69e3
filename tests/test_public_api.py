"""Tests of the public names: what is exported, documented, and versioned."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import types
import typing

import pytest

import chunkcheck
import chunkcheck.diagnostics

PUBLIC = {
    name: getattr(module, name)
    for module in (chunkcheck, chunkcheck.diagnostics)
    for name in module.__all__
}


def test_all_is_sorted_and_complete() -> None:
    for module in (chunkcheck, chunkcheck.diagnostics):
        visible = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)
        ]
        assert sorted(module.__all__) == module.__all__
        assert sorted(visible) == sorted(module.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_objects_name_their_public_module(name: str) -> None:
    value = PUBLIC[name]
    if typing.get_origin(value) is None:
        public = "chunkcheck" if hasattr(chunkcheck, name) else "chunkcheck.diagnostics"
        assert value.__module__ == public


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if inspect.isfunction(PUBLIC[name])]
)
def test_docstrings_cover_every_parameter(name: str) -> None:
    function = PUBLIC[name]
    doc = inspect.getdoc(function)
    assert doc is not None
    assert "Example:" in doc
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^ +\**{parameter}: ", doc, re.MULTILINE), parameter


def test_the_version_is_the_installed_one() -> None:
    assert chunkcheck.__version__ == importlib.metadata.version("chunkcheck")


def test_torch_is_the_only_dependency() -> None:
    needed = [
        requirement
        for requirement in importlib.metadata.requires("chunkcheck") or []
        if "extra ==" not in requirement
    ]
    assert needed == ["torch>=2.4"]
