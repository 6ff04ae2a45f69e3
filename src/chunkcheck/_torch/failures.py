"""Failures: which errors say that memory ran out.

Knows types and messages of errors, and nothing of what was run.
"""

from __future__ import annotations

import torch

# What torch says where it has no type for it: the CPU's allocator, the libraries of
# matrix products and convolutions, and devices that are split in parts.
_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU and MPS
    "not enough memory: you tried to allocate",
    "can't allocate memory: you tried to allocate",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MIOPEN_STATUS_ALLOC_FAILED",
    "OUT_OF_DEVICE_MEMORY",
    "OUT_OF_HOST_MEMORY",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
)
# Before torch 2.5 it was CUDA's alone.
_TYPE = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, (MemoryError, _TYPE)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(m in text for m in _MESSAGES)
