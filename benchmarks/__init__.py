"""Benchmarks: what chunkcheck takes in memory and time, beside the alternatives.

`nox -s bench` runs them all, `python -m benchmarks --help` says what else there is.
Only the modules that show results need more than torch.
"""
