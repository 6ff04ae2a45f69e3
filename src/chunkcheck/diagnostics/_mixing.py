"""Mixing: whether the rows of a chunk depend on those of others, and what mixes them.

Knows runs and plans. Knows nothing of strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chunkcheck._plan import Join
from chunkcheck._torch.tensors import is_tensor
from chunkcheck._tree import flatten
from chunkcheck.diagnostics._report import (
    Finding,
    Seen,
    cotangent,
    distance,
    rtol_of,
)
from chunkcheck.diagnostics._runs import Trial

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(trial: Trial) -> list[str]:
    """Return the batch norms that use the statistics of their batch."""
    found: dict[int, str] = {}
    for root in trial.reached.modules:
        for name, m in root.named_modules(prefix=type(root).__name__):
            if isinstance(m, _BATCH_NORMS) and (m.training or m.running_mean is None):
                found.setdefault(id(m), name)
    return list(found.values())


def rows_mix(trial: Trial, seen: str) -> Finding:
    norms = batch_norms(trial)
    if norms:
        message = (
            f"{' and '.join(norms)} in training normalize over the rows of a chunk"
        )
        remedy = "Call .eval() on them, or use GroupNorm or LayerNorm"
    else:
        message = "what f gives for a row depends on the other rows, or on their number"
        remedy = (
            "Do what takes all rows (softmax, sort, cumsum, x.mean(0)) outside of f"
        )
    return Finding("rows_mix", f"{message}: {seen}" if seen else message, remedy)


def mixing(trial: Trial, joins: Sequence[Join]) -> str:
    """Say how the rows of one chunk are seen to depend on those of another."""
    last = len(trial.plan) - 1
    dims = zip(trial.values, trial.plan.dims, strict=True)
    floating = [k for k, (v, d) in enumerate(dims) if d is not None and _floats(v)]
    # With other values, f might draw other numbers, as where it routes rows to experts.
    if trial.plain.moved and floating and torch.is_grad_enabled():
        return _by_gradient(trial, joins, floating, 0) or _by_gradient(
            trial, joins, floating, last
        )
    return _by_change(trial, joins, 0) or _by_change(trial, joins, last)


def _by_change(trial: Trial, joins: Sequence[Join], block: int) -> str:
    """Change the rows of one chunk, and look at the results of all others."""
    start, stop = trial.plan.bounds(block)
    values = [
        v if dim is None else _with_other_rows(v, dim, start, stop)
        for v, dim in zip(trial.values, trial.plan.dims, strict=True)
    ]
    try:
        changed = trial.run(trial.call.invoke, values, backward=False)
    except Exception:  # noqa: BLE001  f need not take such rows
        return ""
    keep = _others(trial, block)
    seen = (_rows_of(s, joins, keep, trial.plan.rows) for s in (changed, trial.plain))
    off = trial.differing(*seen)
    rows = f"{trial.plan.describe(block)} of the arguments"
    return f"changing {rows} changes others of the result: {off[0]}" if off else ""


def _by_gradient(
    trial: Trial, joins: Sequence[Join], floating: Sequence[int], block: int
) -> str:
    """See whether a gradient of the other chunks' rows reaches those of one chunk."""

    def gradients(given: list[Any]) -> object:
        leaves, _ = flatten(trial.call.invoke(given))
        pairs = zip(leaves, joins, strict=True)
        parts: list[Any] = [
            v.index_select(j.dim, keep.to(v.device))
            for v, j in pairs
            if j.dim is not None and is_tensor(v) and v.requires_grad
        ]
        cotangents = [cotangent(part, 0, 0) for part in parts]
        inputs = [given[k] for k in floating]
        return torch.autograd.grad(
            parts, inputs, cotangents, retain_graph=True, materialize_grads=True
        )

    keep = _others(trial, block)
    values = list(trial.values)
    for k in floating:
        values[k] = values[k].detach().requires_grad_()
    try:
        seen = trial.run(gradients, values, backward=False)
    except Exception:  # noqa: BLE001  f need not be differentiable
        return ""
    start, stop = trial.plan.bounds(block)
    for k, found in zip(floating, seen.values, strict=True):
        dim = trial.plan.dims[k]
        if is_tensor(found) and dim is not None:
            _, off = distance(part := found.narrow(dim, start, stop - start), part)
            _, scale = distance(found, found)
            if off > rtol_of(found.dtype) * scale:
                return (
                    f"gradients of the other rows of the result reach"
                    f" {trial.plan.describe(block)} of {trial.call.paths[k]}, of up to"
                    f" {off:.2g} where all go up to {scale:.2g}"
                )
    return ""


def _floats(value: Any) -> bool:
    return bool(value.is_floating_point() or value.is_complex())


def _others(trial: Trial, block: int) -> Tensor:
    start, stop = trial.plan.bounds(block)
    return torch.cat([torch.arange(start), torch.arange(stop, trial.plan.rows)])


def _with_other_rows(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Return a copy in which some rows are others, from the far end."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    other = torch.flip(tensor.detach(), (dim,)).narrow(dim, start, stop - start)
    found.narrow(dim, start, stop - start).copy_(other)
    return found.requires_grad_(tensor.requires_grad)


def _rows_of(seen: Seen, joins: Sequence[Join], keep: Tensor, rows: int) -> Seen:
    """Return some rows of what is joined, and nothing else."""
    found = [
        (path, v.index_select(j.dim, keep.to(v.device)))
        for path, v, j in zip(seen.paths, seen.values, joins, strict=True)
        if is_tensor(v) and j.dim is not None and v.shape[j.dim : j.dim + 1] == (rows,)
    ]
    return Seen(seen.tree, tuple(p for p, _ in found), [v for _, v in found])
