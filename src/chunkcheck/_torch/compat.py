"""The private names of torch that we use, each with the reason why no public one does.

Nothing else in the library may touch a private name of torch's, but for the pytree
registry (`_tree`) and the profiler's event tree (`diagnostics`).
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is open.

    torch has no public test for either.
    """
    return bool(
        torch._C._are_functorch_transforms_active()  # noqa: SLF001
        or forward_ad._current_level >= 0  # noqa: SLF001
    )


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory, also for those that have no data pointer.

    `untyped_storage().data_ptr()` is 0 for meta and fake tensors, and an error for
    sparse ones.
    """
    return bool(torch._C._is_alias_of(a, b))  # noqa: SLF001


def is_inference(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made in inference mode; not known under torch.compile."""
    return not torch.compiler.is_compiling() and tensor.is_inference()


def version(tensor: torch.Tensor) -> int | None:
    """Return how often the memory of `tensor` was written to; None if not counted.

    Public code sees this number only in the error that it causes.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version  # noqa: SLF001
