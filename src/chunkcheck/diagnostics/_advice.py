"""Owns the advice of a profile: whether chunking pays, in words.

Knows rows and bytes. Knows nothing of how they were measured, nor of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkcheck.diagnostics._rows import ProfileRow, knee, size_text

_LITTLE = 0.75  # a total above this part of the whole batch's is hardly less
_EASY = 0.1  # a peak below this part of the free memory fits without ado
_SLOW = 1.5  # this much slower than the knee is too slow ...
_SAME = 0.75  # ... for a peak above this part of the knee's


def reference(rows: Sequence[ProfileRow]) -> ProfileRow | None:
    """Return the row whose time is the unit: the first that has run."""
    return next((row for row in rows if row.costs is not None), None)


def advise(
    rows: Sequence[ProfileRow],
    batch: int,
    *,
    backward: bool,
    given_bytes: int,
    floor_bytes: int,
    free_bytes: int | None,
) -> str:
    """Say which chunk size to take, or why none.

    Args:
        rows: All rows, those of the whole batch first.
        batch: The rows of the batch.
        backward: Whether backward was run.
        given_bytes: The bytes of what is there before: arguments and the gradients of
            the results.
        floor_bytes: The bytes of results and all other gradients.
        free_bytes: What was free on the device, if known.

    """
    said = []
    if not backward:
        said.append("Nothing required a gradient, so that only forward was run.")
    tried = [row for row in rows if row.chunks > 1]
    chunked = [row for row in tried if row.costs is not None]
    whole = next(
        (r for r in rows if r.chunk_size is None and r.costs is not None), None
    )
    if not tried and batch == 1:
        said.append("A batch of one row cannot be chunked.")
    elif not tried:
        said.append(
            f"The batch of {batch:,} rows is one chunk at every size tried, which saves"
            f" nothing: try sizes below {batch:,}."
        )
    elif not chunked:
        said.append("Every chunk size tried ran out of memory: try smaller ones.")
    else:
        said += _on_chunks(rows, chunked, whole, given_bytes, floor_bytes)
    fits = _on_fit(rows, free_bytes)
    return " ".join([*said, *fits])


def _on_chunks(
    rows: Sequence[ProfileRow],
    chunked: Sequence[ProfileRow],
    whole: ProfileRow | None,
    given_bytes: int,
    floor_bytes: int,
) -> list[str]:
    least = min(chunked, key=_peak)
    if whole is not None:
        total = given_bytes + _peak(whole)
        if given_bytes + _peak(least) > _LITTLE * total:
            return [_little(least, whole, total, given_bytes + floor_bytes)]
    star = knee(rows)
    assert star is not None  # noqa: S101  some have run
    unit = reference(rows)
    said = []
    if rows[0].chunk_size is None and rows[0].costs is None:
        who = "The whole batch" if whole is None else "Plain f"
        said.append(f"{who} ran out of memory.")
    several = len({row.strategy for row in chunked}) > 1
    name = f"chunk_size={star.chunk_size}" if star.chunk_size else star.strategy
    if several and star.chunk_size:
        name += f" with strategy {star.strategy}"
    said.append(f"{name} is the knee: {_costs(star, whole, unit)}.")
    if star.chunk_size is None:
        said.append(f"The least is {_costs(least, None, unit)}, with {least}.")
        return said
    return said + _on_small(star, chunked, unit)


def _costs(row: ProfileRow, whole: ProfileRow | None, unit: ProfileRow | None) -> str:
    said = f"a peak of {size_text(_peak(row))}"
    if whole is not None:
        times = _peak(whole) / max(1, _peak(row))
        said += f" in place of {size_text(_peak(whole))} ({times:.1f} times less)"
    if row is unit:
        return said
    return f"{said} for {_ratio(row):.2f} times the time of {unit}"


def _little(least: ProfileRow, whole: ProfileRow, total: int, fixed: int) -> str:
    saved = max(0, _peak(whole) - _peak(least))
    said = "Chunking does not pay here: it saves "
    if saved:
        said += (
            f"at most {size_text(saved)} of the {size_text(total)} that {whole} and its"
            f" arguments take ({saved / total:.0%}), with chunk_size={least.chunk_size}"
        )
    else:
        said += f"nothing of the {size_text(total)} that {whole} and its arguments take"
    between = max(0, total - fixed)
    if 2 * between > fixed:
        return said + "."
    return (
        f"{said}, since the intermediates ({size_text(between)}) are small against"
        f" arguments, results and gradients ({size_text(fixed)})."
    )


def _on_small(
    star: ProfileRow, chunked: Sequence[ProfileRow], unit: ProfileRow | None
) -> list[str]:
    """Say what chunks smaller than the knee's would do."""
    same = [row for row in chunked if row.strategy == star.strategy]
    last = min(same, key=lambda row: row.chunk_size or 0)
    if last is star:
        if star.chunk_size == 1:
            return []
        return ["No smaller chunks were tried; they may save more."]
    if _ratio(last) > _SLOW * _ratio(star) and _peak(last) > _SAME * _peak(star):
        said = (
            f"Smaller chunks cost more than they save: chunk_size={last.chunk_size}"
            f" takes {_ratio(last):.1f} times the time of {unit} for a peak of"
            f" {size_text(_peak(last))}."
        )
        return [said]
    return []


def _on_fit(rows: Sequence[ProfileRow], free_bytes: int | None) -> list[str]:
    plain = next((r for r in rows if r.strategy == "plain" and r.costs), None)
    if plain is None or not free_bytes or _peak(plain) > _EASY * free_bytes:
        return []
    said = (
        f"Plain f fits as it is: its peak of {size_text(_peak(plain))} is little of the"
        f" {size_text(free_bytes)} that were free, so that chunks are for larger"
        " batches."
    )
    return [said]


def _peak(row: ProfileRow) -> int:
    assert row.peak_bytes is not None  # noqa: S101  it has run
    return row.peak_bytes


def _ratio(row: ProfileRow) -> float:
    assert row.ratio is not None  # noqa: S101  it has run
    return row.ratio
