"""Pitfalls D: dropout, random states, generators, devices."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from chunkcheck import Fused, NonReentrant, Reentrant, chunk_and_checkpoint
from engine_paths import both_paths, capture
from reference import (
    Strategy,
    assert_close,
    assert_same_as_loop,
    assert_same_gradients,
    loop,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])
# torch's checkpoint replays the default generators alone.
replaying = strategies(without=("non_reentrant", "reentrant", "own_checkpoint"))
fused = pytest.mark.parametrize("strategy", ["auto", "fused"])


def _mlp(device: torch.device) -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).to(device, torch.float64)


def _x(device: torch.device, *, requires_grad: bool = True) -> Tensor:
    x = torch.randn(5, 4, dtype=torch.float64, device=device)
    return x.requires_grad_(requires_grad)


@strategies()
@both_paths
@sizes
def test_pytorch_14253_dropout_mask_replayed(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Masks are those of the loop, and each chunk sees its own again."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)
    assert_same_as_loop(
        lambda x: nn.functional.dropout(mlp(x) * shift, 0.3),
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=[mlp, leaf],
    )


@strategies()
@both_paths
@sizes
def test_pytorch_14253_backward_leaves_the_stream_alone(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Forward moves the stream as the loop does; backward, even twice, does not."""
    _, shift = capture(device, history=history)
    x = _x(device)

    def f(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin() * shift)

    before = torch.get_rng_state()
    expected = loop(f, x, chunk_size=chunk_size)
    after_loop = torch.get_rng_state()
    torch.set_rng_state(before)
    y = chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy)
    assert torch.equal(torch.get_rng_state(), after_loop)
    torch.rand(3)  # what others draw before backward is of no concern
    between = torch.get_rng_state()
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    times = 1 if strategy == "reentrant" else 2
    for left in reversed(range(times)):
        x.grad = torch.zeros_like(x)
        backward(y.sum(), retain_graph=left > 0)
        assert_close(x.grad, wanted, "x.grad")
        assert torch.equal(torch.get_rng_state(), between)


@fused
@sizes
def test_pytorch_14253_a_second_start_draws_the_same(
    strategy: Any, chunk_size: int | None, device: torch.device
) -> None:
    """Where one node for all turns out not to do, all is drawn once more, and once."""
    leaf = _x(device)
    history = leaf * 1
    hidden = weakref.ref(history)  # which no search finds before `f` runs
    generator = torch.Generator(device)
    strategy = Fused(preserve_python_rng_state=True, fall_back=strategy == "auto")

    def f(x: Tensor) -> Tensor:
        captured = hidden()
        assert captured is not None
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        return nn.functional.dropout(x * noise) * captured[0] * random.random()

    def reset() -> None:
        nonlocal history, hidden
        history = -leaf
        hidden = weakref.ref(history)
        generator.manual_seed(3)
        random.seed(3)

    assert_same_as_loop(
        f,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
        state=lambda: (generator.get_state(), random.getstate()),
        reset=reset,
    )


@strategies()
@both_paths
@sizes
def test_olmo_core_828_noise_without_dropout(
    strategy: Strategy, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Noise is replayed by default, though no module of `f` is random."""
    weight, scale = capture(device, history=history)

    def f(x: Tensor) -> Tensor:
        noisy = x + torch.rand_like(x) * scale
        return noisy.pow(2) * torch.randint(3, x.shape[:1], device=x.device)[:, None]

    assert_same_as_loop(
        f, (_x(device),), chunk_size=chunk_size, strategy=strategy, captured=weight
    )


class _Noisy(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return _noisy(x, self.generator)


def _noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x * noise + torch.rand_like(x) * x.sin()


def _place(place: str, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    if place == "module":
        return _Noisy(generator)
    if place == "closure":
        return lambda x: _noisy(x, {"deep": [generator]}["deep"][0])
    if place == "default":

        def default(x: Tensor, *, generator: torch.Generator = generator) -> Tensor:
            return _noisy(x, generator)

        return default
    holder = _Noisy(generator)
    hidden = weakref.ref(holder)  # into which no search looks
    _ALIVE.append(holder)

    def given(x: Tensor) -> Tensor:
        found = hidden()
        assert found is not None
        return _noisy(x, found.generator)

    return given


_ALIVE: list[object] = []


@replaying
@both_paths
@sizes
@pytest.mark.parametrize("place", ["module", "closure", "default", "given"])
def test_pytorch_25104_explicit_generator_replayed(
    strategy: Any,
    chunk_size: int | None,
    place: str,
    *,
    history: bool,
    device: torch.device,
) -> None:
    """Generators that `f` holds, or that the strategy is given, are replayed."""
    generator = torch.Generator(device)
    noisy = _place(place, generator)
    leaf, shift = capture(device, history=history)
    if place == "given" and strategy != "none":
        strategy = Fused(generators=(generator,), fall_back=strategy == "auto")
    assert_same_as_loop(
        lambda x: noisy(x) * shift,
        (_x(device),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=leaf,
        state=generator.get_state,
        reset=lambda: generator.manual_seed(3),
    )


@replaying
@both_paths
def test_pytorch_25104_generator_as_an_argument(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """A generator among the arguments is found as well."""
    generator = torch.Generator(device)
    leaf, shift = capture(device, history=history)
    x = _x(device)

    def f(x: Tensor, options: dict[str, torch.Generator]) -> Tensor:
        return _noisy(x, options["generator"]) * shift

    def call() -> Tensor:
        named = {"generator": generator}
        return chunk_and_checkpoint(f, x, named, chunk_size=2, strategy=strategy)

    def in_loop() -> Any:
        named = {"generator": generator}
        return loop(lambda x: f(x, named), x, chunk_size=2)

    found = []
    for either in (in_loop, call):
        torch.manual_seed(5)
        generator.manual_seed(3)
        found.append((run(either, [x, leaf]), generator.get_state()))
    (expected, state_of_loop), (got, state) = found
    assert_same_gradients(got.gradients, expected.gradients)
    assert torch.equal(state, state_of_loop)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
@strategies(without=["own_checkpoint"])  # torch.compile traces a user's own
@both_paths
def test_deepspeed_6811_dropout_under_compile(
    strategy: Strategy, *, history: bool, device: torch.device
) -> None:
    """In a compiled caller the masks of recompute are those of forward."""
    mlp = _mlp(device)
    leaf, shift = capture(device, history=history)
    x = _x(device)

    def f(x: Tensor) -> Tensor:
        result: Tensor = mlp(x) * shift
        return result

    def caller(x: Tensor) -> Tensor:
        return chunk_and_checkpoint(f, x * 2, chunk_size=2, strategy=strategy) + 1

    torch._dynamo.reset()
    compiled = torch.compile(caller, backend="aot_eager")
    torch.manual_seed(5)
    expected = run(lambda: loop(f, x * 2, chunk_size=2) + 1, [x, mlp, leaf])
    torch.manual_seed(5)
    got = run(lambda: compiled(x), [x, mlp, leaf])
    assert_same_gradients(got.gradients, expected.gradients)


@pytest.mark.parametrize("option", [Fused, NonReentrant, Reentrant])
@both_paths
@sizes
def test_pytorch_162504_preserve_rng_state_may_be_off(
    option: Any, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """Without it no state is set back: recompute goes on with the stream."""
    _, shift = capture(device, history=history)
    x = _x(device)
    drawn: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        drawn.append(torch.rand(3, device=x.device))
        return x.sin() * shift

    strategy = option(preserve_rng_state=False)
    torch.manual_seed(5)
    backward(chunk_and_checkpoint(f, x, chunk_size=chunk_size, strategy=strategy).sum())
    state = torch.get_rng_state()
    torch.manual_seed(5)
    expected = [torch.rand(3, device=device) for _ in drawn]
    assert torch.equal(torch.stack(drawn), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), state)


def _drawn_by_others(x: Tensor, shift: Tensor) -> Tensor:
    scale = random.gauss(1.0, 1.0) + float(np.random.rand())  # noqa: NPY002
    return x.sin() * scale * shift


def _others() -> object:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(keys).tobytes(), rest


@fused
@both_paths
@sizes
def test_finding_6_python_and_numpy_randomness_on_request(
    strategy: Any, chunk_size: int | None, *, history: bool, device: torch.device
) -> None:
    """`random` and `numpy.random` as tensor data are replayed if asked for."""
    leaf, shift = capture(device, history=history)

    def reset() -> None:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    def check(options: Any) -> None:
        assert_same_as_loop(
            lambda x: _drawn_by_others(x, shift),
            (_x(device),),
            chunk_size=chunk_size,
            strategy=options,
            captured=leaf,
            state=_others,
            reset=reset,
        )

    fall_back = strategy == "auto"
    check(Fused(preserve_python_rng_state=True, fall_back=fall_back))
    with pytest.raises(AssertionError):
        check(strategy)
