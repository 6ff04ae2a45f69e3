"""Pitfalls J: hooks of parameters and modules, and saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from chunkcheck import chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_close,
    assert_same_as_plain,
    assert_same_gradients,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
once = strategies(without=("reentrant",))  # whose hooks run once per chunk: documented


def _mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(
        device, torch.float64
    )


def _x(device: torch.device) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)


@once
@sizes
@both_paths
@pytest.mark.parametrize("when", ["before", "after"])
def test_pytorch_81296_parameter_hooks_fire_once(
    strategy: Strategy,
    chunk_size: int | None,
    when: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Hooks registered before or after the call fire once, with the whole gradient."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    leaves = {**dict(mlp.named_parameters()), "leaf": leaf, "x": x}

    def f(x: Tensor) -> Tensor:
        result: Tensor = mlp(mlp(x) + shift)  # each parameter twice
        return result

    expected = run(lambda: f(x), leaves)
    calls: list[tuple[str, str]] = []
    seen: dict[str, Tensor | None] = {}

    def register() -> None:
        for name, tensor in leaves.items():

            def hook(gradient: Tensor, name: str = name) -> None:
                calls.append((name, "hook"))
                seen[f"[{name!r}]"] = gradient.clone()

            def post(_: Tensor, name: str = name) -> None:
                calls.append((name, "post"))

            tensor.register_hook(hook)
            tensor.register_post_accumulate_grad_hook(post)

    def call() -> Tensor:
        if when == "before":
            register()
        y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
        if when == "after":
            register()
        return y

    assert_same_runs(run(call, leaves), expected)
    assert sorted(calls) == sorted((n, k) for n in leaves for k in ("hook", "post"))
    assert_same_gradients(seen, {name: expected.gradients[name] for name in seen})


@once
@sizes
@both_paths
def test_deepspeed_2103_hook_that_changes_a_gradient(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """What a hook makes of the whole gradient, not linear here, is what arrives."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    for tensor in (*mlp.parameters(), x, leaf, *([shift] if history else [])):
        tensor.register_hook(lambda gradient: gradient / gradient.norm())
    assert_same_as_plain(
        lambda x: mlp(x + shift),
        (x,),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=(mlp, leaf),
    )


@once
@sizes
@both_paths
def test_deepspeed_2103_optimizer_step_inside_the_hook(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A step taken as soon as a gradient is there, and set free, is the right one."""
    mlp, x = _mlp(device), _x(device)
    _, shift = capture(device, history=history)
    start = {name: p.detach().clone() for name, p in mlp.named_parameters()}

    def train(model: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        mlp.load_state_dict(start)
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in mlp.parameters()}

        def step(p: Tensor) -> None:
            steps[p].step()  # type: ignore[index]
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in mlp.parameters()]
        for _ in range(3):
            backward(model(x).sin().sum())
        for handle in handles:
            handle.remove()
        assert all(p.grad is None for p in mlp.parameters())
        return {name: p.detach().clone() for name, p in mlp.named_parameters()}

    def f(x: Tensor) -> Tensor:
        result: Tensor = mlp(x + shift)
        return result

    expected = train(f)
    assert all(not torch.equal(start[n], p) for n, p in expected.items() if p.numel())  # type: ignore[arg-type, union-attr]
    got = train(
        lambda x: chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    )
    assert_same_gradients(got, expected)


@strategies(without=("own_checkpoint",))  # which stops its recompute early
@both_paths
def test_pytorch_134310_module_hooks_run_again_in_recompute(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Forward hooks of a module run once per chunk, and once more in its recompute."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)
    counts = {"pre": 0, "forward": 0, "backward": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[name] += 1

        return hook

    # One that changes what is computed: it must do so in the recompute, too.
    mlp[0].register_forward_hook(lambda _module, _args, result: result * 2)
    handles = [
        mlp[2].register_forward_pre_hook(count("pre")),
        mlp[2].register_forward_hook(count("forward")),
        mlp[2].register_full_backward_hook(count("backward")),
    ]
    run(
        lambda: chunk_and_checkpoint(
            lambda x: mlp(x + shift), x, chunk_size=2, strategy=strategy
        ),
        x,
    )
    forwards = 3 if strategy == "none" else 6
    assert counts == {"pre": forwards, "forward": forwards, "backward": 3}
    for handle in handles:
        handle.remove()
    assert_same_as_plain(
        lambda x: mlp(x + shift),
        (x,),
        chunk_size=2,
        strategy=strategy,
        captured=(mlp, leaf),
    )


@strategies()
@sizes
@both_paths
@pytest.mark.parametrize("place", ["around", "inside", "both"])
def test_pytorch_70134_nested_save_on_cpu(
    strategy: Strategy,
    chunk_size: int | None,
    place: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """save_on_cpu and chunks commute: both nestings give the right gradients."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = mlp(x + shift)
        return result

    def f_on_cpu(x: Tensor) -> Tensor:
        with save_on_cpu():
            return f(x)

    leaves = (mlp, x, leaf)
    expected = run(lambda: f(x), leaves)

    def call() -> Tensor:
        inner = f if place == "around" else f_on_cpu
        context = save_on_cpu() if place != "inside" else torch.enable_grad()
        with context:
            return chunk_and_checkpoint(
                inner, x, chunk_size=chunk_size, strategy=strategy
            )

    assert_same_runs(run(call, leaves), expected)


def _scaling_hooks(calls: list[str]) -> AbstractContextManager[Any]:
    def pack(tensor: Tensor) -> Tensor:
        calls.append("pack")
        return tensor.detach() * 2

    def unpack(tensor: Tensor) -> Tensor:
        calls.append("unpack")
        return tensor / 2

    return saved_tensors_hooks(pack, unpack)


@strategies()
@sizes
@both_paths
def test_pytorch_70932_hooks_inside_f_win_over_ours(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Hooks within `f` pack what `f` saves, and unpack it in backward."""
    x = _x(device)
    leaf, shift = capture(device, history=history)
    calls: list[str] = []

    def f(x: Tensor) -> Tensor:
        with _scaling_hooks(calls):
            hidden = (x + shift).exp() * x
        return hidden.sin()

    assert_same_as_plain(
        f, (x,), chunk_size=chunk_size, strategy=strategy, captured=leaf
    )
    assert {"pack", "unpack"} == set(calls)


@strategies(without=("non_reentrant", "reentrant", "none", "own_checkpoint"))
@both_paths
def test_pytorch_70932_hooks_around_see_the_arguments_once(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """Hooks around the call see each argument once, and no activation."""
    mlp, x, table = _mlp(device), _x(device), _x(device)
    leaf, shift = capture(device, history=history)
    packed: list[int] = []
    storages = {t.untyped_storage().data_ptr() for t in (x, table)}

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.untyped_storage().data_ptr())
        return tensor

    def call() -> Tensor:
        def f(x: Tensor, table: Tensor) -> Tensor:
            result: Tensor = mlp(x + shift) * table.sum()
            return result

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return chunk_and_checkpoint(
                f,
                x,
                table,
                chunk_size=2,
                batch_dim=(0, None),
                strategy=strategy,
            )

    run(call, (mlp, x, table, leaf))
    of_arguments = [p for p in packed if p in storages]
    assert sorted(of_arguments) == sorted(storages)
    assert len(packed) - len(of_arguments) <= 2  # of no size: markers of ours


class TwiceReading(torch.autograd.Function):
    """Reads its saved tensors twice, as fused kernels' Functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0]
        y = ctx.saved_tensors[1]
        again, _ = ctx.saved_tensors
        assert_close(again, x, "again")
        return gradient * y, gradient * x


# torch's non-reentrant checkpoint raises at the second reading.
@strategies(without=("non_reentrant", "own_checkpoint"))
@sizes
@both_paths
def test_pytorch_82156_saved_tensors_read_twice(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A custom Function may read `ctx.saved_tensors` as often as it likes."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = TwiceReading.apply(mlp(x).exp(), x + shift)  # type: ignore[no-untyped-call]
        return result.sin()

    assert_same_as_plain(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=(mlp, leaf)
    )


@strategies(without=("non_reentrant", "own_checkpoint", "reentrant"))
@both_paths
def test_mamba_1021_saved_tensors_read_twice_in_each_of_two_backwards(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """So it may with retain_graph, in each backward."""
    x = _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        result: Tensor = TwiceReading.apply(x.exp(), x + shift)  # type: ignore[no-untyped-call]
        return result

    def two(y: Tensor) -> dict[str, Tensor | None]:
        x.grad = leaf.grad = None
        backward(y.sum(), retain_graph=True)
        backward(y.sin().sum())
        return {"x": x.grad, "leaf": leaf.grad}

    expected = two(f(x))
    got = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    assert_same_gradients(two(got), expected)


@once
@sizes
@both_paths
def test_deepspeed_2103_hooks_on_results_and_inside_f(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """A hook on the result fires once; one that `f` hangs on its rows acts on them."""
    mlp, x = _mlp(device), _x(device)
    leaf, shift = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        hidden = mlp(x + shift)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        result: Tensor = hidden.sin()
        return result

    calls: list[torch.Size] = []
    source = _x(device)  # a hook on `x` itself would stay there after plain `f`

    def call(*, whole: bool) -> Tensor:
        given = source * 1 + x * 0
        y = (
            f(given)
            if whole
            else chunk_and_checkpoint(
                f, given, chunk_size=chunk_size, strategy=strategy
            )
        )
        y.register_hook(lambda gradient: calls.append(gradient.shape))
        return y

    leaves = (source, mlp, leaf)
    expected = run(lambda: call(whole=True), leaves)
    assert_same_runs(run(lambda: call(whole=False), leaves), expected)
    assert calls == [torch.Size((5, 4))] * 2
