"""Pitfalls G: writing in place, views, and memory formats."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn import functional

from chunkcheck import chunk_and_checkpoint
from reference import (
    Strategy,
    assert_close,
    assert_same_as_plain,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
CHANGED = r"modified (by an )?inplace"
# Up to 2.9 an error that leaves torch's checkpoint, in a user's strategy too, leaves
# saved-tensor hooks behind as long as it lives.
raising = strategies(without=("own_checkpoint",))


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 4), dtype=torch.float64, device=device, requires_grad=True
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@strategies()
@sizes
def test_pytorch_36383_inplace_relu_on_view_inside(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """A result that is an in-place modified view inside `f` keeps its gradients."""
    linear = nn.Linear(4, 6).to(device, torch.float64)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = linear(x)
        view = hidden[:, 1:4]
        functional.relu_(view)
        other = (hidden * 2).view(-1, 2, 3).mT
        return view, other.mul_(hidden.sum(1)[:, None, None])

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=linear
    )


@strategies()
@sizes
def test_pytorch_26546_result_written_in_place_by_the_caller(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """The caller may write to the result, and to views of it, before backward."""
    x = _x(device)

    def model(*, whole: bool) -> Tensor:
        y = (
            _sigmoid(x)
            if whole
            else chunk_and_checkpoint(
                _sigmoid, x, chunk_size=chunk_size, strategy=strategy
            )
        )
        y[:, :2].mul_(y.detach()[:, 2:].clone())
        y[1:].add_(1.5)
        return y.mul_(2)

    expected = run(lambda: model(whole=True), x)
    assert_same_runs(run(lambda: model(whole=False), x), expected)


def _sigmoid(x: Tensor) -> Tensor:
    return x.sin() * x.sigmoid() + 0.0


@strategies()
@sizes
@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_pytorch_56093_identity_output_does_not_alias_input(
    strategy: Strategy,
    chunk_size: int | None,
    *,
    grad_mode: bool,
    requires_grad: bool,
    device: torch.device,
) -> None:
    """A result is never its input nor a view of it; writing to it changes no input."""
    x = _x(device).requires_grad_(requires_grad)
    whole = _x(device, 3).requires_grad_(requires_grad)
    before = [x.detach().clone(), whole.detach().clone()]

    def f(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x, x[:, 1:], whole, whole[:2]

    with torch.set_grad_enabled(grad_mode):
        got = chunk_and_checkpoint(
            f,
            x,
            whole,
            chunk_size=chunk_size,
            batch_dim=(0, None),
            out_dim=(0, 0, None, None),
            strategy=strategy,
        )
    assert not {_storage(t) for t in got} & {_storage(x), _storage(whole)}
    for t in got:
        assert t.requires_grad == (grad_mode and requires_grad)
        t.mul_(3)
    assert_close(x, before[0], "x")
    assert_close(whole, before[1], "whole")
    for t, expected in zip(got, f(*before), strict=True):
        assert_close(t, expected * 3, "result")
    if got[0].requires_grad:
        torch.autograd.backward([t.sum() for t in got[:2]])
        assert x.grad is not None
        wanted = torch.full_like(x, 6.0)
        wanted[:, 0] = 3
        assert_close(x.grad, wanted, "x.grad")


@strategies()
@sizes
def test_pytorch_73604_identity_output_has_the_gradients_of_plain(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """`f` may return its argument itself: gradients and values are those of plain."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x * y, y

    assert_same_as_plain(
        f, (_x(device), _x(device)), chunk_size=chunk_size, strategy=strategy
    )


@strategies(without=("non_reentrant", "reentrant", "own_checkpoint"))
@sizes
def test_bitsandbytes_2034_captured_weight_changed_detected(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """A captured weight that is changed between forward and backward is an error."""
    weight = _x(device, 4, 4)
    y = chunk_and_checkpoint(
        lambda x: x @ weight, _x(device), chunk_size=chunk_size, strategy=strategy
    )
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        backward(y.sum())


@strategies()
@sizes
@pytest.mark.parametrize("changed", ["x", "weight"])
def test_bitsandbytes_2034_changed_argument_detected(
    strategy: Strategy, chunk_size: int | None, changed: str, device: torch.device
) -> None:
    """An argument, chunked or whole, that is changed before backward is an error."""
    x, weight = _x(device), _x(device, 4, 4)
    y = chunk_and_checkpoint(
        torch.matmul,
        x,
        weight,
        chunk_size=chunk_size,
        batch_dim=(0, None),
        strategy=strategy,
    )
    with torch.no_grad():
        {"x": x, "weight": weight}[changed].mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        backward(y.sum())


@raising
@sizes
@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("place", ["chunked", "whole"])
def test_functorch_565_f_mutates_its_input(
    strategy: Strategy,
    chunk_size: int | None,
    *,
    grad_mode: bool,
    place: str,
    device: torch.device,
) -> None:
    """`f` that writes to its argument is an error that names the path and the rows."""
    weight = _x(device, 4)

    def f(x: Tensor, pair: dict[str, Tensor]) -> Tensor:
        (x if place == "chunked" else pair["w"]).mul_(2)
        return (x + pair["w"]) * weight

    args = (_x(device).detach(), {"w": _x(device, 4).detach()})
    path = r"args\[0\]" if place == "chunked" else r"args\[1\]\['w'\]"
    with (
        nullcontext() if grad_mode else torch.no_grad(),
        pytest.raises(RuntimeError, match=path) as caught,
    ):
        chunk_and_checkpoint(
            f, *args, chunk_size=chunk_size, batch_dim=(0, None), strategy=strategy
        )
    assert f"rows 0:{chunk_size or 5} of 5" in str(caught.value)


@raising
@sizes
def test_functorch_565_f_mutates_a_chunk_that_requires_grad(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """So it is, by torch itself, if the argument requires grad; and nothing changes."""
    x = _x(device)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match=r"inplace|in-place") as caught:
        chunk_and_checkpoint(
            lambda x: x.mul_(2), x, chunk_size=chunk_size, strategy=strategy
        )
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert f"rows 0:{chunk_size or 5} of 5" in notes + str(caught.value)
    assert torch.equal(x, before)


@strategies()
@sizes
def test_functorch_565_f_may_write_to_what_it_made(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """In-place changes of `f`'s own tensors are recomputed from unchanged data."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        z += 1
        z.sin_().mul_(x)
        copy = y.clone()
        copy[:, 0] = z[:, 1]
        return copy * z

    assert_same_as_plain(
        f, (_x(device), _x(device)), chunk_size=chunk_size, strategy=strategy
    )


@strategies()
@sizes
@pytest.mark.parametrize("dims", [4, 5])
def test_pytorch_48439_channels_last_chunks(
    strategy: Strategy, chunk_size: int | None, dims: int, device: torch.device
) -> None:
    """Chunks of a channels-last tensor are channels-last, and nothing is copied."""
    layout = torch.channels_last if dims == 4 else torch.channels_last_3d
    conv = (nn.Conv2d if dims == 4 else nn.Conv3d)(3, 2, 2)
    conv.to(device, torch.float64)
    leaf = _x(device, 5, 3, *(4,) * (dims - 2))
    x = leaf.contiguous(memory_format=layout)
    seen: list[bool] = []

    def f(x_: Tensor) -> Tensor:
        seen.append(x_.is_contiguous(memory_format=layout))
        seen.append(_storage(x_) == _storage(x))
        result: Tensor = conv(x_).detach() * 2 + conv(x_)
        return result

    x = x.detach().requires_grad_()
    assert_same_as_plain(
        f, (x,), chunk_size=chunk_size, strategy=strategy, captured=conv
    )
    assert all(seen)


@strategies()
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "flipped"])
def test_pytorch_48439_views_are_cut_without_a_copy(
    strategy: Strategy, layout: str, device: torch.device
) -> None:
    """Transposed, expanded and strided arguments are cut as views, not copied whole."""
    base = _x(device, 4, 10)
    x = {
        "transposed": lambda: base.mT,
        "expanded": lambda: base[:1, :1].expand(5, 4),
        "strided": lambda: base.mT[::2],
        "flipped": lambda: base[:, :5].mT,
    }[layout]()
    shared: list[bool] = []

    def f(chunk: Tensor) -> Tensor:
        shared.append(_storage(chunk) == _storage(base))
        return chunk.sin() * chunk

    assert_same_as_plain(f, (x,), chunk_size=2, strategy=strategy, captured=base)
    assert shared
    assert all(shared)


@strategies()
@sizes
@pytest.mark.parametrize("batch_dim", [1, -2])
def test_pytorch_48439_chunk_is_as_contiguous_as_its_whole(
    strategy: Strategy, chunk_size: int | None, batch_dim: int, device: torch.device
) -> None:
    """An `f` that calls `.view` works in chunks of a later dim, if it works whole."""

    def f(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.view(-1).sin().view(x.shape) * x.view(2, -1).sum()[None] ** 0

    assert_same_as_plain(
        f,
        (_x(device, 2, 5, 3),),
        chunk_size=chunk_size,
        batch_dim=batch_dim,
        out_dim=1,
        strategy=strategy,
    )
