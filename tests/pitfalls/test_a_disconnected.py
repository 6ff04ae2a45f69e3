"""Pitfalls A: gradients that are None or disconnected.

`pitfalls.md` in the research notes lists the reports; each test is named after its own.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from chunkcheck import chunk_and_checkpoint
from reference import (
    Counted,
    Strategy,
    assert_same,
    assert_same_as_plain,
    assert_same_runs,
    run,
    strategies,
)

sizes = pytest.mark.parametrize("chunk_size", [2, None], ids=["ragged", "single"])


def _mlp(device: torch.device, features: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, features)).to(
        device, torch.float64
    )


def _x(
    device: torch.device, *, requires_grad: bool, shape: tuple[int, ...] = (5, 4)
) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=device).requires_grad_(
        requires_grad
    )


@strategies()
@sizes
def test_pytorch_7617_only_params_require_grad(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """The result requires grad if parameters alone do, and they get their gradients."""
    mlp = _mlp(device)
    got = assert_same_as_plain(
        mlp,
        (_x(device, requires_grad=False),),
        chunk_size=chunk_size,
        strategy=strategy,
        captured=mlp,
    )
    assert isinstance(got.result, Tensor)
    assert got.result.requires_grad
    assert all(got.gradients[f"['captured'].{n}"] is not None for n in mlp.state_dict())


@strategies()
@sizes
def test_pytorch_6884_no_warning_and_no_requires_grad_on_data(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Data need no `requires_grad_()`, and there is no warning, whatever is trained."""
    mlp = _mlp(device)
    x = _x(device, requires_grad=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trained in (True, False):
            mlp.requires_grad_(trained)
            run(
                lambda: chunk_and_checkpoint(
                    mlp, x, chunk_size=chunk_size, strategy=strategy
                ),
                mlp,
            )
    # torch 2.4 itself warns in every backward of its checkpoint.
    ours = [w for w in caught if "torch.cpu.amp.autocast" not in str(w.message)]
    assert ours == []
    assert x.requires_grad is False


@strategies()
def test_pytorch_6884_nothing_requires_grad_keeps_nothing(
    strategy: Strategy, device: torch.device
) -> None:
    """If nothing requires grad the result does not, and `f` runs once a chunk."""
    mlp = _mlp(device).requires_grad_(requires_grad=False)
    f = Counted(mlp)
    x = _x(device, requires_grad=False)
    y = chunk_and_checkpoint(f, x, chunk_size=2, strategy=strategy)
    assert_same(y, mlp(x))
    assert y.grad_fn is None
    assert f.rows == [2, 2, 1]


@strategies()
@sizes
def test_fairseq_3583_first_block_is_trained(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """A chunked first block, fed with integers, is trained as the rest is."""
    first = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)).to(device, torch.float64)
    rest = _mlp(device)
    tokens = torch.randint(7, (5, 3), device=device)

    def model(*, whole: bool) -> Tensor:
        hidden: Tensor = (
            first(tokens)
            if whole
            else chunk_and_checkpoint(
                first, tokens, chunk_size=chunk_size, strategy=strategy
            )
        )
        result: Tensor = rest(hidden)
        return result

    expected = run(lambda: model(whole=True), (first, rest))
    got = run(lambda: model(whole=False), (first, rest))
    assert_same_runs(got, expected)
    assert None not in got.gradients.values()


@strategies()
@sizes
def test_fairscale_701_nested_list_tuple_args(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Tensors in nested lists, tuples and dicts, in and out, all get gradients."""

    def f(
        nested: list[Tensor | tuple[Tensor, ...]], named: dict[str, list[Tensor]]
    ) -> list[tuple[Tensor, ...] | dict[str, Tensor]]:
        first, second = nested
        assert isinstance(first, Tensor)
        assert isinstance(second, tuple)
        (deep,) = named["deep"]
        return [(first * deep, second[0].sin() * deep), {"sum": first + second[1]}]

    a, b, c, d = (_x(device, requires_grad=True) for _ in range(4))
    got = assert_same_as_plain(
        f,
        ([a, (b, c)], {"deep": [d]}),
        chunk_size=chunk_size,
        strategy=strategy,
    )
    assert list(got.gradients) == [
        "['args'][0][0]",
        "['args'][0][1][0]",
        "['args'][0][1][1]",
        "['args'][1]['deep'][0]",
    ]
    assert None not in got.gradients.values()


@strategies()
@sizes
def test_fairscale_787_results_require_grad_one_by_one(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Of two results, that one alone requires grad which depends on what does."""
    frozen = _x(device, requires_grad=False)
    weight = _x(device, requires_grad=True, shape=(4, 4))

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x @ weight

    got = assert_same_as_plain(
        f, (frozen,), chunk_size=chunk_size, strategy=strategy, captured=weight
    )
    assert [t.requires_grad for t in got.result] == [False, True]  # type: ignore[attr-defined]


@strategies()
@pytest.mark.parametrize("grad_mode", [True, False])
def test_fairscale_787_frozen_result_in_a_trained_model(
    strategy: Strategy, *, grad_mode: bool, device: torch.device
) -> None:
    """A frozen chunked part forces no grad on its result; the rest trains around it."""
    frozen = _mlp(device).requires_grad_(requires_grad=False)
    head = _mlp(device)
    x = _x(device, requires_grad=False)

    def model(*, whole: bool) -> Tensor:
        with torch.set_grad_enabled(grad_mode):
            features: Tensor = (
                frozen(x)
                if whole
                else chunk_and_checkpoint(frozen, x, chunk_size=2, strategy=strategy)
            )
        assert not features.requires_grad
        result: Tensor = head(features)
        return result

    leaves = (frozen, head)
    expected = run(lambda: model(whole=True), leaves)
    assert_same_runs(run(lambda: model(whole=False), leaves), expected)


@strategies()
@sizes
def test_pytorch_37266_detached_output_stays_detached(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """What `f` detaches, or computes under no_grad, stays detached."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin() * x
        with torch.no_grad():
            scale = y.abs().amax(1, keepdim=True)
        return y / scale, y.detach(), scale

    got = assert_same_as_plain(
        f, (_x(device, requires_grad=True),), chunk_size=chunk_size, strategy=strategy
    )
    assert isinstance(got.result, tuple)
    assert [t.requires_grad for t in got.result] == [True, False, False]
    assert [t.grad_fn is None for t in got.result] == [False, True, True]


@strategies()
@sizes
def test_xtuner_2048_all_inputs_detached(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """If every input is detached, every trainable parameter still gets a gradient."""
    mlp = _mlp(device)
    scale = _x(device, requires_grad=True, shape=())

    def f(batch: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
        hidden = mlp(batch["hidden"].detach() + positions)
        return {"hidden": hidden * scale, "mask": batch["mask"]}

    args = (
        {
            "hidden": _x(device, requires_grad=False),
            "mask": torch.ones(5, 1, dtype=torch.bool, device=device),
        },
        _x(device, requires_grad=True).detach(),
    )
    got = assert_same_as_plain(
        f, args, chunk_size=chunk_size, strategy=strategy, captured=(mlp, scale)
    )
    trained = {n: g for n, g in got.gradients.items() if "captured" in n}
    assert len(trained) == 5
    assert None not in trained.values()


@strategies()
@sizes
def test_open_clip_573_switching_strategy_drops_no_gradient(
    strategy: Strategy, chunk_size: int | None, device: torch.device
) -> None:
    """Each strategy trains a block behind a locked stem as plain `f` does."""
    stem = nn.Conv2d(3, 8, 4, 4).to(device, torch.float64)
    stem.requires_grad_(requires_grad=False)
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).to(
        device, torch.float64
    )
    images = _x(device, requires_grad=False, shape=(5, 3, 8, 8))
    patches = stem(images).flatten(2).mT
    got = assert_same_as_plain(
        block, (patches,), chunk_size=chunk_size, strategy=strategy, captured=block
    )
    trained = [n for n in got.gradients if "captured" in n]
    assert len(trained) == len(list(block.parameters())) == 12
    assert all(got.gradients[n] is not None for n in trained)
