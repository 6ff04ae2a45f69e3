"""Tests of `_torch.buffers`: which modules write to theirs, and what these held."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from chunkcheck import chunk_and_checkpoint
from chunkcheck._torch import buffers
from chunkcheck._torch.buffers import Buffers, Snapshot
from reference import assert_same_as_loop, rows

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


def test_a_snapshot_is_outdated_by_what_writes() -> None:
    module = Counter()
    before = Snapshot(module)
    assert not before.outdated()
    module.n.add_(1)
    assert before.outdated()

    before = Snapshot(module)
    module.n = module.n.clone()
    assert before.outdated()

    before = Snapshot(module)
    module.register_buffer("other", torch.ones(1))
    assert before.outdated()

    before = Snapshot(module)
    del module.other
    assert before.outdated()

    before = Snapshot(module)
    module.absent = torch.ones(1)
    assert before.outdated()


def test_batch_norm_writes_in_training_only() -> None:
    module = nn.BatchNorm1d(3)
    for training in (True, False):
        module.train(training)
        before = Snapshot(module)
        module(torch.ones(2, 3))
        assert before.outdated() == training
    stateless = nn.BatchNorm1d(3, track_running_stats=False)
    before = Snapshot(stateless)
    stateless(torch.ones(2, 3))
    assert not before.outdated()


@pytest.mark.parametrize("replace", [False, True], ids=["in_place", "replaced"])
def test_seen_again(*, replace: bool) -> None:
    module = Counter(replace=replace)
    before = Snapshot(module)
    module(torch.ones(2, 3))
    now = module.n
    for _ in range(2):  # as often as there are backwards
        with before.seen_again():
            assert module.n.tolist() == [0] * 3
            module(torch.ones(5, 3))
            assert module.n.tolist() == [5] * 3
            module.register_buffer("new", torch.ones(1))
        assert module.n is now
        assert now.tolist() == [2] * 3
        assert dict(module.named_buffers()).keys() == {"n"}


def test_an_exception_gives_the_buffers_back() -> None:
    module = Counter()
    before = Snapshot(module)
    module(torch.ones(2, 3))
    now = module.n
    with pytest.raises(KeyError), before.seen_again():
        raise KeyError
    assert module.n is now
    assert now.tolist() == [2] * 3


@pytest.mark.parametrize("replace", [False, True], ids=["in_place", "replaced"])
def test_restore(*, replace: bool) -> None:
    module = Counter(replace=replace)
    first = module.n
    before = Snapshot(module)
    module(torch.ones(2, 3))
    before.restore()
    assert module.n is first
    assert first.tolist() == [0] * 3
    assert module.absent is None


def test_a_large_buffer_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_LARGEST", 8)
    module = Counter()
    before = Snapshot(module)
    assert not before.outdated()
    module(torch.ones(2, 3))
    assert before.outdated()
    message = r"buffer 'n' of a Counter.* 24 bytes is too large for a copy per chunk"
    with pytest.raises(RuntimeError, match=message), before.seen_again():
        pass
    assert module.n.tolist() == [2] * 3


def test_the_runs_tell_which_modules_write() -> None:
    writes, late, reads, without = Counter(), Counter(), Counter(), nn.Linear(3, 3)

    def written(*modules: nn.Module) -> list[Snapshot]:
        before = found.snapshot()
        for module in modules:
            module(torch.ones(2, 3))
        return found.written(before)

    found = Buffers([writes, late, reads, without])
    assert found.ids == set()
    first = written(writes)
    assert [s.module for s in first] == [writes]
    assert id(writes.n) in found.ids
    assert id(late.n) not in found.ids
    assert [s.module for s in written()] == [writes]  # each run is told what it saw
    assert [s.module for s in written(writes, late)] == [writes, late]
    assert [s.module for s in found.snapshot()] == [writes, late]
    assert id(reads.n) not in found.ids
    for snapshot in found.of(first):  # as the first run saw both
        with snapshot.seen_again():
            assert snapshot.module.get_buffer("n").tolist() == [0] * 3
    found.restore()
    assert writes.n.tolist() == late.n.tolist() == [0] * 3


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
    monkeypatch.setattr(buffers, "_LARGEST", 8)
    module, leaf, x = nn.BatchNorm1d(3).double().eval(), rows(3), rows(5, 3)
    shift = -leaf if history else leaf
    y = chunk_and_checkpoint(lambda x: module(x) * shift, x, chunk_size=2)
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, (-1 if history else 1) * module(x).sum(0))


def test_a_large_buffer_is_never_written_to_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot be rewound: either an error says so, or it holds what a loop leaves."""
    monkeypatch.setattr(buffers, "_LARGEST", 8)
    module, leaf, x = Counter(), rows(3), rows(6, 3)
    shift = -leaf
    unfound: Any = weakref.ref(shift)
    try:
        chunk_and_checkpoint(lambda x: module(x) * unfound(), x, chunk_size=2)
    except RuntimeError as error:
        assert "buffer" in str(error)  # noqa: PT017 (either is right)
    else:
        assert module.n.tolist() == [6] * 3
