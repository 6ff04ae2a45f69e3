"""The private names of torch that we use, each with the reason why no public one does.

Each has a fallback for a torch that lacks it: slower, or seeing less, but never wrong.
Nothing else in the library may touch a private name of torch's, but for the pytree
registry (`_tree`) and the profiler's event tree (`diagnostics`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LEAF_NUMBER = 2**64 - 1  # the sequence number of every node that accumulates `.grad`


def _private(path: str, fallback: Any) -> Any:
    """Return what torch has at `path`, or the fallback."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return fallback


_transforms_active = _private("_C._are_functorch_transforms_active", lambda: False)
_is_alias_of = _private("_C._is_alias_of", None)
_next_number = _private("_C._autograd._get_sequence_nr", None)
_graph_task = _private("_C._current_graph_task_id", threading.get_ident)
_current_node = _private("_C._current_autograd_node", lambda: None)
_will_run = _private("_C._will_engine_execute_node", lambda _: True)
_run_backward = _private("autograd.Variable._execution_engine.run_backward", None)
_function_modes = _private("overrides._get_current_function_mode_stack", list)
_pop_mode = _private("overrides._pop_mode", None)
_push_mode = _private("overrides._push_mode", None)
_tracing = _private("_guards.TracingContext.try_get", lambda: None)
_dispatch = "utils._python_dispatch."
_dispatch_modes = _private(f"{_dispatch}_get_current_dispatch_mode_stack", list)
_pop_dispatch_mode = _private(f"{_dispatch}_pop_mode", None)
_push_dispatch_mode = _private(f"{_dispatch}_push_mode", None)
_fake_tensor = _private("_subclasses.FakeTensor", ())
_weak_storage = _private("multiprocessing.reductions.StorageWeakRef", None)
_private_device = _private("_C._get_privateuse1_backend_name", lambda: "privateuseone")


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is open.

    torch has no public test for either. Without one, torch itself refuses the
    saved-tensor hooks and the Functions of a chunk under a transform.
    """
    return bool(_transforms_active()) or getattr(forward_ad, "_current_level", -1) >= 0


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory, also for those that have no data pointer.

    `untyped_storage().data_ptr()` is 0 for meta and fake tensors, and an error for
    sparse ones. In doubt, yes.
    """
    if _is_alias_of is not None:
        return bool(_is_alias_of(a, b))
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` is neither meta nor fake.

    Fake tensors have no public type.
    """
    return not tensor.is_meta and not isinstance(tensor, _fake_tensor)


def version(tensor: Tensor) -> int | None:
    """Return how often the memory of `tensor` was written to; None if not counted.

    Public code sees this number only in the error that it causes.
    """
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def memory(tensor: Tensor) -> tuple[object, int] | None:
    """Return which memory `tensor` is in, and from where on; None if in none now.

    `Tensor.data = ...` changes that, and no version. Memory that is given back and
    taken again, as FSDP does, is the same: so not its address, but torch's handle, of
    which a weak reference keeps it from being used for another memory.
    """
    try:
        storage = tensor.untyped_storage()
        known = bool(storage.data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse, or fake
        return None
    if not known or _weak_storage is None:
        return None
    return _weak_storage(storage), int(tensor.storage_offset())


def next_number() -> int | None:
    """Return the sequence number that this thread's next node of a graph will have.

    Nodes are numbered as they are made, so that the number tells a node of a chunk's
    graph from one that was there before; torch has no public way to tell. Without
    numbers (None) a graph counts as one that cannot be told apart.
    """
    return None if _next_number is None else _next_number()


# The sequence number of a node. Called for each node of each chunk.
number: Callable[[Node], int] = methodcaller("_sequence_nr")


def graph_task() -> int:
    """Return a number for the backward that is running; no two at once have the same.

    A node has no public way to tell one backward through it from another. The fallback
    is right as long as no backward starts another through the same nodes.
    """
    task: int = _graph_task()
    return task


def current_node() -> Node | None:
    """Return the node that the running backward is at, None if unknown."""
    node: Node | None = _current_node()
    return node


def will_run(node: Node | None) -> bool:
    """Whether the running backward wants a gradient from the edge to `node`.

    `ctx.needs_input_grad` only says that the input requires one. torch refuses to tell
    for a leaf whose gradient was asked for by `torch.autograd.grad`, and that is yes.
    """
    if node is None:
        return False
    try:
        return bool(_will_run(node))
    except RuntimeError:
        return True


def gradients(
    outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return what `torch.autograd.grad` does, None for what is unused.

    Straight to the engine: the checks of the public function take longer than a small
    chunk's backward, and what they check holds here.
    """
    if _run_backward is None:
        return torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run_backward(
        tuple(outputs), tuple(given), False, False, tuple(inputs), True, False
    )
    return found


_MUTING = threading.RLock()


@contextmanager
def hooks_muted(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Keep the hooks of tensors from seeing the gradients of single chunks.

    torch runs the hooks of a tensor whenever its gradient is asked for.
    """
    if not any(map(has_tensor_hooks, tensors)):
        yield
        return
    with _MUTING:  # so that no two take them away, and one gives back none
        hooks = [(t, t._backward_hooks) for t in tensors if has_tensor_hooks(t)]  # noqa: SLF001
        for tensor, _ in hooks:
            tensor._backward_hooks = None  # noqa: SLF001
        try:
            yield
        finally:
            for tensor, own in hooks:
                tensor._backward_hooks = own  # noqa: SLF001


def has_hooks(node: Node) -> bool:
    """Whether saved-tensor hooks took the first tensor that `node` saved.

    torch cannot be asked for the hooks that are active before 2.9, but it takes no
    second pair of hooks for one tensor. The first tensor must be one of ours. In doubt,
    yes.
    """
    saved: Any = getattr(node, "_raw_saved_tensors", None)
    if saved is None:
        return True
    try:
        saved[0].register_hooks(_same, _same)
    except RuntimeError:
        return True
    return False


def _same(tensor: Tensor) -> Tensor:
    return tensor


def saved_by(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that `node` saved for backward.

    The attributes that hold them are documented, but not by name.
    """
    for name in _saving_attributes(type(node)):
        value = getattr(node, name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item


def has_node_hooks(node: Node) -> bool:
    """Whether hooks hang on a node itself. In doubt, yes.

    A node cannot be asked, but a hook's handle knows the others of its kind.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        hooks = getattr(handle, "hooks_dict_ref", lambda: None)()
        alone = hooks is not None and len(hooks) == 1
        handle.remove()
        if not alone:
            return True
    return False


def _nothing(*_: object) -> None:
    """Hang on a node, and change nothing."""


ALPHA = "_saved_alpha"  # what some products are multiplied by
_FACTORS = {
    "MmBackward0": {0: "_saved_self", 1: "_saved_mat2"},
    "AddmmBackward0": {1: "_saved_mat1", 2: "_saved_mat2"},
}


def factors(node: Node) -> dict[int, object] | None:
    """Return the factors of a product, by the index of their gradients.

    None if `node` is not that of a product, or they cannot be had more than once, as
    those that a checkpoint computes. A factor is None if it was not saved.
    """
    names = _FACTORS.get(node.name())
    if names is None:
        return None
    try:
        return {index: getattr(node, name, None) for index, name in names.items()}
    except RuntimeError:
        return None


@functools.cache
def _saving_attributes(kind: type) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, *(["saved_tensors"] if hasattr(kind, "saved_tensors") else []))


def function_modes() -> list[TorchFunctionMode]:
    """Return the function modes of this thread, the outermost first.

    `torch.get_default_device` tells of one kind of them only. The fallback sees none.
    """
    found: list[TorchFunctionMode] = _function_modes()
    return found


@contextmanager
def in_function_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Run under exactly these function modes, whatever the current ones are.

    Entering a mode anew would call its `__enter__`, which need not work twice.
    """
    current = function_modes()
    _replace_modes(len(current), modes)
    try:
        yield
    finally:
        _replace_modes(len(modes), current)


def _replace_modes(count: int, modes: Sequence[TorchFunctionMode]) -> None:
    for _ in range(count):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, the outermost first.

    torch has no public way to ask for them. The fallback sees none.
    """
    found: list[TorchDispatchMode] = _dispatch_modes()
    return found


@contextmanager
def in_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Run under these dispatch modes as well.

    Entering a mode anew would call its `__enter__`, which may begin something new.
    """
    for mode in modes:
        _push_dispatch_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_dispatch_mode()


def private_device() -> str:
    """Return the type of device that torch keeps for others, under its present name.

    torch can be told the name, but not asked for it.
    """
    name: str = _private_device()
    return name


def is_tracing() -> bool:
    """Whether a compiler is tracing, with tensors that have no values.

    Up to torch 2.4 it does so with our saved-tensor hooks active. The public
    `torch.compiler.is_compiling` says no there.
    """
    return _tracing() is not None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether `Tensor.register_hook` or `retain_grad` has been called on `tensor`."""
    return bool(getattr(tensor, "_backward_hooks", True)) or tensor.retains_grad


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of one module, to be changed in place.

    `register_buffer` cannot take the place of one that is there. Those of a scripted
    module cannot be replaced: they come in a dict of their own.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module.named_buffers(recurse=False))
    return module._buffers  # noqa: SLF001
