"""Causes: small experiments that tell why a chunked call is not what it should be.

Knows what runs show. Knows nothing of how they are made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from chunkcheck._plan import Join
from chunkcheck._strategies import Fused
from chunkcheck._torch.results import Results
from chunkcheck._torch.tensors import is_tensor
from chunkcheck.diagnostics._mixing import batch_norms, mixing, rows_mix
from chunkcheck.diagnostics._report import (
    Difference,
    Finding,
    Seen,
    distance,
)
from chunkcheck.diagnostics._runs import Trial


def findings_of(trial: Trial) -> Iterator[Finding]:
    plain = trial.plain
    if plain.written:
        names = " and ".join(plain.written)
        yield Finding("in_place", f"f writes into {names}", "Clone it first")
        return
    if again := list(_when_run_again(trial)):
        yield from again  # what follows would only repeat it
        return
    loop = trial.chunks("none")
    if isinstance(loop, Exception):
        yield _whole(trial) or _error(loop)
        return
    yield from _against_plain(trial, loop)
    chunks = trial.chunks(trial.strategy)
    if isinstance(chunks, Exception):
        yield _failed(trial, chunks)
        return
    yield from _against_loop(trial, chunks, loop)


def _when_run_again(trial: Trial) -> Iterator[Finding]:
    """Run `f` a second and a third time, and see what it carries over."""
    trial.run(trial.call.invoke, backward=False)
    first = trial.carried.now()
    carried = trial.run(trial.call.invoke, backward=False, carry=True)
    second = trial.carried.now()
    same = trial.run(trial.call.invoke, backward=False)
    changed = [k for k in second if k in first and second[k] != first[k]]
    grown = [
        f"{k} (from {math.prod(a)} to {math.prod(b)})"
        for k in changed
        if isinstance(a := first[k], tuple) and isinstance(b := second[k], tuple)
        if math.prod(b) > math.prod(a)
    ]
    effect = "; ".join(map(str, trial.differing(carried, trial.plain, again=True)))
    if carried.paths != trial.plain.paths:
        effect = "the structure of its result differs"
    if grown:
        yield Finding(
            "grows",
            f"f makes {', '.join(grown)} longer each time it runs, which is once per"
            " chunk and once more in its recompute" + (f"; {effect}" if effect else ""),
            "Switch the cache or log off (use_cache=False), or return what it collects",
        )
    elif off := trial.differing(same, trial.plain, again=True):
        yield Finding(
            "randomness",
            f"f gives something else from the same random states: {off[0]}; it draws"
            " from a source, or depends on a state, that cannot be found by looking"
            " into it",
            "Let f hold its generator, or name it: Fused(generators=(generator,))",
        )
    elif effect:
        yield Finding(
            "recompute",
            "f gives something else when it runs again, and backward runs it again:"
            f" {effect}; what changes in Python: {', '.join(changed) or 'not found'}",
            "Let f depend on its arguments alone, and count outside",
        )


def _against_plain(trial: Trial, loop: Seen) -> Iterator[Finding]:
    """Compare the loop over the chunks with plain `f`."""
    plain, first = trial.plain, trial.chunk(0)
    if loop.paths != plain.paths:
        yield Finding(
            "wrong_length",
            f"the result of plain f has the leaves {', '.join(plain.paths)}, that of"
            f" the chunks {', '.join(loop.paths)}",
            "Return tensors, not lists of one entry per row",
        )
        return
    off = {d.index: d for d in trial.differing(loop, plain)}
    shaped = [
        k for k in range(len(plain.values)) if _shape(loop, k) != _shape(plain, k)
    ]
    if trial.exact and off and (whole := _whole(trial)):
        yield whole
        return
    for k in shaped:
        yield _wrong_dim(trial, loop, first, k)
    joins = _joins(trial, first)
    alone = [k for k, join in enumerate(joins) if join.only_first and k not in shaped]
    if alone:
        other = trial.chunk(1) if trial.plan.equal_chunks else plain
        unlike = {d.index for d in trial.differing(other, first)}
        unlike |= off.keys() if trial.exact else set()
        alone = [k for k in alone if k in unlike]
        for k in alone:
            yield Finding(
                "only_first",
                f"{plain.paths[k]} is that of the first chunk, and others have another",
                "Write out_dim='sum' or 'mean' for what f reduces over its rows, and"
                " None only for what does not depend on them",
            )
    if trial.exact:
        reduced = [k for k, j in enumerate(joins) if j.reduction and k in off]
        for k in reduced:
            yield _reduction(trial, joins[k], off[k])
        mixed = [d for k, d in off.items() if k not in (*shaped, *alone, *reduced)]
        explained = bool(shaped or alone or reduced)
        mixed = [d for d in mixed if d.index is not None or not explained]
        seen = mixing(trial, joins) or "; ".join(map(str, mixed)) if mixed else ""
    else:
        seen = mixing(trial, joins)
        norms = tuple(f"{name}." for name in batch_norms(trial))
        if not seen and any(j.reduction for j in joins):  # which tells nothing of rows
            seen = ", ".join(k for k in trial.updated if norms and k.startswith(norms))
            seen += " changes while f runs" if seen else ""
    if seen:
        yield rows_mix(trial, seen)
    lost = [
        name
        for name, gradient in plain.gradients.items()
        if gradient is not None and loop.gradients.get(name) is None
    ]
    if lost and trial.exact and not off and not shaped:
        yield _lost(lost, "the loop over the chunks")


def _shape(seen: Seen, k: int) -> object:
    value = seen.values[k]
    return tuple(value.shape) if is_tensor(value) else None


def _joins(trial: Trial, first: Seen) -> tuple[Join, ...]:
    results = Results(trial.plan, trial.out_dim)
    results.accept(first.tree, list(first.values), 0)
    return tuple(column.join for column in results.columns)


def _whole(trial: Trial) -> Finding | None:
    """See whether all is well once a tensor passes whole that is cut."""
    cut = [k for k, dim in enumerate(trial.plan.dims) if dim is not None]
    for k in cut if len(cut) > 1 and trial.exact else ():
        loop = trial.chunks("none", whole=k)
        if isinstance(loop, Exception) or loop.paths != trial.plain.paths:
            continue
        if not trial.differing(loop, trial.plain):
            path, shape = trial.call.paths[k], tuple(trial.values[k].shape)
            return Finding(
                "cut_whole",
                f"{path} of shape {shape} is cut, since its size along the dim is that"
                " of the batch; all is well if it passes whole",
                f"Write None for {path} in batch_dim",
            )
    return None


def _wrong_dim(trial: Trial, loop: Seen, first: Seen, k: int) -> Finding:
    """Explain a result that the chunks give another shape than `f` does."""
    wanted, chunk = _shape(trial.plain, k), _shape(first, k)
    message = (
        f"{loop.paths[k]} has the shape {_shape(loop, k)}, but {wanted} from plain f"
        f" and {chunk} from a chunk of {trial.plan.size} rows"
    )
    if isinstance(wanted, tuple) and isinstance(chunk, tuple) and wanted != chunk:
        pairs = enumerate(zip(wanted, chunk, strict=False))
        dims = [
            d for d, (a, b) in pairs if (a, b) == (trial.plan.rows, trial.plan.size)
        ]
        if dims:
            return Finding(
                "wrong_dim",
                f"{message}: its rows are along dim {dims[0]}",
                f"Write {dims[0]} for {loop.paths[k]} in out_dim",
            )
    return Finding(
        "wrong_dim",
        f"{message}: it does not have one entry per row",
        f"Write None for {loop.paths[k]} in out_dim if it is the same in all chunks,"
        " 'sum' or 'mean' if f reduces over its rows",
    )


def _reduction(trial: Trial, join: Join, off: Difference) -> Finding:
    """Explain a reduced result that is not what plain `f` gives."""
    norms = batch_norms(trial)
    if norms:
        return rows_mix(trial, str(off))
    how = (
        "averages over something else than its rows, such as those that are not ignored"
        if join.reduction == "mean"
        else "does not add up over the rows of a chunk alone"
    )
    return Finding(
        "reduction",
        f"{off} under out_dim={join.reduction!r}: f {how}",
        "Return the sum and what it is to be divided by, reduce both by 'sum', and"
        " divide outside",
    )


def _against_loop(trial: Trial, chunks: Seen, loop: Seen) -> Iterator[Finding]:
    """Compare the chunked call with the loop over the chunks."""
    off = trial.differing(chunks, loop)
    drawn = [k for k, v in loop.random.items() if chunks.random.get(k) != v]
    if drawn:
        effect = f": {off[0]}" if off else ""
        yield Finding(
            "randomness",
            f"{' and '.join(drawn)} is not set back in recompute, which draws other"
            f" numbers than forward{effect}",
            _random_remedy(drawn),
        )
    buffers = [k for k, v in loop.state.items() if distance(chunks.state.get(k), v)[0]]
    if buffers:
        yield Finding(
            "buffers",
            "recompute updates once more what the loop over the chunks updates once:"
            f" {_listed(buffers, chunks, loop)} after backward",
            "Use strategy='auto', and register as a buffer of a module what f updates",
        )
    lost = [
        name
        for name, gradient in loop.gradients.items()
        if (gradient is None) != (chunks.gradients.get(name) is None)
    ]
    if lost:
        yield _lost(lost, "the chunked call")
    unlike = [
        path
        for path, a, b in zip(
            loop.paths, loop.requires_grad, chunks.requires_grad, strict=False
        )
        if a != b
    ]
    if unlike and not lost:
        yield _lost(unlike, "the chunked call")
    if off and not (drawn or buffers or lost or unlike):
        error = trial.chunks(Fused(determinism_check="values"))
        what = "; ".join(map(str, off))
        if isinstance(error, Exception):
            yield Finding(
                "recompute",
                f"{what}; recompute does not give what forward gave: {error}",
                "Let f depend on its arguments alone",
            )
        else:
            yield Finding(
                "unexplained",
                f"{what} between the chunked call and a loop over the chunks",
                "Use strategy='auto' if another is given; else this may be a bug of"
                " chunkcheck's: please report it",
            )


def _listed(names: Sequence[str], chunks: Seen, loop: Seen) -> str:
    found = []
    for name in names:
        after, expected = chunks.state.get(name), loop.state[name]
        if after is not None and expected.numel() == 1:
            found.append(
                f"{name} is {after.item():.6g} instead of {expected.item():.6g}"
            )
        else:
            found.append(f"{name} differs")
    return ", ".join(found)


def _random_remedy(drawn: Sequence[str]) -> str:
    if any(name.startswith("the ") and "torch.Generator" not in name for name in drawn):
        return "Draw from torch, or outside of f"
    if any(name.startswith(("Python", "NumPy")) for name in drawn):
        return "Use strategy=Fused(preserve_python_rng_state=True), or draw from torch"
    return "Use strategy='auto', which replays it"


def _lost(names: Sequence[str], where: str) -> Finding:
    return Finding(
        "lost_gradient",
        f"{' and '.join(names)} gets a gradient from plain f, but not from {where}, or"
        " the other way round",
        "Use strategy='auto', or pass what f captures as an argument, with batch_dim"
        " None",
    )


def _failed(trial: Trial, error: Exception) -> Finding:
    """Explain an error of the chunked call where the loop has none."""
    python = [k for k in trial.plain.moved if k.startswith(("Python", "NumPy", "the "))]
    if "recompute" in str(error) and python:
        return Finding(
            "randomness",
            f"{' and '.join(python)} moves while f runs: {_quoted(error)}",
            _random_remedy(python),
        )
    return _error(error)


def _error(error: Exception) -> Finding:
    text = str(error)
    if re.search(r"expected \d+ rows|0-dimensional", text):
        return Finding("wrong_length", _quoted(error), "Write out_dim as it says")
    if "out_dim is None there" in text:
        return Finding("only_first", _quoted(error), "Write out_dim as it says")
    if "out_dim" in text and "must say" in text:
        return Finding("wrong_dim", _quoted(error), "Write out_dim as it says")
    if "wrote into" in text or "modified by an inplace" in text:
        return Finding("in_place", _quoted(error), "Do it outside of f")
    if "recompute" in text:
        return Finding(
            "recompute", _quoted(error), "Let f depend on its arguments alone"
        )
    return Finding(
        "error",
        f"the chunked call raises {_quoted(error)}",
        "f must take any number of rows, and do nothing that the strategy cannot redo",
    )


def _quoted(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
