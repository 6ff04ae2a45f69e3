"""Check: whether chunking is right for a function, found out by trying.

Owns the public functions. Knows nothing of what may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from chunkcheck._strategies import Strategy, StrategyName
from chunkcheck._typing import BatchDim, OutDim
from chunkcheck.diagnostics._causes import findings_of
from chunkcheck.diagnostics._report import Report
from chunkcheck.diagnostics._runs import Trial


def check(
    f: Callable[..., Any],
    /,
    *args: Any,
    chunk_size: int,
    batch_dim: BatchDim = 0,
    out_dim: OutDim = "auto",
    strategy: Strategy | StrategyName = "auto",
    kwargs: Mapping[str, object] | None = None,
    rows: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Say whether chunking is right for `f` on a sample, and if not, why.

    Runs plain `f`, the loop over the chunks and the chunked call, forward and backward,
    from the same state; compares results, gradients, buffers and random states; and
    where they differ, finds the cause by further runs. They leave no trace in
    arguments, gradients, buffers, random states, `train()` flags and what `f` holds in
    Python, as far as it is found. Where `f` is random or updates buffers, the oracle is
    the loop.

    A sample shows what happens on it: give it the shapes and values of real data, and
    `requires_grad` where training has it.

    Args:
        f: The function.
        *args: Its positional arguments, as in `chunk_and_checkpoint`: tensors of any
            shape and dtype, and containers of them.
        chunk_size: Rows per chunk; less than the rows of the sample.
        batch_dim: As in `chunk_and_checkpoint`.
        out_dim: As there.
        strategy: As there.
        kwargs: The keyword arguments of `f`.
        rows: Use so many rows of what is cut, the first ones. Default: all.
        rtol: How far two tensors may be apart, relative to the largest entry. Default:
            1e-10 in float64, 1e-5 in float32, 2e-2 below, or what rounding of the
            arguments does if that is more.
        atol: How far they may be apart besides.

    Returns:
        The report: true if nothing was found, and readable by `print`.

    Raises:
        ValueError: There is but one chunk, or sizes and dims do not fit.
        TypeError: An argument is of the wrong kind.
        Exception: Whatever `f(*args)` itself raises.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import check
        >>> x = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
        >>> bool(check(torch.tanh, x, chunk_size=4))
        True
        >>> report = check(lambda x: x.softmax(0), x, chunk_size=4)
        >>> bool(report), report.findings[0].cause
        (False, 'rows_mix')

    """
    options = (chunk_size, batch_dim, out_dim, strategy)
    trial = Trial(f, args, kwargs or {}, options, rows, (rtol, atol))
    try:
        findings = tuple(findings_of(trial))
    finally:
        trial.carried.restore()
    return Report(
        findings,
        getattr(f, "__name__", type(f).__name__),
        sum(isinstance(value, Tensor) for value in trial.plain.values),
        sum(gradient is not None for gradient in trial.plain.gradients.values()),
        trial.largest,
        trial.exact,
    )


def assert_equivalent(f: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """Raise unless chunking is right for `f` on a sample: for tests of your own.

    Args:
        f: The function.
        *args: Its positional arguments.
        **options: Those of `check`.

    Raises:
        AssertionError: Something was found; with the text of the report.

    Example:
        >>> import torch
        >>> from chunkcheck.diagnostics import assert_equivalent
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
        >>> assert_equivalent(model, torch.randn(12, 4), chunk_size=5)

    """
    report = check(f, *args, **options)
    if not report:
        raise AssertionError(str(report))
