"""Tests of `_torch.failures` and `_torch.free`: memory that ran out, or is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chunkcheck._torch import free
from chunkcheck._torch.failures import is_out_of_memory
from chunkcheck._torch.free import free_memory

OUT_OF_MEMORY: list[BaseException] = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    *map(
        RuntimeError,
        [
            "CUDA out of memory. Tried to allocate 20.00 MiB",
            "CUDA error: out of memory",
            "HIP out of memory. Tried to allocate 1.00 GiB (GPU 0)",
            "XPU out of memory. Tried to allocate 1.00 GiB",
            "MPS backend out of memory (MPS allocated: 9.06 GB)",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:830",
            "UR backend failed: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 B",
            "DefaultCPUAllocator: not enough memory: you tried to allocate 40 bytes",
        ],
    ),
]
OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("out of memory"),  # a user's own
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: repr(e)[:60])
def test_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_something_else_failed(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_allocator_of_the_cpu() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_free_memory_of_the_host() -> None:
    assert 0 < free_memory(torch.device("cpu")) < 2**50


def test_a_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("5000\n")
    used.write_text("2000\n")
    monkeypatch.setattr(free, "_LIMITS", [(str(limit), str(used))])
    assert free_memory(torch.device("cpu")) == 3000
    limit.write_text("max\n")
    assert free_memory(torch.device("cpu")) > 3000


class Device:
    """Stands for the module of an accelerator."""

    @staticmethod
    def mem_get_info(_: torch.device) -> tuple[int, int]:
        return 1000, 9000

    @staticmethod
    def memory_reserved(_: torch.device) -> int:
        return 500

    @staticmethod
    def memory_allocated(_: torch.device) -> int:
        return 200


def test_what_an_allocator_has_reserved_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: Device)
    assert free_memory(torch.device("cuda")) == 1300


def test_a_device_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: object)
    with pytest.raises(RuntimeError, match="give the budget in bytes"):
        free_memory(torch.device("mps"))
