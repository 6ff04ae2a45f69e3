"""Tools that measure what chunking buys. Importing this package imports torch."""

from chunkcheck.diagnostics._memory import MemoryTrace as MemoryTrace
from chunkcheck.diagnostics._memory import PhaseMemory as PhaseMemory
from chunkcheck.diagnostics._memory import measure_memory as measure_memory
from chunkcheck.diagnostics._memory import phase as phase

__all__ = ["MemoryTrace", "PhaseMemory", "measure_memory", "phase"]

for _public in (MemoryTrace, PhaseMemory, measure_memory, phase):
    _public.__module__ = __name__  # what a user can import
del _public
