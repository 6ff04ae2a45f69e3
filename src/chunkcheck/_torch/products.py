"""Products: backward through one chunk, large gradients added as they are computed.

The gradient of a weight is nearly always a product of two matrices, which is added to
the sum in one operation, without a temporary of the weight's size. Where it is not, it
is taken from the node that computes it. Knows the graph of a chunk, and no `f`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from chunkcheck._torch.compat import (
    ALPHA,
    LEAF_NUMBER,
    factors,
    gradients,
    has_node_hooks,
    has_tensor_hooks,
    number,
    share_storage,
)
from chunkcheck._torch.gradients import Gradient, Sum
from chunkcheck._torch.tensors import is_plain, is_tensor

# From here on a gradient is added to its sum as soon as it is there, so that no two of
# one chunk are held at once. It takes a hook, and longer if the gradient is small.
LARGE = 2**18  # bytes

_Users: TypeAlias = Mapping[Node, Sequence[tuple[Node, int]]]  # and by which gradient

_TRANSPOSING = ("TBackward0", "PermuteBackward0", "TransposeBackward0")


def add_gradients(
    ends: Iterable[tuple[Tensor, Tensor]],
    wanted: Sequence[tuple[Tensor, Gradient]],
    nodes: Sequence[Node],
    chunk: int,
) -> None:
    """Run backward through one chunk and add what it gives.

    Args:
        ends: The results to start from, each with its gradient.
        wanted: Leaves, each with what its gradient is added to.
        nodes: The graph of the chunk.
        chunk: The chunk.

    """
    left = _taken_at_once(wanted, nodes, chunk)
    outputs, of_outputs = zip(*ends, strict=True)
    found = gradients(outputs, of_outputs, [leaf for leaf, _ in left])
    for (_, total), gradient in zip(left, found, strict=True):
        if gradient is not None:
            total.add(chunk, gradient)


def _taken_at_once(
    wanted: Sequence[tuple[Tensor, Gradient]], nodes: Sequence[Node], chunk: int
) -> Sequence[tuple[Tensor, Gradient]]:
    """Let the gradients of large leaves be added on the way.

    Returns:
        The leaves that backward is still to be asked for.

    """
    large = {
        id(leaf): (leaf, total)
        for leaf, total in wanted
        if isinstance(total, Sum) and leaf.nbytes >= LARGE
        # A hook that `f` hung on what it was given has to see the gradient first.
        if not has_tensor_hooks(leaf)
    }
    if not large:
        return wanted
    users: defaultdict[Node, list[tuple[Node, int]]] = defaultdict(list)
    ends: dict[int, Node] = {}  # of the graph, by the id of the leaf
    for node in nodes:
        for index, (other, _) in enumerate(node.next_functions):
            if other is not None:
                users[other].append((node, index))
        if number(node) == LEAF_NUMBER and hasattr(node, "variable"):
            ends[id(node.variable)] = node
    products = {
        key: found
        for key, (leaf, total) in large.items()
        if key in ends and total.takes_products(leaf)
        if (found := _products(leaf, ends[key], users))
    }
    # Backward comes to a product only on its way to something that it is asked for.
    asked = {ends[id(t)] for t, _ in wanted if id(t) in ends.keys() - products.keys()}
    ways = _ways(nodes, asked)
    done = {
        key
        for key, found in products.items()
        if ways.issuperset(product.node for product in found)
    }
    for key, (_, total) in large.items():
        if key in done:
            for product in products[key]:
                product.add_to(total)
        elif key in ends:
            for user, index in users[ends[key]]:
                user.register_hook(partial(_take, total, chunk, index))
    return [(leaf, total) for leaf, total in wanted if id(leaf) not in done]


def _ways(nodes: Iterable[Node], ends: Iterable[Node]) -> set[Node]:
    """Return the nodes from which one of some ends is reached."""
    ways = set(ends)
    for node in sorted(nodes, key=number):  # the older ones first
        if any(other in ways for other, _ in node.next_functions):
            ways.add(node)
    return ways


class _Product(NamedTuple):
    """A product of two matrices, one of which is a leaf or its transpose."""

    node: Node
    other: Tensor  # the other factor
    leaf_first: bool
    transposed: bool  # whether it is the leaf's transpose
    alpha: float

    def add_to(self, total: Sum) -> None:
        """Let backward add the gradient of the leaf when it comes to the node."""
        # The hook must not hold the node that it hangs on, nor the factor for longer
        # than the node would.
        held = [self.other]
        self.node.register_prehook(partial(_add_product, total, held, self[2:]))


def _products(leaf: Tensor, node: Node, users: _Users) -> list[_Product]:
    """Return the products that use a leaf; none if anything else uses it."""
    found = []
    for user, index in users[node]:
        if has_node_hooks(user):  # which would not see the gradient
            return []
        if user.name() in _TRANSPOSING:
            if any(has_node_hooks(u) for u, _ in users[user]):
                return []
            uses = [_product(u, i, leaf.t(), transposed=True) for u, i in users[user]]
        else:
            uses = [_product(user, index, leaf, transposed=False)]
        found += uses
    return [p for p in found if p is not None] if None not in found else []


def _product(
    node: Node, index: int, leaf: Tensor, *, transposed: bool
) -> _Product | None:
    """Return the product that `node` stands for if a leaf is one factor of it."""
    found = factors(node)
    if found is None or index not in found:
        return None
    leaf_first = index == min(found)
    factor, (other,) = found.pop(index), found.values()
    if not (
        is_tensor(factor)
        and is_tensor(other)
        and share_storage(factor, leaf)
        and factor.storage_offset() == leaf.storage_offset()
        and (factor.shape, factor.stride()) == (leaf.shape, leaf.stride())
        and other.dtype == leaf.dtype
        # One that `f` hung on the transpose has to see the gradient, too.
        and not has_tensor_hooks(factor)
    ):
        return None
    return _Product(node, other, leaf_first, transposed, getattr(node, ALPHA, 1))


def _add_product(
    total: Sum,
    held: list[Tensor],
    how: tuple[bool, bool, float],
    of_outputs: tuple[Tensor | None, ...],
) -> None:
    gradient, other = of_outputs[0], held.pop()
    if gradient is None:
        return
    if not is_plain(gradient):  # sparse, which cannot be added so
        gradient = gradient.to_dense()
    leaf_first, transposed, alpha = how
    other = other.t()
    a, b = (gradient, other) if leaf_first else (other, gradient)
    total.add_product(*((b.t(), a.t()) if transposed else (a, b)), alpha)


def _take(
    total: Gradient,
    chunk: int,
    index: int,
    of_inputs: tuple[Tensor | None, ...],
    _of_outputs: object,
) -> tuple[Tensor | None, ...] | None:
    gradient = of_inputs[index]
    if gradient is None:
        return None
    total.add(chunk, gradient)
    return (*of_inputs[:index], None, *of_inputs[index + 1 :])
