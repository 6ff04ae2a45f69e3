"""Tests of the imports: the layers point one way, and array libraries load late."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import chunkcheck

SOURCE = Path(chunkcheck.__file__).parent

# A module may import those above it.
LAYERS = [
    "chunkcheck._typing",
    "chunkcheck._tree",
    "chunkcheck._plan",
    "chunkcheck._leaves",
    "chunkcheck._arguments",
    "chunkcheck._strategies",
    "chunkcheck._sizes",
    "chunkcheck._torch.compat",
    "chunkcheck._torch.failures",
    "chunkcheck._torch.free",
    "chunkcheck._torch.meter",
    "chunkcheck._torch.tensors",
    "chunkcheck._torch.checkpoints",
    "chunkcheck._torch.chunks",
    "chunkcheck._torch.gradients",
    "chunkcheck._torch.joined",
    "chunkcheck._torch.results",
    "chunkcheck._torch.reach",
    "chunkcheck._torch.captures",
    "chunkcheck._torch.suited",
    "chunkcheck._torch.buffers",
    "chunkcheck._torch.replay",
    "chunkcheck._torch.saved",
    "chunkcheck._torch.tape",
    "chunkcheck._torch.cuts",
    "chunkcheck._torch.products",
    "chunkcheck._torch.backward",
    "chunkcheck._torch.one_node",
    "chunkcheck._torch.own_graph",
    "chunkcheck._torch.in_forward",
    "chunkcheck._torch.engine",
    "chunkcheck._torch.loop",
    "chunkcheck._torch.run",
    "chunkcheck._torch.untouched",
    "chunkcheck._torch.measure",
    "chunkcheck._torch",
    "chunkcheck._api",
    "chunkcheck",
    "chunkcheck.diagnostics._report",
    "chunkcheck.diagnostics._runs",
    "chunkcheck.diagnostics._mixing",
    "chunkcheck.diagnostics._causes",
    "chunkcheck.diagnostics._check",
    "chunkcheck.diagnostics._rows",
    "chunkcheck.diagnostics._advice",
    "chunkcheck.diagnostics._table",
    "chunkcheck.diagnostics._result",
    "chunkcheck.diagnostics._trials",
    "chunkcheck.diagnostics._profile",
    "chunkcheck.diagnostics._tune",
    "chunkcheck.diagnostics",
]
# Both belong to the torch backend, and it may split what it likes among them.
APART = {("chunkcheck._torch.checkpoints", "chunkcheck._plan")}


def name_of(path: Path) -> str:
    """Return the module name of a source file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imported(source: str) -> Iterator[str]:
    """Yield the modules of ours that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            names = [
                full
                if (full := f"{node.module}.{alias.name}") in MODULES
                else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "chunkcheck")


def violations(module: str, source: str) -> list[str]:
    """Return the imports that point the wrong way."""
    return [
        name
        for name in imported(source)
        if LAYERS.index(name) >= LAYERS.index(module) or (module, name) in APART
    ]


def test_every_module_has_its_layer() -> None:
    assert sorted(MODULES) == sorted(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("chunkcheck._plan", "from chunkcheck._api import chunked"),
        ("chunkcheck._tree", "import chunkcheck._plan"),
        ("chunkcheck._tree", "def f():\n    from chunkcheck import _torch"),
        ("chunkcheck._torch.checkpoints", "from chunkcheck._plan import Plan"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source) != []


@pytest.mark.parametrize("module", MODULES)
def test_each_module_says_what_it_owns(module: str) -> None:
    source = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 400


@pytest.mark.parametrize("module", MODULES)
def test_private_names_of_torch_stay_in_their_place(module: str) -> None:
    allowed = {"chunkcheck._torch.compat", "chunkcheck._torch.meter"}
    source = MODULES[module].read_text()
    private = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node).startswith(("torch.", "forward_ad.", "module._"))
        )
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "_private")
    ]
    assert bool(private) == (module in allowed)


LIBRARIES = ("torch", "numpy", "jax", "tensorflow", "cupy")


def loaded_by(statement: str) -> list[str]:
    """Return the array libraries that a statement loads in a fresh interpreter."""
    code = f"""
        import sys
        {statement}
        print(*[name for name in {LIBRARIES} if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def test_importing_chunkcheck_loads_no_array_library() -> None:
    assert loaded_by("import chunkcheck; chunkcheck.NonReentrant()") == []


def test_that_test_can_fail() -> None:
    assert "torch" in loaded_by("import chunkcheck._torch")
