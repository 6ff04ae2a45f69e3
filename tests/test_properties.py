"""Properties of random calls, against plain `f` and against the plain loop.

Each test makes a share of the profile's `max_examples` (see `examples`). The shares add
up to 9: 450 examples in profile dev, 4,500 in ci, 90,000 in nightly.
Equal means 1e-10 relative in float64, 1e-5 in float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkcheck import chunk_and_checkpoint
from trees import (
    CONTAINERS,
    DTYPES,
    LAYOUTS,
    MAPPINGS,
    NOISE_OPS,
    REPLAYING,
    ROW_OPS,
    STRATEGIES,
    WHOLE_OPS,
    Array,
    Captures,
    Case,
    Interrupted,
    Output,
    Prepared,
    Program,
    as_rows,
    cases,
    children,
    is_reentrant,
    leaves,
    mapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trees import AnyStrategy


SHARES: list[float] = []


def examples(share: float) -> Callable[[Any], Any]:
    """Make a share of the examples that the profile asks for."""
    SHARES.append(share)
    return settings(
        max_examples=max(1, round(share * settings().max_examples)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# ------------------------------------------------------------------------ comparing


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to rounding."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (found.is_floating_point() or found.is_complex()):
        return torch.equal(found, expected)
    if expected.numel() == 0:
        return True
    scale = max(1.0, expected.detach().abs().max().item())
    return (found - expected).detach().abs().max().item() <= tolerance * scale


def assert_same(
    found: Any,
    expected: Any,
    tolerance: float,
    path: str = "result",
    ordered: bool = True,
) -> None:
    """Assert that two results agree in structure, types, values and `requires_grad`."""
    assert type(found) is type(expected), path
    inner = children(expected)
    if inner is not None:
        there = {key: child for _, key, child in children(found) or ()}
        keys = [key for _, key, _ in inner]
        if ordered or type(expected) not in MAPPINGS:
            assert list(there) == keys, path
        assert set(there) == set(keys), path
        for name in ("default_factory", "maxlen"):
            assert getattr(found, name, 0) == getattr(expected, name, 0), path
        for step, key, child in inner:
            assert_same(there[key], child, tolerance, path + step, ordered)
    elif isinstance(expected, Tensor):
        assert found.requires_grad == expected.requires_grad, f"{path}: requires_grad"
        assert found.device == expected.device, path
        assert close(found, expected, tolerance), f"{path}: {found} for {expected}"
    elif expected is not found:
        assert found == expected or (math.isnan(found) and math.isnan(expected)), path


def gradients(case: Case, run: Prepared, result: Any) -> dict[str, Tensor | None]:
    """Return the gradients of all leaves of the graph, for fixed ones of the result."""
    outputs: list[Tensor] = []
    upstream: list[Tensor] = []
    for index, (path, leaf) in enumerate(sorted(leaves(result), key=lambda x: x[0])):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        generator = torch.Generator().manual_seed(len(path) + index)
        gradient = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        if index not in case.dropped:
            outputs.append(leaf)
            upstream.append(gradient.to(leaf.device))
    if not outputs:
        return dict.fromkeys(run.roots)
    if case.by_grad:
        found = torch.autograd.grad(
            outputs, list(run.roots.values()), upstream, allow_unused=True
        )
        return dict(zip(run.roots, found, strict=True))
    torch.autograd.backward(outputs, upstream)
    return {name: root.grad for name, root in run.roots.items()}


def assert_same_gradients(
    found: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    tolerance: float,
) -> None:
    """Assert that gradients agree, and are None where expected."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        ours = found[name]
        assert (ours is None) == (gradient is None), f"{name}: {ours} for {gradient}"
        if ours is not None and gradient is not None:
            assert close(ours, gradient, tolerance), f"{name}: {ours} for {gradient}"


def snapshot(run: Prepared) -> list[tuple[str, object]]:
    """Return all that a call must leave as it is."""
    containers = [
        (type(x), repr(mapped(lambda _: 0, x))) for x in (run.args, run.kwargs)
    ]
    state: list[tuple[str, object]] = [("containers", containers)]
    for path, value in run.given:
        state.append((path, id(value)))
        if isinstance(value, Tensor):
            state.append((path, value._version))
            state.append((path, (value.stride(), value.requires_grad)))
            state.append((path, value.detach().cpu().tolist()))
    return state


def assert_fresh(run: Prepared, result: Any) -> None:
    """Assert that no tensor of the result is in the memory of an argument."""
    taken = {t.untyped_storage().data_ptr() for t in run.tensors.values() if t.numel()}
    for path, leaf in leaves(result, "result"):
        if isinstance(leaf, Tensor) and leaf.numel():
            assert leaf.untyped_storage().data_ptr() not in taken, path


def assert_equals_plain(case: Case, device: torch.device) -> None:
    """Assert all that holds for one call, in comparison with plain `f`."""
    plain, ours = case.prepare(device), case.prepare(device)
    before = snapshot(ours)
    expected = plain.f(*plain.args, **plain.kwargs)
    found = case.call(ours)
    assert snapshot(ours) == before
    assert_same(found, expected, case.tolerance, ordered=not case.program.reorders)
    assert_fresh(ours, found)
    assert_same_gradients(
        gradients(case, ours, found), gradients(case, plain, expected), case.tolerance
    )
    assert snapshot(ours) == before


# ----------------------------------------------------------------------- properties


@given(case=cases())
@examples(2)
def test_equals_plain_f(case: Case, device: torch.device) -> None:
    assert_equals_plain(case, device)


@given(case=cases(ops=("view",), vandals=False, min_rows=1))
@examples(0.5)
def test_a_chunk_is_as_contiguous_as_its_whole(
    case: Case, device: torch.device
) -> None:
    assert_equals_plain(case, device)


@given(case=cases(vandals=False))
@examples(0.5)
def test_every_strategy_gives_the_same(case: Case, device: torch.device) -> None:
    plain = case.prepare(device)
    expected = plain.f(*plain.args, **plain.kwargs)
    wanted = gradients(case, plain, expected)
    values: list[list[Any]] = []
    for strategy in STRATEGIES:
        note(f"{strategy=}")
        this = case.replace(strategy=strategy)
        if is_reentrant(strategy) and (case.by_grad or case.program.captures.history):
            continue  # what it cannot do raises: see test_gradients
        run = this.prepare(device)
        found = this.call(run)
        assert_same(found, expected, case.tolerance)
        assert_same_gradients(gradients(this, run, found), wanted, case.tolerance)
        values.append([leaf for _, leaf in leaves(found) if isinstance(leaf, Tensor)])
    for other in values[1:]:  # to the bit, since the chunks are the same
        assert all(map(torch.equal, values[0], other))


@given(case=cases(vandals=False, min_rows=1), data=st.data())
@examples(0.5)
def test_every_chunk_size_gives_the_same(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    assume(case.out_dim != "auto")  # which some chunk sizes need
    plain = case.prepare(device)
    expected = plain.f(*plain.args, **plain.kwargs)
    wanted = gradients(case, plain, expected)
    sizes = data.draw(st.permutations([*range(1, case.rows + 2), None]))[:4]
    for size in sizes:
        note(f"chunk_size={size}")
        this = case.replace(chunk_size=size)
        run = this.prepare(device)
        found = this.call(run)
        assert_same(found, expected, case.tolerance)
        assert_same_gradients(gradients(this, run, found), wanted, case.tolerance)


@given(case=cases(keywords=False))
@examples(0.5)
def test_all_forms_give_the_same(case: Case, device: torch.device) -> None:
    results = []
    for form in ("immediate", "curried", "decorator"):
        run = case.prepare(device)
        found = case.call(run, form)
        results.append((found, gradients(case, run, found), run.calls))
    first, *others = results
    for found, grads, calls in others:
        assert_same(found, first[0], 0.0)
        assert_same_gradients(grads, first[1], 0.0)
        assert calls == first[2]


@given(
    case=cases(vandals=False, min_rows=2),
    kind=st.sampled_from(MAPPINGS),
    data=st.data(),
)
@examples(0.25)
def test_dicts_are_matched_by_key(
    case: Case, kind: type, data: st.DataObject, device: torch.device
) -> None:
    """Their order depends on the rows, and all entries look alike."""
    first = next(i for i, a in enumerate(case.arrays) if a.rows == case.rows)
    keys = data.draw(st.permutations(("b", "a", 7)))
    values = [Output("sum", (first,) * n) for n in (1, 2, 3)]
    pairs = list(zip(keys, values, strict=True))
    case = case.replace(
        program=Program(
            defaultdict(None, pairs) if kind is defaultdict else kind(pairs),
            case.program.captures,
            reorders=True,
        ),
        chunk_size=data.draw(st.integers(1, case.rows - 1)),
        out_dim=0,
    )
    assert_equals_plain(case, device)
    run = case.prepare(device)
    first_order: list[object] = []

    def f(*args: Any, **kwargs: Any) -> Any:
        result = run.f(*args, **kwargs)
        first_order.extend(result if not first_order else ())
        return result

    f.__signature__ = run.f.__signature__  # type: ignore[attr-defined]
    assert list(case.call(Prepared(f, run.args, run.kwargs, run.roots))) == first_order


def frozen(case: Case) -> Case:
    """Return the same call with nothing that requires a gradient."""

    def freeze(leaf: Any) -> Any:
        if isinstance(leaf, Array):
            return Array(**{**vars(leaf), "grad": "none"})
        return leaf

    program = Program(
        **{**vars(case.program), "captures": Captures(False, False, False, False)}
    )
    return case.replace(
        args=mapped(freeze, case.args),
        kwargs=mapped(freeze, case.kwargs),
        program=program,
    )


@given(
    case=cases(strategies=REPLAYING),
    mode=st.sampled_from(("no_grad", "inference_mode", "frozen")),
)
@examples(0.5)
def test_without_gradients_f_runs_once_per_chunk(
    case: Case, mode: str, device: torch.device
) -> None:
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    case = frozen(case) if mode == "frozen" else case
    plain, ours = case.prepare(device), case.prepare(device)
    before = snapshot(ours)
    with context.get(mode, torch.enable_grad)():
        # An argument that f returns as it is would still require its gradient.
        expected = mapped(detached, plain.f(*plain.args, **plain.kwargs))
        found = case.call(ours)
        assert_same(found, expected, case.tolerance, ordered=not case.program.reorders)
    assert snapshot(ours) == before
    assert_fresh(ours, found)
    assert ours.calls["f"] == len(case.chunks)


def detached(leaf: Any) -> Any:
    """Return a tensor without its gradient, and anything else as it is."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def random_state(device: torch.device) -> list[int]:
    """Return the state of every generator that `f` may use."""
    states = torch.get_rng_state().tolist()
    if device.type == "cuda":
        states += torch.cuda.get_rng_state(device).tolist()
    return states


@given(case=cases(strategies=REPLAYING, ops=NOISE_OPS, vandals=False))
@examples(0.5)
def test_random_numbers_are_those_of_the_loop(case: Case, device: torch.device) -> None:
    torch.manual_seed(case.rows)
    looped = case.prepare(device)
    expected = case.loop(looped)
    after_loop = random_state(device)
    wanted = gradients(case, looped, expected)
    assert random_state(device) == after_loop

    torch.manual_seed(case.rows)
    ours = case.prepare(device)
    found = case.call(ours)
    assert random_state(device) == after_loop
    grads = gradients(case, ours, found)
    assert random_state(device) == after_loop  # recompute leaves it alone
    assert_same(found, expected, case.tolerance)
    assert_same_gradients(grads, wanted, case.tolerance)


@given(case=cases(vandals=False, ops=[op for op in ROW_OPS if op != "view"]))
@examples(0.25)
def test_the_loop_of_these_tests_equals_plain_f(
    case: Case, device: torch.device
) -> None:
    plain, looped = case.prepare(device), case.prepare(device)
    expected = plain.f(*plain.args, **plain.kwargs)
    assert_same(case.loop(looped), expected, case.tolerance)


@given(case=cases(out="default", vandals=False))
@examples(0.5)
def test_default_out_dim_is_right_or_refused(case: Case, device: torch.device) -> None:
    # Rows may be anywhere in the results. The contract covers every dim but 0, where a
    # size that happens to be the chunk's is taken at its word.
    dims = [o.place(_dims_of(case, o)) for o in case.outputs]
    right = [
        case.shared is not None and -n <= case.shared < n and case.shared % n == dim
        for dim, n in zip(dims, [_dims_of(case, o) for o in case.outputs], strict=True)
    ]
    assume(all(right) or case.shared != 0)
    try:
        assert_equals_plain(case, device)
    except ValueError as error:
        assert "out_dim" in str(error) or "rows along dim" in str(error)  # noqa: PT017
        assert "result" in str(error)  # noqa: PT017


@given(
    size=st.integers(1, 5),
    chunks=st.integers(2, 4),
    ndim=st.integers(2, 4),
    strategy=st.sampled_from(STRATEGIES),
    data=st.data(),
)
@examples(0.25)
def test_a_default_out_dim_that_cannot_be_told_is_refused(
    size: int,
    chunks: int,
    ndim: int,
    strategy: AnyStrategy,
    data: st.DataObject,
    device: torch.device,
) -> None:
    """Every chunk has the same size in all dims, and its rows may be anywhere."""
    dim = data.draw(st.integers(1, ndim - 1))
    place = data.draw(st.integers(0, ndim - 1))
    shape = [size] * ndim
    shape[dim] *= chunks
    case = Case(
        args=(Array(1, tuple(shape), dim, dim),),
        kwargs={},
        program=Program(Output("softmax", (0,), place)),
        rows=size * chunks,
        chunk_size=size,
        batch_dim=dim,
        out_dim="auto",
        strategy=strategy,
    )
    run = case.prepare(device)

    def f(x: Tensor) -> Tensor:
        return x.sin().movedim(dim, place)

    ours = Prepared(f, run.args, run.kwargs, run.roots)
    with pytest.raises(ValueError, match=r"result has shape .* write out_dim="):
        case.call(ours)
    found = case.replace(out_dim=place).call(ours)
    assert_same(found, f(run.args[0]), case.tolerance)


@given(
    rows=st.integers(2, 5),
    size=st.integers(1, 4),
    depends=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
)
@examples(0.25)
def test_one_row_that_passes_whole_is_not_taken_for_a_chunks(
    rows: int, size: int, depends: bool, strategy: AnyStrategy, device: torch.device
) -> None:
    x, one = (
        torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True)
        for n in (rows, 1)
    )

    def f(x: Tensor, one: Tensor) -> Tensor:
        return x * one if depends else one.sin()

    def call(out_dim: Any) -> Any:
        return chunk_and_checkpoint(
            f, x, one, chunk_size=size, out_dim=out_dim, strategy=strategy
        )

    if size == 1:  # no chunk tells
        with pytest.raises(ValueError, match=r"result has shape .* out_dim=0"):
            call("auto")
    elif not depends:
        with pytest.raises(ValueError, match=r"result has shape .* out_dim"):
            call("auto")
    else:
        assert_same(call("auto"), f(x, one), 1e-10)
    assert_same(call(0 if depends else None), f(x, one), 1e-10)


@given(
    case=cases(vandals=False, out="default", ops=("scale",), min_rows=2),
    data=st.data(),
)
@examples(0.25)
def test_a_result_without_rows_is_the_first_chunks(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    """The value, also where it does depend on the rows, if it has no gradient."""
    first, array = next(
        (i, a) for i, a in enumerate(case.arrays) if a.rows == case.rows
    )
    assert array.dim is not None
    case = case.replace(out_dim=None, chunk_size=data.draw(st.integers(1, case.rows)))
    whole, ours = case.prepare(device), case.prepare(device)

    def f(*args: Any, **kwargs: Any) -> Tensor:
        given = [leaf for _, leaf in (*leaves(args), *leaves(kwargs))]
        x = [leaf for leaf in given if isinstance(leaf, Tensor)][first]
        return as_rows(x.detach(), array.dim or 0).sum().sin()

    f.__signature__ = whole.f.__signature__  # type: ignore[attr-defined]
    start, stop = case.chunks[0]
    tensors = [leaf for _, leaf in whole.given if isinstance(leaf, Tensor)]
    part = tensors[first].narrow(array.dim, start, stop - start)
    expected = as_rows(part, array.dim).sum().sin()
    found = case.call(Prepared(f, ours.args, ours.kwargs, ours.roots))
    assert isinstance(found, Tensor)
    assert not found.requires_grad
    assert_same(found, expected.detach(), case.tolerance)


def _dims_of(case: Case, output: Output) -> int:
    """Return how many dims a result has, by computing it."""
    run = case.replace(
        program=Program(output, case.program.captures), out_dim=None
    ).prepare()
    found = run.f(*run.args, **run.kwargs)
    first: Tensor = next(leaf for _, leaf in leaves(found))
    return first.dim()


# --------------------------------------------------------------------------- errors


def assert_refused(
    case: Case, device: torch.device, kind: type[Exception], *parts: str
) -> None:
    """Assert that a call raises before `f` has run, with all parts in the message."""
    run = case.prepare(device)
    before = snapshot(run)
    with pytest.raises(kind) as caught:
        case.call(run)
    assert run.calls["f"] == 0
    assert snapshot(run) == before
    for part in parts:
        assert part in str(caught.value)


@given(case=cases(min_rows=2, vandals=False), data=st.data())
@examples(0.5)
def test_wrong_sizes_are_listed_in_one_error(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    full = sorted({a.key for _, a in case.cut if a.rows == case.rows})
    assume(len(full) > 1)
    wrong = data.draw(
        st.sets(st.sampled_from(full), min_size=1, max_size=len(full) - 1)
    )
    size = data.draw(st.integers(0, 13).filter(lambda size: size not in (1, case.rows)))

    def resize(leaf: Any) -> Any:
        return (
            leaf.resized(size)
            if isinstance(leaf, Array) and leaf.key in wrong
            else leaf
        )

    case = case.replace(
        args=mapped(resize, case.args), kwargs=mapped(resize, case.kwargs)
    )
    lines = [
        f"{path} of shape {a.shape}: size {a.rows} along dim {a.dim}"
        for path, a in case.cut
    ]
    assert_refused(case, device, ValueError, *lines)


@given(case=cases(vandals=False), data=st.data())
@examples(0.5)
def test_wrong_dims_name_the_leaf(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    positional = [path for path, _ in leaves(case.args, "args")]
    path, array = data.draw(st.sampled_from(case.cut))
    assume(
        path in positional and not any(_holds_array(v) for v in case.kwargs.values())
    )
    n = len(array.shape)
    bad = data.draw(
        st.one_of(
            st.integers(n, n + 3),
            st.integers(-n - 3, -n - 1),
            st.sampled_from((True, 0.0, "0", "sum", object)),
        )
    )
    dims = {p: a.written for p, a in case.cut} | {path: bad}

    def exact(node: Any, path: str) -> Any:
        inner = children(node)
        if inner is None:
            return dims.get(path)
        parts = [exact(child, path + step) for step, _, child in inner]
        if type(node) in MAPPINGS:
            return dict(zip(node, parts, strict=True))
        return tuple(parts)

    batch_dim = exact(case.args, "args")
    where = "batch_dim" + _prefix_path(case.args, path)
    case = case.replace(batch_dim=batch_dim)
    if type(bad) is int:
        parts = [path, str(array.shape), f"no dim {bad}", where]
        assert_refused(case, device, ValueError, *parts)
    else:
        assert_refused(case, device, TypeError, where, repr(bad), type(bad).__name__)


def _holds_array(node: Any) -> bool:
    return any(isinstance(a, Array) and a.shape for _, a in leaves(node))


def _prefix_path(node: Any, wanted: str, path: str = "args", where: str = "") -> str:
    """Return where a prefix of nested tuples and dicts speaks of a leaf."""
    if path == wanted:
        return where
    for index, (step, key, child) in enumerate(children(node) or ()):
        if wanted == path + step or wanted.startswith(
            (path + step + "[", path + step + ".")
        ):
            here = key if type(node) in MAPPINGS else index
            return _prefix_path(child, wanted, path + step, f"{where}[{here!r}]")
    raise AssertionError(wanted)


@given(case=cases(vandals=False), data=st.data())
@examples(0.25)
def test_a_batch_dim_of_another_shape_is_refused(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    assume(not case.kwargs)
    entries: list[Any] = [None] * len(case.args)
    change = data.draw(st.sampled_from(("longer", "shorter", "deeper", "key")))
    if change == "longer":
        entries.append(0)
    elif change == "shorter":
        entries.pop()
    else:
        index = data.draw(st.sampled_from(range(len(entries))))
        inner = children(case.args[index])
        keys = ["nowhere"] if inner is None else [*(k for _, k, _ in inner), "nowhere"]
        entries[index] = dict.fromkeys(keys, 0) if change == "key" else (0,) * len(keys)
    refused = case.replace(batch_dim=tuple(entries))
    assert_refused(refused, device, ValueError, "batch_dim", "args")


@given(case=cases(min_rows=1, strategies=REPLAYING), data=st.data())
@examples(0.25)
def test_an_exception_keeps_its_type_and_says_where(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    index = data.draw(st.sampled_from(range(len(case.chunks))))
    program = Program(**{**vars(case.program), "stop_after": index})
    run = case.replace(program=program).prepare(device)
    before = snapshot(run)
    with pytest.raises(Interrupted) as caught:
        case.call(run)
    start, stop = case.chunks[index]
    first = f"while running rows {start}:{stop} of {case.rows}"
    assert caught.value.__notes__[0] == first
    assert snapshot(run) == before


@given(case=cases(vandals=False, min_rows=1), data=st.data())
@examples(0.25)
def test_writing_into_an_argument_is_refused(
    case: Case, data: st.DataObject, device: torch.device
) -> None:
    candidates = [
        (path, a)
        for path, a in case.given
        if isinstance(a, Array) and a.layout != "expanded" and 0 not in a.shape
    ]
    assume(candidates)
    path, _ = data.draw(st.sampled_from(candidates))
    case = frozen(case)
    run = case.prepare(device)
    position = [p for p, _ in run.given].index(path)
    paths = [p for p, t in run.given if t is run.given[position][1]]  # passed twice

    def writes(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for _, leaf in (*leaves(args), *leaves(kwargs))]
        given[position].logical_not_()
        return run.f(*args, **kwargs)

    writes.__signature__ = run.f.__signature__  # type: ignore[attr-defined]
    ours = Prepared(writes, run.args, run.kwargs, run.roots)
    with pytest.raises(RuntimeError) as caught:
        case.call(ours)
    start, stop = case.chunks[0]
    assert any(f"f wrote into {p} " in str(caught.value) for p in paths)
    assert f"rows {start}:{stop} of {case.rows}" in str(caught.value)


FAULTS: tuple[str, ...] = (
    "row missing",
    "row too many",
    "row kept",
    "dtype",
    "structure",
    "constant",
)


@given(
    case=cases(vandals=False, min_rows=2), fault=st.sampled_from(FAULTS), data=st.data()
)
@examples(0.5)
def test_results_that_do_not_fit_are_refused(
    case: Case, fault: str, data: st.DataObject, device: torch.device
) -> None:
    """One chunk gives something else than it should."""
    case = case.replace(
        chunk_size=data.draw(st.integers(1, case.rows - 1)),
        out_dim=(0, None),
        program=Program(("scale",)),
        strategy=data.draw(st.sampled_from(REPLAYING)),
    )
    index = data.draw(
        st.integers(0 if fault.startswith("row") else 1, len(case.chunks) - 1)
    )
    start, stop = case.chunks[index]
    run = case.prepare(device)
    array_position = next(
        i
        for i, (_, a) in enumerate(case.given)
        if isinstance(a, Array) and a.rows == case.rows
    )
    dim = [a for _, a in case.given][array_position].dim
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        given = [leaf for _, leaf in (*leaves(args), *leaves(kwargs))]
        x = given[array_position].movedim(dim, 0) * 2
        wrong, calls = calls == index, calls + 1
        if not wrong:
            return x, 5
        match fault:
            case "row missing":
                return x[1:], 5
            case "row too many":
                return torch.cat([x, x[:1]]), 5
            case "row kept":
                return x.sum(0, dtype=x.dtype)[None].expand(
                    x.shape[0] + 1, *x.shape[1:]
                ), 5
            case "dtype":
                return x.to(torch.complex64), 5
            case "structure":
                return x, [5]
            case _:
                return x, 6

    faulty.__signature__ = run.f.__signature__  # type: ignore[attr-defined]
    ours = Prepared(faulty, run.args, run.kwargs, run.roots)
    before = snapshot(ours)
    with pytest.raises(ValueError, match="result") as caught:
        case.call(ours)
    message = str(caught.value)
    assert f"rows {start}:{stop} of {case.rows}" in message
    assert calls == index + 1
    if not fault.startswith("row"):
        first = case.chunks[0]
        assert f"rows {first[0]}:{first[1]} of {case.rows}" in message
    assert snapshot(ours) == before
    assert ("result[0]" in message) == (fault == "dtype" or fault.startswith("row"))
    if fault in ("structure", "constant"):
        assert "result[1]" in message


# ------------------------------------------------- that these tests can see what fails


def test_there_are_enough_examples() -> None:
    assert sum(SHARES) == 9  # as the docstring says
    assert sum(SHARES) * settings.get_profile("ci").max_examples > 2000


def test_the_random_cases_cover_the_ground() -> None:
    """Every kind of thing is drawn, so that a change of the draws is noticed."""
    seen: set[object] = set()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(case=cases())
    def look(case: Case) -> None:
        for a in case.arrays:
            seen.update((a.dtype, a.layout, a.grad, f"{len(a.shape)} dims"))
            seen.add("whole" if a.dim is None else f"size {min(a.rows or 0, 2)}")
        for node in (case.args, case.program.outputs):
            stack = [node]
            while stack:
                seen.add(type(stack[-1]))
                stack += [child for *_, child in children(stack.pop()) or ()]
        seen.update(f"op {o.op}" for o in case.outputs)
        seen.add(f"batch_dim {type(case.batch_dim).__name__}")
        seen.add(f"out_dim {type(case.out_dim).__name__}")
        seen.add(type(case.strategy))
        seen.add(f"rows {min(case.rows, 2)}")
        seen.add(f"chunks {min(len(case.chunks), 3)}")

    look()
    assert {*CONTAINERS, *DTYPES, *LAYOUTS, "leaf", "view", "history"} <= seen
    assert {f"{n} dims" for n in range(5)} <= seen
    assert {"whole", "size 0", "size 1", "size 2"} <= seen
    assert {f"batch_dim {kind}" for kind in ("int", "tuple", "dict")} <= seen
    assert {f"out_dim {kind}" for kind in ("str", "int", "tuple", "NoneType")} <= seen
    ops = {f"op {op}" for op in (*ROW_OPS, *WHOLE_OPS)}
    assert len(ops & seen) > 0.7 * len(ops)
    assert {type(strategy) for strategy in STRATEGIES} <= seen
    assert {"rows 0", "rows 1", "rows 2", "chunks 1", "chunks 2", "chunks 3"} <= seen
