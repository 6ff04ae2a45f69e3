"""Free: how much memory of a device may still be taken.

Knows devices and the system. Knows nothing of what the memory is for.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

# Limits of a container, which may be below what the machine has (cgroup version 2, 1).
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def free_memory(device: torch.device) -> int:
    """Return the bytes that may still be taken on a device, or of the host's memory.

    What torch's allocator has reserved and does not use counts as free.

    Raises:
        RuntimeError: It cannot be known here.

    """
    if device.type in ("cpu", "meta"):
        return _of_host()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise RuntimeError(
            f"torch does not tell how much memory of {device} is free: give the budget"
            " in bytes"
        )
    free, _ = module.mem_get_info(device)
    reserved = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free + reserved)


def _of_host() -> int:
    found = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # "max", where there is none
            limited = int(Path(limit).read_text()) - int(Path(used).read_text())
            found.append(max(0, limited))
    if not found:
        raise RuntimeError(
            "how much memory is free is known on Linux only: give the budget in bytes"
        )
    return min(found)
