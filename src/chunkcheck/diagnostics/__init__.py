"""Tools that measure what chunking buys. Importing this package imports torch."""

from chunkcheck._torch.meter import MemoryTrace as MemoryTrace
from chunkcheck._torch.meter import PhaseMemory as PhaseMemory
from chunkcheck._torch.meter import measure_memory as measure_memory
from chunkcheck._torch.meter import phase as phase
from chunkcheck.diagnostics._check import assert_equivalent as assert_equivalent
from chunkcheck.diagnostics._check import check as check
from chunkcheck.diagnostics._profile import profile as profile
from chunkcheck.diagnostics._report import Finding as Finding
from chunkcheck.diagnostics._report import Report as Report
from chunkcheck.diagnostics._result import Profile as Profile
from chunkcheck.diagnostics._rows import ProfileRow as ProfileRow
from chunkcheck.diagnostics._tune import tune as tune

__all__ = [
    "Finding",
    "MemoryTrace",
    "PhaseMemory",
    "Profile",
    "ProfileRow",
    "Report",
    "assert_equivalent",
    "check",
    "measure_memory",
    "phase",
    "profile",
    "tune",
]

for _public in (
    Finding,
    MemoryTrace,
    PhaseMemory,
    Profile,
    ProfileRow,
    Report,
    assert_equivalent,
    check,
    measure_memory,
    phase,
    profile,
    tune,
):
    _public.__module__ = __name__  # what a user can import
del _public
