#!/usr/bin/env -S uv run --script

# /// script
# dependencies = ["nox"]
# ///
"""Every check of the project, as one nox session each; `nox -l` lists them.

Where torch comes from is the machine's business, so the environment says it:

* `CHUNKCHECK_TORCH_INSTALLER`: a command, called as `COMMAND PYTHON VERSION`;
* else `CHUNKCHECK_TORCH_INDEX`: the URL of a package index, asked for torch alone;
* else nothing: the installer's own settings decide.

`CHUNKCHECK_REQUIRE_CUDA=1` turns the skips of a machine without a GPU into failures.
`HYPOTHESIS_PROFILE` chooses how many examples the property tests generate.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Sequence

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
os.environ.setdefault("NOX_ENABLE_STALENESS_CHECK", "1")  # but not across Pythons

PYPROJECT = nox.project.load_toml("pyproject.toml")

# The torch releases tested, oldest first, each with what it needs beside it: the
# oldest runs on the oldest numpy, since it came out when numpy 2 was new.
TORCH = {
    "2.4.1": ["numpy<2"],
    "2.6.0": [],
    "2.9.1": [],
    "2.13.0": [],
    "2.15.0": [],
}
DEFAULT = "2.13.0"
ALL_TORCH = [
    nox.param(version, tags=["default"] if version == DEFAULT else [])
    for version in TORCH
]

OTHER_SOURCES = [
    *("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"),
    *("UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX"),
]
if "PIP_FIND_LINKS" in os.environ:  # uv separates by commas, and reads only its own
    links = ",".join(os.environ["PIP_FIND_LINKS"].split())
    os.environ.setdefault("UV_FIND_LINKS", links)


@nox.session(default=True)
def lint(session: nox.Session) -> None:
    """Check style, format, workflows and the repository's own set-up."""
    session.install(*groups("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("repo-review", ".")
    session.run("zizmor", "--offline", "--quiet", ".github")
    for schema, files in {
        "github-workflows": map(str, Path(".github/workflows").glob("*.yml")),
        "dependabot": [".github/dependabot.yml"],
        "citation-file-format": ["--default-filetype=yaml", "CITATION.cff"],
    }.items():
        session.run("check-jsonschema", f"--builtin-schema=vendor.{schema}", *files)


@nox.session(default=True)
@nox.parametrize("checker", ["mypy", "basedpyright"])
def types(session: nox.Session, checker: str) -> None:
    """Check the code with mypy and our stubs of torch, tests/typing without them."""
    if checker == "mypy":
        install(session, "types")
        session.install("--force-reinstall", "--no-deps", "./stubs")
        session.run("mypy", "src", "tests", "examples", "benchmarks", "noxfile.py")
    else:
        install(session, "basedpyright", "mypy")
        session.run("basedpyright", "tests/typing")
        cache = session.cache_dir / "mypy-without-stubs"
        session.run("mypy", f"--cache-dir={cache}", "tests/typing")


@nox.session(default=False)
@nox.parametrize("torch", ALL_TORCH)
def stubs(session: nox.Session, torch: str) -> None:
    """Compare stubs/ with what one release of torch really has."""
    install(session, "mypy", torch=torch)
    session.install("--force-reinstall", "--no-deps", "./stubs")
    allowlist = Path("stubs/allowlist.txt")
    allowed = ["--allowlist", str(allowlist), "--ignore-unused-allowlist"]
    session.run(
        *("python", "-m", "mypy.stubtest", "--ignore-missing-stub"),
        *(allowed if allowlist.exists() else []),
        *("torch.utils.checkpoint", "torch.utils._pytree"),
    )


@nox.session(default=True)
def tests(session: nox.Session) -> None:
    """Run the tests on the default torch; arguments after `--` go to pytest."""
    install(session, "test")
    pytest(session, *session.posargs)


@nox.session(default=False)
@nox.parametrize("device", ["cpu", "cuda"])
@nox.parametrize("torch", ALL_TORCH)
def matrix(session: nox.Session, torch: str, device: str) -> None:
    """Run the tests on one release of torch and one device."""
    install(session, "test", torch=torch)
    available = "import torch; print(torch.cuda.is_available())"
    if device == "cuda" and ask(session, available)[-1] != "True":
        reason = f"torch {torch} finds no CUDA device here"
        required = os.environ.get("CHUNKCHECK_REQUIRE_CUDA") == "1"
        (session.error if required else session.skip)(reason)
    pytest(session, f"--device={device}", *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Run the property tests with many more examples."""
    install(session, "test")
    pytest(session, "-k", "properties", *session.posargs, profile="nightly")


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small classifier plainly, checkpointed and chunked, and compare."""
    install(session, "demo")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure memory and time beside the alternatives; see docs/benchmarks.md."""
    install(session, "bench")
    # The alternatives need not be here: the output says of each that is not why.
    anyhow = range(256)
    for requirement in groups("alternatives"):
        session.install(requirement, success_codes=anyhow)
    session.install("pip")  # which can download: uv's environments come without
    folder = Path(session.create_tmp()) / "released"
    shutil.rmtree(folder, ignore_errors=True)
    session.run(
        *("python", "-m", "pip", "download", "--no-deps", "--dest", str(folder)),
        *groups("released"),
        success_codes=anyhow,
    )
    for wheel in folder.glob("*.whl"):  # beside the library: not installed over it
        shutil.unpack_archive(wheel, folder, "zip")
    released = f"--release={folder / 'chunkcheck' / 'chunkcheck.py'}"
    session.run("python", "-m", "benchmarks", released, *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a warning is an error."""
    session.install(*groups("docs"))
    session.install("--no-deps", "-e", ".")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build wheel and sdist into dist/, and run the sdist's tests on the wheel."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install(*groups("build"))
    session.run("python", "-m", "build")
    (sdist,), (wheel,) = Path("dist").glob("*.tar.gz"), Path("dist").glob("*.whl")
    session.run("twine", "check", "--strict", str(sdist), str(wheel))

    install(session, "test", project=("--force-reinstall", str(wheel)))
    scratch = Path(session.create_tmp())
    unpacked = scratch / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(sdist, scratch, filter="data")
    shutil.rmtree(unpacked / "src")  # so that only the wheel can be imported
    with session.chdir(unpacked):
        pytest(session, *session.posargs)


def groups(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def install(
    session: nox.Session,
    *names: str,
    torch: str = DEFAULT,
    project: Sequence[str] = ("-e", "."),
) -> None:
    """Install dependency groups, one release of torch, and the project alone."""
    session.install(*groups(*names), *TORCH[torch])
    found = ask(session, "import torch; print(torch.__version__)")[-1]
    if found.partition("+")[0] != torch:
        install_torch(session, torch)
    session.install("--no-deps", *project)


def install_torch(session: nox.Session, version: str) -> None:
    """Install one release of torch from where the environment says."""
    wanted = f"torch=={version}"
    if command := os.environ.get("CHUNKCHECK_TORCH_INSTALLER"):
        session.install("pip")  # for the command: uv's environments come without
        python = shutil.which("python", path=session.bin) or "python"
        session.run(*shlex.split(command), python, version, external=True)
    elif index := os.environ.get("CHUNKCHECK_TORCH_INDEX"):
        # With any other index beside it, an installer may take the other's build.
        session.install(
            *("--no-deps", "--index-url", index, wanted),
            env=dict.fromkeys(OTHER_SOURCES),
        )
        code = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
        session.install(*(r for r in ask(session, code) if "extra ==" not in r))
    else:
        session.install(wanted)


def ask(session: nox.Session, code: str) -> list[str]:
    """The lines that a piece of code prints in the session, or its traceback's."""
    python = ("python", "-c", code)
    output = session.run(*python, silent=True, log=False, success_codes=(0, 1))
    return str(output).splitlines()


def pytest(session: nox.Session, *args: str, profile: str = "ci") -> None:
    """Run pytest with a profile of hypothesis, unless the user has chosen one."""
    profile = os.environ.get("HYPOTHESIS_PROFILE", profile)
    session.run("pytest", *args, env={"HYPOTHESIS_PROFILE": profile})


if __name__ == "__main__":
    nox.main()
