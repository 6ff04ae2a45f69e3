"""The ways to run a function on a batch that the benchmarks compare.

Knows where each comes from, and that some may not be here.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunkcheck import chunk_and_checkpoint

Function: TypeAlias = Callable[[Tensor], Tensor]
Way: TypeAlias = Callable[[Function, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run `f` on all rows of `x`.

    Attributes:
        key: A short name.
        label: A name to show.
        run: Called with `f`, `x` and the number of rows in a chunk.
        chunked: Whether that number matters.
    """

    key: str
    label: str
    run: Way
    chunked: bool = True

    def on(self, f: Function, chunk_size: int) -> Function:
        """Return the function of `x` alone."""
        return lambda x: self.run(f, x, chunk_size)


def _plain(f: Function, x: Tensor, _: int) -> Tensor:
    return f(x)


def _checkpointed(f: Function, x: Tensor, _: int) -> Tensor:
    y: Tensor = checkpoint(f, x, use_reentrant=False)
    return y


def _loop(f: Function, x: Tensor, chunk_size: int) -> Tensor:
    return torch.cat(
        [checkpoint(f, rows, use_reentrant=False) for rows in x.split(chunk_size)]
    )


def _bare(f: Function, x: Tensor, chunk_size: int) -> Tensor:
    return torch.cat([f(rows) for rows in x.split(chunk_size)])


def _ours(f: Function, x: Tensor, chunk_size: int) -> Tensor:
    return chunk_and_checkpoint(f, x, chunk_size=chunk_size)


PLAIN = Contender("plain", "plain f", _plain, chunked=False)
CHECKPOINT = Contender("checkpoint", "checkpoint, whole", _checkpointed, chunked=False)
LOOP = Contender("loop", "loop of checkpoint", _loop)
BARE = Contender("bare", "bare loop", _bare)
OURS = Contender("ours", "chunkcheck", _ours)


def contenders(release: Path | None) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the ways to compare, and for those that are not here the reason.

    Args:
        release: `chunkcheck.py` of the release 0.1.1, which is loaded under another
            name, so that it stands beside the library.

    """
    loaders: tuple[tuple[str, str, Callable[[], Way]], ...] = (
        ("release", "chunkcheck 0.1.1", partial(_release, release)),
        ("liger", "Liger's tiled MLP", _liger),
        ("deepspeed", "DeepSpeed's tiled MLP", _deepspeed),
    )
    found = {way.key: way for way in (PLAIN, CHECKPOINT, LOOP, BARE, OURS)}
    missing: dict[str, str] = {}
    for key, label, load in loaders:
        try:
            run = load()
            _try(run)
        except Exception as error:  # noqa: BLE001  whatever it is, it is not ours
            first, _, _ = str(error).strip().partition("\n")
            reason = re.sub(r"\(?/\S*", "", first).strip()  # without paths
            missing[label] = reason or type(error).__name__
        else:
            found[key] = Contender(key, label, run)
    return found, missing


def _try(run: Way) -> None:
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(4, 2, requires_grad=True)
    torch.autograd.backward(run(layer, x, 2), torch.ones(4, 2))


def _release(path: Path | None) -> Way:
    if path is None:
        raise FileNotFoundError("no file of it is given, see --release")
    spec = importlib.util.spec_from_file_location("released_chunkcheck", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no Python file")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(f: Function, x: Tensor, chunk_size: int) -> Tensor:
        y: Tensor = module.chunk_and_checkpoint(f, x, chunk_size=chunk_size)
        return y

    return run


# Both of these call `f` with a module, which need not be that of `f`, and ask how many
# tiles there are. They only fit a result that is as wide as the input.


def _liger() -> Way:
    tiled: Any = importlib.import_module("liger_kernel.ops.tiled_mlp")

    def run(f: Function, x: Tensor, chunk_size: int) -> Tensor:
        tiles = math.ceil(len(x) / chunk_size)
        y: Tensor = tiled.apply_tiled_mlp(lambda _, rows: f(rows), None, x, tiles)
        return y

    return run


def _deepspeed() -> Way:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found none
    tiled: Any = importlib.import_module(
        "deepspeed.runtime.sequence_parallel.ulysses_sp"
    ).TiledMLP

    def run(f: Function, x: Tensor, chunk_size: int) -> Tensor:
        tiles = math.ceil(len(x) / chunk_size)
        y: Tensor = tiled.apply(lambda _, rows: f(rows), None, x, tiles, [])
        return y

    return run
