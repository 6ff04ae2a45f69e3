"""Tests of `diagnostics.check`: each cause is named, and nothing innocent accused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chunkcheck import Fused, chunk_and_checkpoint
from chunkcheck.diagnostics import Report, assert_equivalent, check
from reference import net, rows

RECOMPUTING = ("auto", "non_reentrant", "reentrant")


def causes(report: Report) -> list[str]:
    return [finding.cause for finding in report.findings]


def cumulated(x: Tensor) -> Tensor:
    return x.cumsum(0)


# Each mixes rows, whatever runs the chunks.
MIXING: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0).values,
    "cumsum": cumulated,
    "from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "mean": lambda x: x - x.mean(0),
    "count": lambda x: x / x.shape[0],
    "position": lambda x: x + torch.arange(len(x))[:, None],
    "random": lambda x: torch.dropout(x.softmax(0), 0.5, train=True),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "in a dict": lambda x: {"a": x.sin(), "b": (x.sin(), x.softmax(0))},
}


@pytest.mark.parametrize("strategy", ["auto", "non_reentrant", "reentrant", "none"])
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_mix(name: str, strategy: Any) -> None:
    report = check(MIXING[name], rows(12, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["rows_mix"]
    assert not report


def test_where_rows_mix_is_said() -> None:
    text = str(check(MIXING["in a dict"], rows(12, 4), chunk_size=5))
    assert "result['b'][1]" in text
    assert "result['a']" not in text


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_batch_norm_in_training_is_named(*, grad: bool, running: bool) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=running)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout()).double()
    report = check(model, rows(12, 4, grad=grad), chunk_size=5)
    assert causes(report) == ["rows_mix"]
    assert "Sequential.1" in str(report)
    assert ".eval()" in str(report)


def test_batch_norm_under_a_loss() -> None:
    model = nn.Sequential(net(), nn.BatchNorm1d(4).double())

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    report = check(loss, rows(12, 4), chunk_size=4, out_dim="mean")
    assert causes(report) == ["rows_mix"]


WRONG: dict[str, tuple[str, Callable[[Tensor], Any], Any]] = {
    "a sum over the rows": ("wrong_length", lambda x: x[:, :3].sum(0), "auto"),
    "a loss": ("wrong_length", lambda x: x.sum(), "auto"),
    "pairs": ("wrong_length", lambda x: torch.cat([x, x]), "auto"),
    "a list": ("wrong_length", lambda x: list(x.detach().unbind()), None),
    "transposed": ("wrong_dim", lambda x: x.sin().T, "auto"),
    "a table": ("wrong_dim", lambda _: torch.eye(4).double() * 2, "auto"),
    "None on a loss": ("only_first", lambda x: x.square().sum(), None),
    "None on a mean": ("only_first", lambda x: x.square().mean(), None),
    "None without gradient": ("only_first", lambda x: x.detach().sum(), None),
    "a number": ("only_first", len, "auto"),
    "a random loss": ("only_first", lambda x: (x * torch.rand(1)).sum(), None),
    "a sum of means": ("reduction", lambda x: x.square().mean(), "sum"),
    "a mean of sums": ("reduction", lambda x: x.square().sum(), "mean"),
    "a maximum": ("reduction", lambda x: x.square().amax(), "mean"),
}


@pytest.mark.parametrize("name", WRONG)
def test_results_that_are_put_together_wrongly(name: str) -> None:
    cause, f, out_dim = WRONG[name]
    report = check(f, rows(12, 4), chunk_size=4, out_dim=out_dim)
    assert causes(report) == [cause]
    assert report.findings[0].remedy


def test_the_dim_of_the_rows_is_said() -> None:
    report = check(lambda x: {"y": x.T}, rows(12, 4), chunk_size=4)
    assert "Write 1 for result['y'] in out_dim" in str(report)


def test_a_mean_over_rows_of_which_some_are_ignored() -> None:
    head, target = nn.Linear(4, 5).double(), torch.arange(12) % 5
    target[:3] = -100

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(head(x), target)

    report = check(loss, rows(12, 4), target, chunk_size=4, out_dim="mean")
    assert causes(report) == ["reduction"]
    assert "ignored" in str(report)
    target[:3] = 1
    assert check(loss, rows(12, 4), target, chunk_size=5, out_dim="mean")


def test_a_weight_that_is_cut() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def scaled(x: Tensor, table: Tensor) -> Tensor:
        return x * table.sum()

    for function, wide in ((f, rows(12, 12)), (scaled, rows(12, 3))):
        report = check(function, rows(12, 12), wide, chunk_size=4)
        if function is scaled:
            report = check(function, rows(12, 4), wide, chunk_size=4)
        assert causes(report) == ["cut_whole"]
        assert "args[1]" in str(report)
    assert check(f, rows(12, 12), rows(12, 12), chunk_size=4, batch_dim=(0, None))


hidden = torch.Generator().manual_seed(1)


def test_a_generator_that_cannot_be_found() -> None:
    def f(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=globals()["hid" + "den"])

    report = check(f, rows(12, 4), chunk_size=4)
    assert causes(report) == ["randomness"]
    assert "generators=" in str(report)


def with_python(x: Tensor) -> Tensor:
    return x.sin() * torch.tensor(random.random())


def with_numpy(x: Tensor) -> Tensor:
    return x.sin() * torch.tensor(np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("strategy", RECOMPUTING)
@pytest.mark.parametrize(
    ("f", "name"), [(with_python, "Python"), (with_numpy, "NumPy")]
)
def test_random_numbers_of_python_and_numpy(f: Any, name: str, strategy: Any) -> None:
    report = check(f, rows(12, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["randomness"]
    assert name in str(report)
    assert "preserve_python_rng_state=True" in str(report)
    assert check(f, rows(12, 4), chunk_size=4, strategy="none")
    replayed = Fused(preserve_python_rng_state=True)
    assert check(f, rows(12, 4), chunk_size=4, strategy=replayed)


@pytest.mark.parametrize("strategy", RECOMPUTING)
@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_random_numbers_of_an_object(make: Any, strategy: Any) -> None:
    source = make(3)

    def f(x: Tensor) -> Tensor:
        return x.sin() * torch.tensor(source.random())

    report = check(f, rows(12, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["randomness"]
    assert "source" in str(report)
    assert source.random() == make(3).random()


@pytest.mark.parametrize("strategy", ["non_reentrant", "reentrant"])
def test_a_generator_under_torchs_checkpoints(strategy: Any) -> None:
    generator = torch.Generator().manual_seed(1)

    def f(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    report = check(f, rows(12, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["randomness"]
    assert "strategy='auto'" in str(report)
    assert check(f, rows(12, 4), chunk_size=4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += len(x)
        y: Tensor = self.linear(x)
        return y.sin()


@pytest.mark.parametrize("strategy", ["non_reentrant", "reentrant"])
def test_buffers_that_are_updated_twice(strategy: Any) -> None:
    report = check(Counting(), rows(12, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["buffers"]
    assert "Counting.seen is 24 instead of 12" in str(report)
    assert check(Counting(), rows(12, 4), chunk_size=4)


def test_batch_norm_twice_is_said_as_well() -> None:
    norm = nn.BatchNorm1d(4).double()
    report = check(norm, rows(12, 4), chunk_size=4, strategy="non_reentrant")
    assert causes(report) == ["rows_mix", "buffers"]


def test_captured_statistics_that_are_no_buffer() -> None:
    mean, var = torch.zeros(4).double(), torch.ones(4).double()

    def f(x: Tensor) -> Tensor:
        functional.batch_norm(x.detach(), mean, var, training=True)
        return x.sin()

    report = check(f, rows(12, 4), chunk_size=4)
    assert causes(report) == ["buffers"]
    assert not mean.any()


class Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() * self.calls


@pytest.mark.parametrize("strategy", RECOMPUTING)
def test_a_counter_that_drifts(strategy: Any) -> None:
    module, calls = Drifting(), 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin() * calls

    for function, name in ((module, "calls"), (f, "calls")):
        report = check(function, rows(12, 4), chunk_size=4, strategy=strategy)
        assert causes(report) == ["recompute"]
        assert name in str(report)
    assert module.calls == calls == 0


def test_a_recompute_that_gives_something_else() -> None:
    def f(x: Tensor) -> Tensor:
        # The graph task's id: only recompute has one.
        inside = torch._C._current_graph_task_id() != -1
        return x.square() * (2 if inside else 1)

    report = check(f, rows(12, 4), chunk_size=4)
    assert causes(report) == ["recompute"]
    assert "recompute of rows 0:4" in str(report) or "gave other" in str(report)


def test_a_growing_list() -> None:
    log: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        log.append(x.detach())
        return x.sin()

    report = check(f, rows(12, 4), chunk_size=4)
    assert causes(report) == ["grows"]
    assert "log" in str(report)
    assert log == []


@dataclass
class Cache:
    """Like a DynamicCache: keys along a dim of positions."""

    keys: list[Tensor] = field(default_factory=list)

    def update(self, new: Tensor) -> Tensor:
        if self.keys:
            self.keys[0] = torch.cat([self.keys[0], new], 1)
        else:
            self.keys.append(new)
        return self.keys[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        keys = self.cache.update(x)
        return (x @ keys.mT).softmax(-1) @ keys


@pytest.mark.parametrize("strategy", RECOMPUTING)
def test_a_cache_that_is_appended_to_twice(strategy: Any) -> None:
    module = Attention()
    report = check(module, rows(12, 3, 4), chunk_size=4, strategy=strategy)
    assert causes(report) == ["grows"]
    assert "cache.keys" in str(report)
    assert module.cache.keys == []


class Memo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.memo:
            self.memo[x.shape[1]] = torch.arange(x.shape[1]).double()
        return x * self.memo[x.shape[1]]


class Forgetting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Any, *args: Tensor) -> Any:
        ctx.f, ctx.args = f, args
        with torch.no_grad():
            return f(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            args = [a.detach().requires_grad_() for a in ctx.args]
            return None, *torch.autograd.grad(ctx.f(*args), args, gradients)


def forgetting(f: Callable[..., Any], /, *args: Tensor) -> tuple[Tensor, ...]:
    """Do as checkpoints do that know their arguments only."""
    found: tuple[Tensor, ...] = Forgetting.apply(f, *args)  # type: ignore[no-untyped-call]
    return found


def test_captured_tensors_without_gradients() -> None:
    report = check(net(), rows(12, 4), chunk_size=4, strategy=forgetting)
    assert causes(report) == ["lost_gradient"]
    assert "Sequential.0.weight" in str(report)


def detaching(f: Callable[..., Any], /, *args: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach() for t in f(*args))


def test_results_without_gradients() -> None:
    report = check(torch.sin, rows(12, 4), chunk_size=4, strategy=detaching)
    assert causes(report) == ["lost_gradient"]


def wrong(f: Callable[..., Any], /, *args: Tensor) -> tuple[Tensor, ...]:
    return tuple(t + 0.5 * (t - t.detach()) for t in f(*args))


def test_wrong_gradients_of_unknown_cause() -> None:
    report = check(torch.sin, rows(12, 4), chunk_size=4, strategy=wrong)
    assert causes(report) == ["unexplained"]
    assert "the gradient of args[0]" in str(report)


def test_an_f_that_writes_into_its_arguments() -> None:
    x, mask = rows(12, 4), torch.ones(12, 4).double()
    before = mask.clone()

    def f(x: Tensor, other: dict[str, Tensor]) -> Tensor:
        return x * other["mask"].mul_(2)

    report = check(f, x, {"mask": mask}, chunk_size=4)
    assert causes(report) == ["in_place"]
    assert "args[1]['mask']" in str(report)
    assert torch.equal(mask, before)

    def of_computed(x: Tensor) -> Tensor:
        return x.mul_(2)

    computed = x * 2
    held = computed.detach().clone()
    assert causes(check(of_computed, computed, chunk_size=4)) == ["in_place"]
    assert torch.equal(computed, held)
    computed.sum().backward()  # the graph of the user is whole


def test_an_error_of_the_chunks_alone() -> None:
    def f(x: Tensor) -> Tensor:
        return x.view(12, 4)

    report = check(f, rows(12, 4), chunk_size=5)
    assert causes(report) == ["error"]
    assert "RuntimeError" in str(report)


def test_an_error_of_f_is_raised() -> None:
    x = rows(12, 4)

    def f(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check(f, x, chunk_size=4)


def test_bad_arguments_are_raised() -> None:
    with pytest.raises(ValueError, match="one chunk"):
        check(torch.sin, rows(12, 4), chunk_size=12)
    with pytest.raises(ValueError, match="one chunk"):
        check(torch.sin, rows(12, 4), chunk_size=4, rows=3)
    with pytest.raises(ValueError, match="agree in size"):
        check(torch.add, rows(12, 4), rows(11, 4), chunk_size=4)
    with pytest.raises(ValueError, match="strategy"):
        check(torch.sin, rows(12, 4), chunk_size=4, strategy="nome")  # type: ignore[arg-type]


class Experts(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = best == index
            if chosen.any():
                given = self.dropout(x[chosen])
                found[chosen] = expert(given) * scores[chosen, index, None]
        return found, best


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = self.net(x)
        return found.float()


def heads(x: Tensor) -> Tensor:
    found: Tensor = functional.scaled_dot_product_attention(x, x, x)
    return found


def loss_and_count(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    summed = functional.cross_entropy(x, target, reduction="sum")
    return summed, (target >= 0).sum()


def spectral() -> nn.Module:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 4)
    )
    return model.double()


def with_hook() -> nn.Module:
    model = net()
    model.register_forward_hook(lambda *given: given[2] * 2)
    return model


def single(*shape: int) -> Tensor:
    return rows(*shape, dtype=torch.float32)


def complex_rows() -> Tensor:
    return rows(12, 4, dtype=torch.complex128)


def targets() -> Tensor:
    return torch.arange(12) % 4


weight = torch.randn(4, 4, dtype=torch.float64)

Case = tuple[Callable[[], Any], Callable[[], Sequence[Any]], dict[str, Any]]
INNOCENT: dict[str, Case] = {
    "mlp": (net, lambda: [rows(12, 4)], {}),
    "dropout": (lambda: nn.Sequential(net(), nn.Dropout()), lambda: [rows(12, 4)], {}),
    "lstm": (
        lambda: nn.LSTM(4, 6, batch_first=True).double(),
        lambda: [rows(12, 3, 4)],
        {"out_dim": (0, 1)},
    ),
    "attention": (lambda: heads, lambda: [rows(12, 2, 5, 4)], {}),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: [single(12, 3, 4)],
        {},
    ),
    "layer norm": (lambda: nn.LayerNorm(4).double(), lambda: [rows(12, 4)], {}),
    "batch norm in eval": (
        lambda: nn.BatchNorm1d(4).double().eval(),
        lambda: [rows(12, 4)],
        {},
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(4, affine=True).double(),
        lambda: [rows(12, 4, 5)],
        {},
    ),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), lambda: [single(12, 3, 6, 6)], {}),
    "float32": (lambda: net().float(), lambda: [single(600, 4)], {"chunk_size": 7}),
    "float32 sums": (
        lambda: lambda x: (1000 + x).sum(1),
        lambda: [single(64, 3000)],
        {},
    ),
    "bf16": (
        lambda: net().bfloat16(),
        lambda: [rows(12, 4, dtype=torch.bfloat16)],
        {},
    ),
    "experts": (Experts, lambda: [single(40, 4)], {"chunk_size": 7}),
    "experts with dropout": (
        lambda: Experts(dropout=0.5),
        lambda: [single(40, 4)],
        {"chunk_size": 7},
    ),
    "spectral norm": (spectral, lambda: [rows(12, 4)], {}),
    "embedding": (lambda: nn.Embedding(5, 3), lambda: [torch.arange(12) % 5], {}),
    "several outputs": (
        lambda: lambda x: (x.sin(), [x.cos(), x.detach().argmax(-1)], "name"),
        lambda: [rows(12, 4)],
        {},
    ),
    "dicts": (
        lambda: lambda d: {"y": d["x"] * d["m"], "k": d["none"]},
        lambda: [{"x": rows(12, 4), "m": rows(12, 1), "none": None}],
        {},
    ),
    "generator": (Noisy, lambda: [rows(12, 4)], {}),
    "autocast inside": (AutocastInside, lambda: [single(60, 4)], {}),
    "sums": (
        lambda: loss_and_count,
        lambda: [rows(12, 4), targets()],
        {"out_dim": "sum"},
    ),
    "float32 loss": (
        lambda: lambda x: x.square().mean(),
        lambda: [single(4096, 9)],
        {"out_dim": "mean", "chunk_size": 100},
    ),
    "expanded": (
        lambda: torch.mul,
        lambda: [rows(1, 4).expand(12, 4), rows(12, 4)],
        {},
    ),
    "transposed": (net, lambda: [rows(4, 12).T], {}),
    "another dim": (lambda: torch.tanh, lambda: [rows(3, 12)], {"batch_dim": 1}),
    "complex": (lambda: lambda x: x * x.conj(), lambda: [complex_rows()], {}),
    "integers": (lambda: lambda x: x.argmax(-1), lambda: [rows(12, 4)], {}),
    "a table": (
        lambda: lambda x, t: (x @ t.T).softmax(-1) @ t,
        lambda: [rows(12, 4), rows(7, 4)],
        {"batch_dim": (0, None)},
    ),
    "no parameters": (lambda: torch.sin, lambda: [rows(12, 4)], {}),
    "no gradients": (lambda: torch.sin, lambda: [rows(12, 4, grad=False)], {}),
    "broadcast": (lambda: torch.add, lambda: [rows(12, 4), rows(1, 4)], {}),
    "None": (
        lambda: lambda x: (x @ weight, weight.norm()),
        lambda: [rows(12, 4)],
        {"out_dim": (0, None)},
    ),
    "memo": (Memo, lambda: [rows(12, 4)], {}),
    "counter": (Counting, lambda: [rows(12, 4)], {}),
    "hook": (with_hook, lambda: [rows(12, 4)], {}),
    "windows": (
        lambda: lambda x: x.view(-1, 2, 4).softmax(1).view(-1, 4),
        lambda: [rows(12, 4)],
        {},
    ),
    "nan": (lambda: lambda x: x / 0 - x / 0, lambda: [rows(12, 4)], {}),
    "nested": (
        lambda: lambda x: chunk_and_checkpoint(torch.sin, x, chunk_size=2),
        lambda: [rows(12, 4)],
        {},
    ),
    "argument that is computed": (net, lambda: [rows(12, 4) * 2], {}),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_innocent_is_accused(name: str) -> None:
    make, given, options = INNOCENT[name]
    options = {"chunk_size": 4, **options}
    for seed in range(6):
        torch.manual_seed(seed)
        f, args = make(), given()
        report = check(f, *args, **options)
        assert report, str(report)
        assert report.findings == ()


@pytest.mark.parametrize("strategy", ["fused", "non_reentrant", "reentrant", "none"])
@pytest.mark.parametrize("name", ["mlp", "dropout", "lstm", "experts", "dicts"])
def test_nor_under_other_strategies(name: str, strategy: Any) -> None:
    make, given, options = INNOCENT[name]
    report = check(make(), *given(), **{"chunk_size": 5, **options}, strategy=strategy)
    assert report, str(report)


def test_a_loss_with_gradients_in_forward() -> None:
    model = net()

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().sum()
        return found

    assert_equivalent(
        loss, rows(12, 4), chunk_size=4, out_dim="sum", strategy="grad_in_forward"
    )


def test_how_a_report_reads() -> None:
    model = net()
    report = check(model, rows(12, 4), chunk_size=5)
    assert str(report).startswith(
        "chunking is right for Sequential: 1 result and 5 gradients of plain f, loop"
        " and chunks agree "
    )
    assert (report.results, report.gradients, report.with_plain) == (1, 5, True)
    report = check(nn.Dropout(), rows(12, 4), chunk_size=5)
    assert "other random numbers" in str(report)
    assert not report.with_plain
    text = str(check(cumulated, rows(12, 4), chunk_size=4))
    assert text.startswith("chunking is not right for cumulated:\n\n- rows_mix: ")


def test_assert_equivalent() -> None:
    assert_equivalent(net(), rows(12, 4), chunk_size=5)
    with pytest.raises(AssertionError, match="rows_mix"):
        assert_equivalent(cumulated, rows(12, 4), chunk_size=5)


def test_a_part_of_the_rows() -> None:
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.sin()

    assert causes(check(f, rows(100, 4), chunk_size=4, rows=8)) == ["grows"]
    assert max(seen, default=0) == 0
    assert check(torch.sin, rows(100, 4), chunk_size=4, rows=8)


def test_keywords_and_mappings() -> None:
    def f(x: Tensor, *, table: Tensor, mask: Tensor | None = None) -> Tensor:
        return x @ table if mask is None else x @ table * mask

    named = {"table": rows(4, 3), "mask": rows(12, 1)}
    dims = {"x": 0, "table": None, "mask": 0}
    assert check(f, rows(12, 4), chunk_size=5, batch_dim=dims, kwargs=named)


def test_tolerances() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1e-8 * len(x)

    assert causes(check(f, rows(12, 4), chunk_size=4)) == ["rows_mix"]
    assert check(f, rows(12, 4), chunk_size=4, rtol=1e-6)
    assert check(f, rows(12, 4), chunk_size=4, atol=1e-6)


def test_a_small_fault_in_float32_is_found() -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1e-3 * x.mean(0)

    assert causes(check(f, single(12, 4), chunk_size=4)) == ["rows_mix"]


def test_captures_with_a_history() -> None:
    base = rows(4, 4)
    base.grad = before = torch.ones(4, 4).double()
    derived = base * 2

    def f(x: Tensor) -> Tensor:
        return x @ derived

    report = check(f, rows(12, 4), chunk_size=4)
    assert report
    assert report.gradients == 2
    assert base.grad is before
    assert before.eq(1).all()
    derived.sum().backward()


def test_no_trace_is_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    x, log = rows(12, 4), list[float]()
    x.grad = torch.zeros(12, 4).double()

    def f(x: Tensor) -> Tensor:
        log.append(random.random())
        found: Tensor = model(x) * float(np.random.rand())  # noqa: NPY002
        return found

    held = {key: t.clone() for key, t in model.state_dict().items()}
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    value, gradient = x.detach().clone(), x.grad
    assert not check(f, x, chunk_size=4)
    assert torch.equal(x, value)
    assert x.grad is gradient
    assert not gradient.any()
    assert all(p.grad is None for p in model.parameters())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, held[key])
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert random.getstate() == of_python
    assert (np.random.get_state()[1] == of_numpy).all()  # type: ignore[index]  # noqa: NPY002
    assert log == []
    assert model.training
