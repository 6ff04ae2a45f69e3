"""Tests of `_torch.compat`: the private names are there and mean what we think."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from chunkcheck._torch import compat


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_transforms_active() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(compat.transforms_active())
        return x.sin().sum()

    x = torch.ones(3)
    assert not compat.transforms_active()
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.ones(2, 3))
    torch.func.jvp(f, (x,), (x,))
    with forward_ad.dual_level():
        f(x)
    assert seen == [True] * 4
    assert not compat.transforms_active()


def test_share_storage() -> None:
    for device in ("cpu", "meta"):
        x = torch.ones(4, 2, device=device)
        assert compat.share_storage(x, x[1:])
        assert compat.share_storage(x.split(2)[0], x.split(2)[1])
        assert not compat.share_storage(x, x.clone())
    assert not compat.share_storage(torch.eye(2).to_sparse(), torch.eye(2))


def test_version() -> None:
    x = torch.ones(2)
    before = compat.version(x)
    x[:1].add_(1)
    assert compat.version(x) != before
    with torch.inference_mode():
        assert compat.version(torch.ones(2)) is None
