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
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]  # noqa: SLF001


def version(tensor: torch.Tensor) -> int | None:
    """Return how often the memory of `tensor` was written to; None if not counted.

    Public code sees this number only in the error that it causes.
    """
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001
