"""`grad_in_forward`: a loss whose gradients are computed in forward.

The peers' faults (see their reports) are among the tests: DeepSpeed's
TiledFusedLogitsLoss, Liger, torchtitan, mini-sequence, NeMo Automodel, ms-swift.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812  as everyone calls it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from chunkcheck import GradInForward, chunk_and_checkpoint
from reference import (
    Counted,
    assert_close,
    assert_same_as_plain,
    net,
    rows,
    without_gc,
)

IN_FORWARD: Final = "grad_in_forward"


class Head:
    """A head, its loss over some rows, and what gets gradients."""

    def __init__(self, count: int = 7) -> None:
        self.head = nn.Linear(4, 9).double()
        self.x = rows(count, 4)
        self.target = torch.randint(9, (count,))
        self.leaves = [self.x, *self.head.parameters()]

    def mean(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target)

    def sum(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, reduction="sum")

    def call(self, out_dim: Any = "mean", size: int = 3, **options: Any) -> Tensor:
        loss: Tensor = chunk_and_checkpoint(
            getattr(self, out_dim),
            self.x,
            self.target,
            chunk_size=size,
            out_dim=out_dim,
            strategy=GradInForward(**options),
        )
        return loss

    def plain(self, out_dim: str = "mean") -> Tensor:
        found: Tensor = getattr(self, out_dim)(self.x, self.target)
        return found

    def gradients(self, loss: Tensor, **options: Any) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, self.leaves, **options)


def assert_all_close(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (found, want) in enumerate(zip(got, expected, strict=True)):
        assert_close(found, want, f"gradient {index}")


@pytest.mark.parametrize("size", [1, 3, 7, 100, None])
@pytest.mark.parametrize("out_dim", ["sum", "mean"])
@pytest.mark.parametrize("requires", ["all", "input", "head", "weight"])
def test_equals_plain(size: int | None, out_dim: Any, requires: str) -> None:
    """NeMo Automodel #3803 (mean times the chunks), mini-s (tail rows dropped)."""
    h = Head()
    h.x.requires_grad_(requires in ("all", "input"))
    h.head.weight.requires_grad_(requires in ("all", "head", "weight"))
    h.head.bias.requires_grad_(requires in ("all", "head"))
    assert_same_as_plain(
        getattr(h, out_dim),
        (h.x, h.target),
        chunk_size=size,
        out_dim=out_dim,
        strategy=IN_FORWARD,
        captured=h.head,
    )


@pytest.mark.parametrize("out_dim", ["sum", "mean"])
@pytest.mark.parametrize("scale", [0.25, -3.0, 65536.0])
def test_any_outer_scale_for_inputs_and_parameters_alike(
    out_dim: str, scale: float
) -> None:
    """DeepSpeed's TiledFusedLogitsLoss: parameter gradients ignore the outer scale."""
    h = Head()
    assert_all_close(
        h.gradients(h.call(out_dim) * scale), h.gradients(h.plain(out_dim) * scale)
    )


def test_further_use_of_the_loss() -> None:
    """torchtitan's bridge ignores the gradient that comes in."""
    h = Head()

    def total(loss: Tensor) -> Tensor:
        return loss.exp() * loss + h.x.square().sum() + 0 * loss.detach()

    assert_all_close(h.gradients(total(h.call())), h.gradients(total(h.plain())))


def test_two_losses_in_one_graph() -> None:
    h = Head()
    got = h.call("mean") * h.call("sum", size=2)
    assert_all_close(h.gradients(got), h.gradients(h.plain("mean") * h.plain("sum")))


def test_backward_twice() -> None:
    """DeepSpeed's raises or is wrong under retain_graph, as it scales in place."""
    h = Head()
    loss, plain = h.call(), h.plain()
    for scale in (1.0, 0.5, 2.0):
        assert_all_close(
            h.gradients(loss * scale, retain_graph=True),
            h.gradients(plain * scale, retain_graph=True),
        )
    h.gradients(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        h.gradients(loss)


def test_gradients_are_asked_for_one_by_one() -> None:
    h = Head()
    loss, plain = h.call(), h.plain()
    for leaf in h.leaves:
        (got,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        (want,) = torch.autograd.grad(plain, [leaf], retain_graph=True)
        assert_close(got, want, "gradient")
    loss.backward(inputs=[h.x])
    assert h.head.weight.grad is None


def test_nothing_is_written_to_grad_in_forward() -> None:
    """DeepSpeed's writes parameters' `.grad`, under no_grad as well."""
    h = Head()
    for context in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            loss = h.call()
        assert all(leaf.grad is None for leaf in h.leaves)
    assert not loss.requires_grad
    assert_close(loss, h.plain(), "loss")


def test_the_incoming_gradient_is_not_written_to() -> None:
    """DeepSpeed's SequenceTiledCompute scales the caller's gradient in place."""
    h = Head()
    gradient = torch.tensor(0.25, dtype=torch.float64)
    loss = h.call()
    got = torch.autograd.grad(loss, h.leaves, gradient, retain_graph=True)
    again = torch.autograd.grad(loss, h.leaves, gradient)
    assert gradient.item() == 0.25
    assert_all_close(got, h.gradients(h.plain() / 4))
    assert_all_close(again, got)


def test_gradients_accumulate_over_steps() -> None:
    h = Head()
    for _ in range(3):
        (h.call() / 3).backward()
    got = [leaf.grad for leaf in h.leaves if leaf.grad is not None]
    assert_all_close(got, h.gradients(h.plain()))


def test_grad_scaler() -> None:
    h = Head()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(h.head.parameters(), lr=1.0)
    expected = [
        p.detach() - g
        for p, g in zip(h.head.parameters(), h.gradients(h.plain())[1:], strict=True)
    ]
    scaler.scale(h.call()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_all_close([p.detach() for p in h.head.parameters()], expected)


def test_f_runs_once_per_chunk_and_backward_not_at_all() -> None:
    f = Counted(lambda x: x.sin().sum())
    x = rows(7, 4)
    loss = chunk_and_checkpoint(f, x, chunk_size=3, out_dim="sum", strategy=IN_FORWARD)
    loss.backward()
    assert f.rows == [3, 3, 1]


class Ops(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frozen", "products"), [("", 3), ("x", 2), ("head", 2)])
def test_gradients_that_nobody_asked_for_are_not_computed(
    frozen: str, products: int
) -> None:
    """fla-org PR #1253: a frozen head still pays for its gradient."""
    h = Head()
    if frozen == "x":
        h.x.requires_grad_(False)
    if frozen == "head":
        h.head.requires_grad_(requires_grad=False)
    with Ops() as ops:
        loss = h.call(size=3)
        forward = list(ops.names)
        loss.backward()
    count = sum(name in ("mm", "addmm") for name in ops.names)
    assert count == products * 3  # chunks
    # A number of a tensor is asked for where a device is waited for.
    assert not {"_local_scalar_dense", "is_nonzero", "equal"} & set(ops.names)
    assert not {"mm", "addmm"} & set(ops.names[len(forward) :])


def test_hooks_run_once_on_the_whole_gradient() -> None:
    h = Head()
    seen: list[Tensor] = []
    after: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    h.head.weight.register_hook(hook)
    h.head.bias.register_post_accumulate_grad_hook(after.append)
    h.x.register_hook(lambda gradient: gradient * 3)
    loss = h.call()
    assert not seen
    loss.backward()
    assert len(seen) == len(after) == 1
    of_x, of_weight, of_bias = torch.autograd.grad(
        h.mean(x := h.x.detach().requires_grad_(), h.target),
        [x, *(p for p in h.head.parameters())],
    )
    for leaf, want in zip(h.leaves, [3 * of_x, of_weight, of_bias], strict=True):
        assert leaf.grad is not None
        assert_close(leaf.grad, want, "gradient")
    assert_close(seen[0] * 2, of_weight, "what the hook saw")


def test_a_hook_that_f_hangs_on_its_argument() -> None:
    x = rows(5, 4)

    def f(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: -gradient)
        return x.sin().sum()

    loss = chunk_and_checkpoint(f, x, chunk_size=2, out_dim="sum", strategy=IN_FORWARD)
    (got,) = torch.autograd.grad(loss, [x])
    assert_close(got, -x.cos(), "gradient")


def test_an_activation_as_argument_with_hooks() -> None:
    h = Head()
    seen: list[Tensor] = []
    hidden = h.x.tanh()
    hidden.retain_grad()
    hidden.register_hook(seen.append)
    loss = chunk_and_checkpoint(
        h.mean, hidden, h.target, chunk_size=3, out_dim="mean", strategy=IN_FORWARD
    )
    loss.backward()
    assert len(seen) == 1
    assert hidden.grad is not None
    again = h.x.tanh()
    (want,) = torch.autograd.grad(h.mean(again, h.target), [again])
    assert_close(hidden.grad, want, "hidden.grad")


def test_other_results_without_gradients() -> None:
    """Counts and metrics beside the loss, joined ones among them."""
    head = nn.Linear(4, 9).double()
    x, target = rows(7, 4), torch.randint(9, (7,))
    target[:3] = -100

    def f(x: Tensor, target: Tensor) -> dict[str, Any]:
        logits = head(x)
        found = logits.detach().argmax(1)
        return {
            "loss": F.cross_entropy(logits, target, reduction="sum"),
            "count": (target != -100).sum(),
            "hits": (found == target).sum(),
            "found": found,
        }

    out = chunk_and_checkpoint(
        f,
        x,
        target,
        chunk_size=3,
        out_dim={"loss": "sum", "count": "sum", "hits": "sum", "found": 0},
        strategy=IN_FORWARD,
    )
    assert out["count"].item() == 4
    assert torch.equal(out["found"], head(x).argmax(1))
    (out["loss"] / out["count"]).backward()
    got = [x.grad, head.weight.grad]
    want = torch.autograd.grad(F.cross_entropy(head(x), target), [x, head.weight])
    for found, expected in zip(got, want, strict=True):
        assert found is not None
        assert_close(found, expected, "gradient")


@pytest.mark.parametrize("ignored", [slice(0, 3), slice(0, 7)], ids=["chunk", "all"])
def test_rows_that_give_no_gradient(ignored: slice) -> None:
    h = Head()
    h.target[ignored] = -100
    assert_all_close(h.gradients(h.call("sum")), h.gradients(h.plain("sum")))

    def constant_if_ignored(x: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        return h.sum(x[kept], target[kept]) if kept.any() else torch.zeros(()).double()

    loss = chunk_and_checkpoint(
        constant_if_ignored,
        h.x,
        h.target,
        chunk_size=3,
        out_dim="sum",
        strategy=IN_FORWARD,
    )
    assert loss.requires_grad == bool((h.target != -100).any())
    if loss.requires_grad:
        assert_all_close(h.gradients(loss), h.gradients(h.plain("sum")))


def test_experts_that_some_chunks_do_not_use() -> None:
    experts = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))
    x = rows(6, 4)
    which = torch.tensor([0, 0, 1, 1, 2, 2])
    assert_same_as_plain(
        lambda x, which: sum(
            experts[k](x[which == k]).square().sum() for k in which.unique().tolist()
        ),
        (x, which),
        chunk_size=2,
        out_dim="sum",
        strategy=IN_FORWARD,
        captured=experts,
    )


def test_leaves_that_f_makes() -> None:
    """Such as forces from energies; they are nobody's parameters."""
    w = rows(4)
    x = rows(6, 4, grad=False)

    def f(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = (x * w).sin().sum()
        (force,) = torch.autograd.grad(energy, [x], create_graph=True)
        return (force - 1).square().sum() + energy

    assert_same_as_plain(
        f, (x,), chunk_size=4, out_dim="sum", strategy=IN_FORWARD, captured=w
    )


def test_only_a_leaf_that_f_makes() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * torch.ones(3, requires_grad=True)).sum()

    loss = chunk_and_checkpoint(
        f, torch.ones(4, 3), chunk_size=2, out_dim="sum", strategy=IN_FORWARD
    )
    assert loss.requires_grad
    loss.backward()


def test_a_captured_embedding_with_sparse_gradients() -> None:
    table = nn.Embedding(10, 3, sparse=True).double()
    ids = torch.tensor([1, 2, 3, 1, 1])

    def f(ids: Tensor) -> Tensor:
        found: Tensor = table(ids)
        return found.sin().sum()

    loss = chunk_and_checkpoint(
        f, ids, chunk_size=2, out_dim="sum", strategy=IN_FORWARD
    )
    (got,) = torch.autograd.grad(loss * 2, [table.weight])
    (want,) = torch.autograd.grad(f(ids) * 2, [table.weight])
    assert got.is_sparse
    assert_close(got.to_dense(), want.to_dense(), "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_in_float32(dtype: torch.dtype) -> None:
    """Liger #512, #827; axolotl PR #1601: the weight's gradient drifts."""
    torch.manual_seed(0)
    w = torch.randn(8, 5, dtype=dtype, requires_grad=True)
    x = torch.randn(2048, 5, dtype=dtype)

    def f(x: Tensor) -> Tensor:
        return F.linear(x, w).float().square().mean()

    def error(accumulate_dtype: Any) -> float:
        loss = chunk_and_checkpoint(
            f,
            x,
            chunk_size=2,
            out_dim="mean",
            strategy=GradInForward(accumulate_dtype=accumulate_dtype),
        )
        (got,) = torch.autograd.grad(loss, [w])
        assert got.dtype == dtype
        return float((got.double() - exact).norm() / exact.norm())

    wide = w.detach().double().requires_grad_()
    plain = F.linear(x.double(), wide).square().mean()
    (exact,) = torch.autograd.grad(plain, [wide])
    eps = torch.finfo(dtype).eps
    assert error("auto") < eps
    assert error(None) > 2 * error("auto")


def test_autocast_is_not_for_backward() -> None:
    """Backward of a plain loss runs after the context, whose casts it must not get."""
    seen: list[bool] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    head = nn.Linear(4, 9)
    x = rows(6, 4, dtype=torch.float32)

    def f(x: Tensor) -> Tensor:
        return Spy.apply(head(x)).float().square().sum()  # type: ignore[no-any-return,no-untyped-call]

    with torch.autocast("cpu", torch.bfloat16):
        loss = chunk_and_checkpoint(
            f, x, chunk_size=2, out_dim="sum", strategy=IN_FORWARD
        )
        assert torch.is_autocast_enabled("cpu")
        plain = f(x)
    got = torch.autograd.grad(loss, [x, head.weight])
    want = torch.autograd.grad(plain, [x, head.weight])
    assert seen == [False] * 4
    for found, expected in zip(got, want, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_weight_that_autocast_has_cast_before() -> None:
    """A cast that is cached belongs to another graph."""
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        before = x @ w
        loss = chunk_and_checkpoint(
            lambda x: (x @ w).float().sum(),
            x,
            chunk_size=2,
            out_dim="sum",
            strategy=IN_FORWARD,
        )
        after = x @ w
    total = before.float().sum() + loss + after.float().sum()
    (got,) = torch.autograd.grad(total, [w])
    (want,) = torch.autograd.grad(3 * (x @ w).sum(), [w])
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_buffers_and_random_numbers_are_those_of_the_loop() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    x = rows(6, 4)
    torch.manual_seed(3)
    expected = sum(
        (model(piece).square().sum() for piece in x.split(2)), torch.zeros(())
    )
    want = torch.autograd.grad(expected, [x, *model.parameters()])
    state, random = model.state_dict(), torch.get_rng_state()
    state = {key: value.clone() for key, value in state.items()}
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    torch.manual_seed(3)
    loss = chunk_and_checkpoint(
        lambda x: model(x).square().sum(),
        x,
        chunk_size=2,
        out_dim="sum",
        strategy=IN_FORWARD,
    )
    got = torch.autograd.grad(loss, [x, *model.parameters()])
    assert_close(loss, expected, "loss")
    assert_all_close(got, want)
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert_close(value, state[key], key)


def test_a_parameter_that_changes_before_backward_does_no_harm() -> None:
    h = Head()
    want = h.gradients(h.plain())
    loss = h.call()
    with torch.no_grad():
        h.head.weight.mul_(2)
        h.x.zero_()
    assert_all_close(h.gradients(loss), want)


def test_hooks_of_others_on_saved_tensors() -> None:
    """What the call saves is offloaded, and nothing that a chunk saves."""
    h = Head()
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = h.call()
    assert sorted(filter(None, packed)) == sorted(leaf.numel() for leaf in h.leaves)
    assert_all_close(h.gradients(loss), h.gradients(h.plain()))
    with save_on_cpu():
        loss = h.call()
    assert_all_close(h.gradients(loss), h.gradients(h.plain()))


def test_inside_torchs_checkpoint_and_around_one() -> None:
    h = Head()

    def inner(x: Tensor, target: Tensor) -> Tensor:
        loss = checkpoint(h.mean, x, target, use_reentrant=False)
        assert isinstance(loss, Tensor)
        return loss

    def call() -> Tensor:
        return chunk_and_checkpoint(
            inner, h.x, h.target, chunk_size=3, out_dim="mean", strategy=IN_FORWARD
        )

    loss = checkpoint(call, use_reentrant=False)
    assert_all_close(h.gradients(loss), h.gradients(h.plain()))


def test_nested_in_another_call() -> None:
    h = Head()

    def f(x: Tensor, target: Tensor) -> Tensor:
        return chunk_and_checkpoint(
            h.sum, x, target, chunk_size=2, out_dim="sum", strategy=IN_FORWARD
        )

    for strategy in ("auto", IN_FORWARD, "non_reentrant"):
        options: Any = {"chunk_size": 5, "out_dim": "sum", "strategy": strategy}
        loss = chunk_and_checkpoint(f, h.x, h.target, **options)
        assert_all_close(h.gradients(loss), h.gradients(h.plain("sum")))


def test_per_row_weights_and_whole_tensors() -> None:
    w, temperature = rows(9, 4), rows()
    x, weights = rows(7, 4), rows(7)

    def f(x: Tensor, weights: Tensor, w: Tensor, temperature: Tensor) -> Tensor:
        return (weights * (x @ w.T / temperature.exp()).logsumexp(1)).mean()

    assert_same_as_plain(
        f,
        (x, weights, -w, temperature),  # an activation, passed whole
        chunk_size=3,
        batch_dim=(0, 0, None, None),
        out_dim="mean",
        strategy=IN_FORWARD,
        captured=(w,),
    )


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_inputs_that_are_not_contiguous(layout: str) -> None:
    """Liger: an input that is not contiguous gets a gradient of zeros."""
    h = Head(6)
    x = {
        "transposed": lambda: rows(4, 6).T,
        "expanded": lambda: rows(1, 4).expand(6, 4),
        "sliced": lambda: rows(6, 8)[:, ::2],
    }[layout]()
    x = x.detach().requires_grad_()
    assert_same_as_plain(
        h.mean, (x, h.target), chunk_size=4, out_dim="mean", strategy=IN_FORWARD
    )


def test_a_dim_other_than_the_first() -> None:
    model = net()
    assert_same_as_plain(
        lambda x: model(x).square().mean(),
        (rows(3, 7, 4),),
        chunk_size=2,
        batch_dim=1,
        out_dim="mean",
        strategy=IN_FORWARD,
        captured=model,
    )


def test_complex_inputs() -> None:
    w = torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.complex128, requires_grad=True)
    assert_same_as_plain(
        lambda x: (x @ w).abs().square().sum(),
        (x,),
        chunk_size=2,
        out_dim="sum",
        strategy=IN_FORWARD,
        captured=w,
    )


def test_many_gradients_at_once() -> None:
    h = Head()
    batch = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    got = torch.autograd.grad(h.call(), h.leaves, batch, is_grads_batched=True)
    want = torch.autograd.grad(h.plain(), h.leaves, batch, is_grads_batched=True)
    assert_all_close(got, want)


def test_nothing_is_held_after_backward() -> None:
    with without_gc():
        h = Head()
        loss = h.call()
        refs = [weakref.ref(h.x), weakref.ref(h.head.weight)]
        h.gradients(loss)
        del h, loss
        assert [ref() for ref in refs] == [None, None]


def test_chunks_are_gone_one_by_one() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def f(x: Tensor) -> Tensor:
        gc.collect()
        assert all(ref() is None for ref in seen)
        hidden = x.sin()
        seen.append(weakref.ref(hidden))
        return (hidden * hidden).sum()

    chunk_and_checkpoint(
        f, rows(8, 3), chunk_size=2, out_dim="sum", strategy=IN_FORWARD
    )
    assert len(seen) == 4


def test_an_empty_batch() -> None:
    h = Head(0)
    loss = h.call("sum")
    got = h.gradients(loss)
    assert loss.item() == 0
    assert_all_close(got, h.gradients(h.plain("sum")))


def test_a_loss_of_one_entry() -> None:
    w = rows(4)
    assert_same_as_plain(
        lambda x: (x * w).sin().sum().reshape(1, 1),
        (rows(5, 4),),
        chunk_size=2,
        out_dim="sum",
        strategy=IN_FORWARD,
        captured=w,
    )


def call(f: Callable[..., Any], out_dim: Any = "sum", **options: Any) -> Any:
    return chunk_and_checkpoint(
        f,
        rows(5, 4),
        chunk_size=2,
        out_dim=out_dim,
        strategy=IN_FORWARD,
        **options,
    )


@pytest.mark.parametrize(
    ("f", "out_dim", "message"),
    [
        (torch.sin, 0, r"one real number, but result is of .* shape \(2, 4\) and not"),
        (lambda x: x.sum(0), "sum", r"one real number.* shape \(4,\) and sum reduced"),
        (lambda x: (x * 1j).sum(), "sum", r"one real number, but .* torch.complex128"),
        (
            lambda x: (x.sum(), x.mean()),
            ("sum", "mean"),
            r"result\[0\], result\[1\] require one: detach .* strategy='auto'",
        ),
        (
            lambda x: {"loss": x.sum(), "hidden": x.sin()},
            {"loss": "sum", "hidden": 0},
            r"result\['loss'\], result\['hidden'\] require one",
        ),
    ],
)
def test_not_one_scalar(f: Callable[..., Any], out_dim: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(f, out_dim)


def test_another_result_in_a_later_chunk() -> None:
    calls: list[int] = []

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(0)
        a, b = x.sum(), x.mean()
        return (a.detach(), b) if len(calls) > 1 else (a, b.detach())

    with pytest.raises(RuntimeError, match=r"result\[0\], result\[1\] require one"):
        call(f, ("sum", "sum"))


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on"
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_are_those_of_torchs_own_chunked_loss(scale: float) -> None:
    x = torch.randn(50, 16, requires_grad=True)
    w = torch.randn(400, 16, requires_grad=True)
    target = torch.randint(400, (50,))
    target[3:20] = -100

    def f(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(F.linear(x, w), target, reduction="sum")
        return loss, (target != -100).sum()

    functions: Any = F
    modules: Any = nn
    options = modules.LinearCrossEntropyOptions(batch_chunk_size=16)
    theirs = functions.linear_cross_entropy(x, w, target, options=options)
    total, count = chunk_and_checkpoint(
        f, x, target, chunk_size=16, out_dim=("sum", "sum"), strategy=IN_FORWARD
    )
    assert_close(total / count, theirs, "loss")
    got = torch.autograd.grad(total / count * scale, [x, w])
    assert_all_close(got, torch.autograd.grad(theirs * scale, [x, w]))


def test_captures_that_were_computed() -> None:
    w = rows(4).exp()
    with pytest.raises(
        RuntimeError,
        match=r"computed from others, one of shape \(4,\) by ExpBackward0; pass it as",
    ):
        call(lambda x: (x * w).sum())
    hidden = {"w": w}

    def unfound(x: Tensor) -> Tensor:  # by a name that only running it computes
        w: Tensor = globals()["_STORE"]["w"]
        return (x * w).sum()

    globals()["_STORE"] = hidden
    try:
        with pytest.raises(RuntimeError, match="computed from others"):
            call(unfound)
    finally:
        del globals()["_STORE"]


def test_a_tensor_with_a_history_that_f_does_not_use() -> None:
    """What can be reached need not be used; the graph tells."""
    unused, w = rows(4).exp(), rows(4)
    assert_same_as_plain(
        lambda x: (x * w).sum() if x.shape else unused,
        (rows(5, 4),),
        chunk_size=2,
        out_dim="sum",
        strategy=IN_FORWARD,
        captured=w,
    )


def test_a_second_derivative_is_an_error() -> None:
    h = Head()
    with pytest.raises(RuntimeError, match=r"create_graph=True asks for: .*'auto'"):
        h.gradients(h.call(), create_graph=True)


def test_transforms_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="'grad_in_forward' cannot be exact here"):
        torch.func.grad(
            lambda x: chunk_and_checkpoint(
                torch.sum, x, chunk_size=2, out_dim="sum", strategy=IN_FORWARD
            )
        )(torch.ones(4))


def test_an_error_in_f_leaves_nothing_behind() -> None:
    h = Head()
    calls: list[int] = []

    def f(x: Tensor, target: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 2:
            raise ZeroDivisionError
        return h.mean(x, target)

    with pytest.raises(ZeroDivisionError):
        chunk_and_checkpoint(
            f, h.x, h.target, chunk_size=3, out_dim="mean", strategy=IN_FORWARD
        )
    assert all(leaf.grad is None for leaf in h.leaves)
    assert_all_close(h.gradients(h.call()), h.gradients(h.plain()))
