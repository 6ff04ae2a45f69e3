"""Tests of `_torch.buffers`: which modules write to theirs, and what these held."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch import replay
from chunkcheck._torch.buffers import Buffers, Owner, State
from reference import Strategy, assert_same_as_loop, rows, strategies

ways = pytest.mark.parametrize("history", [False, True], ids=["leaf", "with_history"])


class Counter(nn.Module):
    """Counts its rows, in place or by a new tensor, if they are what it looks for."""

    def __init__(self, *, replace: bool = False, only_positive: bool = False) -> None:
        super().__init__()
        self.n: Tensor
        self.register_buffer("n", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("absent", None)
        self.replace, self.only_positive = replace, only_positive

    def forward(self, x: Tensor) -> Tensor:
        if not self.only_positive or x.sum() > 0:
            if self.replace:
                self.n = self.n + x.shape[0]
            else:
                self.n += x.shape[0]
        return x * (self.n[0] + 1)


def test_what_writes_is_seen() -> None:
    def written(change: Callable[[Counter], object]) -> set[str]:
        module = Counter()
        found = Owner(module)
        found.look()
        assert not found.written
        change(module)
        found.look()
        return found.written

    assert written(lambda m: m.n.add_(1)) == {"n"}
    assert written(lambda m: setattr(m, "n", m.n.clone())) == {"n"}
    assert written(lambda m: setattr(m.n, "data", m.n.clone())) == {"n"}
    assert written(lambda m: m.register_buffer("other", torch.ones(1))) == {"other"}
    assert written(lambda m: delattr(m, "n")) == {"n"}
    assert written(lambda m: setattr(m, "absent", torch.ones(1))) == {"absent"}


def test_batch_norm_writes_in_training_only() -> None:
    module = nn.BatchNorm1d(3)
    for training in (True, False):
        module.train(training)
        found = Owner(module)
        module(torch.ones(2, 3))
        found.look()
        assert bool(found.written) == training
    found = Owner(stateless := nn.BatchNorm1d(3, track_running_stats=False))
    stateless(torch.ones(2, 3))
    found.look()
    assert not found.written


def once(module: nn.Module, largest: int = 2**20) -> tuple[Buffers, State]:
    """Run a module once, and return what its buffers held before."""
    found = Buffers([module], largest)
    before = found.snapshot()
    module(torch.ones(2, 3))
    return found, found.written(before)


@pytest.mark.parametrize("replace", [False, True], ids=["in_place", "replaced"])
def test_seen_again(*, replace: bool) -> None:
    module = Counter(replace=replace)
    found, before = once(module)
    now = module.n
    for _ in range(2):  # as often as there are backwards
        with found.seen_again(before):
            assert module.n.tolist() == [0] * 3
            module(torch.ones(5, 3))
            assert module.n.tolist() == [5] * 3
        assert module.n is now
        assert now.tolist() == [2] * 3
        assert dict(module.named_buffers()).keys() == {"n"}


def test_a_buffer_that_the_first_run_registered() -> None:
    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if "cache" not in dict(self.named_buffers()):
                self.register_buffer("cache", x.sum(0))
            return x * self.get_buffer("cache")

    module = Lazy()
    found, before = once(module)
    now = module.get_buffer("cache")
    with found.seen_again(before):
        assert not dict(module.named_buffers())
        module(torch.ones(5, 3))
        assert module.get_buffer("cache").tolist() == [5] * 3
    assert module.get_buffer("cache") is now


def test_an_exception_gives_the_buffers_back() -> None:
    module = Counter()
    found, before = once(module)
    now = module.n
    with pytest.raises(KeyError), found.seen_again(before):
        raise KeyError
    assert module.n is now
    assert now.tolist() == [2] * 3


@pytest.mark.parametrize("replace", [False, True], ids=["in_place", "replaced"])
def test_restore(*, replace: bool) -> None:
    module = Counter(replace=replace)
    first = module.n
    found, _ = once(module)
    found.restore()
    assert module.n is first
    assert first.tolist() == [0] * 3
    assert module.absent is None


def test_a_large_buffer_is_not_copied() -> None:
    module = Counter()
    found, before = once(module, largest=8)
    message = r"buffer 'n' of a Counter.* 24 bytes is too large for a copy per chunk"
    with pytest.raises(RuntimeError, match=message), found.seen_again(before):
        pass
    assert module.n.tolist() == [2] * 3


def test_a_large_buffer_that_is_replaced() -> None:
    module = Counter(replace=True)
    found, before = once(module, largest=8)
    with found.seen_again(before):
        assert module.n.tolist() == [0] * 3
    assert module.n.tolist() == [2] * 3


def test_the_runs_tell_which_buffers_are_written_to() -> None:
    writes, late, reads, without = Counter(), Counter(), Counter(), nn.Linear(3, 3)

    def written(*modules: nn.Module) -> list[int]:
        before = found.snapshot()
        for module in modules:
            module(torch.ones(2, 3))
        states.append(found.written(before))
        return list(states[-1])

    states: list[State] = []
    found = Buffers([writes, late, reads, without])
    assert found.ids == set()
    assert written(writes) == [0]
    assert found.ids == {id(writes.n)}
    assert written() == [0]  # each run is told what it saw
    assert written(writes, late) == [0, 1]
    assert list(found.snapshot()) == [0, 1]
    assert id(reads.n) not in found.ids
    with found.seen_again(states[0]):  # the first run saw both as they were
        assert writes.n.tolist() == late.n.tolist() == [0] * 3
    with found.seen_again(states[2]):
        assert writes.n.tolist() == [2] * 3
        assert late.n.tolist() == [0] * 3
    found.restore()
    assert writes.n.tolist() == late.n.tolist() == [0] * 3


class Observed(torch.autograd.Function):
    """Keeps the largest gradient in a buffer, as training in 8 bits does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = largest
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.maximum(ctx.largest, gradient.abs().max(), out=ctx.largest)
        return gradient, None


@strategies()
def test_a_buffer_that_backward_writes_to(strategy: Strategy) -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.of_forward: Tensor
            self.of_backward: Tensor
            self.register_buffer("of_forward", torch.zeros(()))
            self.register_buffer("of_backward", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.of_forward += 1
            y: Tensor = Observed.apply(x * self.weight, self.of_backward)  # type: ignore[no-untyped-call]
            return y

    module = Observer()
    x = torch.ones(8, 3, requires_grad=True)
    y = chunk_and_checkpoint(module, x, chunk_size=2, strategy=strategy)
    (y * 3).sum().backward()
    assert module.of_backward == 3
    if strategy in ("auto", "fused", "none"):
        assert module.of_forward == 4


@ways
@pytest.mark.parametrize("how", ["data = new", "data.copy_", "numpy"])
def test_buffers_written_past_the_count_of_writes(how: str, *, history: bool) -> None:
    """As the codebooks of vector quantizers are, by exponential moving averages."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            new = self.mean * 0.9 + x.detach().mean(0)
            if how == "data = new":
                self.mean.data = new
            elif how == "data.copy_":
                self.mean.data.copy_(new)
            else:
                self.mean.numpy()[...] = new.numpy()
            return (x - self.mean.clone() * x).tanh()

    module, leaf = Codebook(), rows(3)
    shift = -leaf if history else leaf
    assert_same_as_loop(
        lambda x: module(x) * shift,
        (rows(6, 3),),
        chunk_size=2,
        strategy="auto",
        captured=leaf,
        state=module.mean.clone,
        reset=module.mean.zero_,
    )


def model(name: str) -> nn.Module:
    match name:
        case "batch_norm":
            found: nn.Module = nn.BatchNorm1d(3)
        case "instance_norm":  # whose operator writes uncounted, and nothing else does
            found = nn.InstanceNorm1d(3, track_running_stats=True)
        case "no_momentum":
            found = nn.BatchNorm1d(3, momentum=None)
        case "scripted":
            found = torch.jit.script(nn.BatchNorm1d(3).double())
        case "spectral_norm":
            found = parametrizations.spectral_norm(nn.Linear(3, 3))
        case _:
            found = Counter(replace=name == "replaced", only_positive=name == "late")
    return found.double()


MODELS = [
    *("batch_norm", "no_momentum", "instance_norm", "spectral_norm", "scripted"),
    *("in_place", "replaced", "late"),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@ways
@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_a_loop(name: str, *, history: bool) -> None:
    module, leaf = model(name), rows(3)
    shift = -leaf if history else leaf
    saved = {key: t.clone() for key, t in module.state_dict().items()}
    x = rows(6, 3, grad=False).abs()
    x[:4] *= -1
    x.requires_grad_()

    def reset() -> None:
        module.load_state_dict({key: t.clone() for key, t in saved.items()})

    def f(x: Tensor) -> Tensor:
        if name == "instance_norm":  # each row is an instance of three channels
            y: Tensor = module(x[..., None] * x[:, None, :])
            return y.mean(-1) * shift
        return module(x) * shift  # type: ignore[no-any-return]

    assert_same_as_loop(
        f,
        (x,),
        chunk_size=2,
        strategy="auto",
        captured=[module, leaf],
        state=lambda: {k: t.clone() for k, t in module.named_buffers()},
        reset=reset,
    )


@ways
def test_a_large_buffer_that_f_only_reads(
    monkeypatch: pytest.MonkeyPatch, *, history: bool
) -> None:
    monkeypatch.setattr(replay, "LARGEST_BUFFER", 8)
    module, leaf, x = nn.BatchNorm1d(3).double().eval(), rows(3), rows(5, 3)
    shift = -leaf if history else leaf
    y = chunk_and_checkpoint(lambda x: module(x) * shift, x, chunk_size=2)
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, (-1 if history else 1) * module(x).sum(0))


def test_a_large_buffer_is_never_written_to_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be rewound: either an error says so, or it holds what a loop leaves."""
    monkeypatch.setattr(replay, "LARGEST_BUFFER", 8)
    module, leaf, x = Counter(), rows(3), rows(6, 3)
    shift = -leaf
    unfound: Any = weakref.ref(shift)
    try:
        chunk_and_checkpoint(lambda x: module(x) * unfound(), x, chunk_size=2)
    except RuntimeError as error:
        assert "buffer" in str(error)  # noqa: PT017 (either is right)
    else:
        assert module.n.tolist() == [6] * 3
