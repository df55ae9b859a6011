"""Finds pairs of rows: two activations combined element by element.

They are broadcast against one another, `q[:, None] * k[None]`, or gathered by two lists, a row for each edge of a
graph. A sum over their features may be a product of queries and keys (`sums`). An additive score is v . tanh(q + k)
(Bahdanau et al. 2014, arXiv:1409.0473), or a projection of q and k side by side. In graph attention (arXiv:1710.10903,
arXiv:2105.14491) the curve is a leaky ReLU, which may come last: a . [q; k] = a_q . q + a_k . k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, Pairs, back

DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist"})
VECTOR_LENGTHS = frozenset({"linalg_vector_norm", "norm"})
_FEATURE_REDUCTIONS = frozenset({"mean", "var", "std", "sum"}) | VECTOR_LENGTHS
_PAIRING = frozenset({"mul", "add", "sub", "addcmul"}) | DISTANCES
_ROW_REPEATS = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
_EXPANSIONS = frozenset({"expand", "repeat"})
_ELEMENTWISE = _EXPANSIONS | VECTOR_LENGTHS | ops.CASTS_AND_COPIES | ops.CLAMPS | {"mul", "div"}
NONLINEARITIES = frozenset(
    {
        "tanh",
        "relu",
        "leaky_relu",
        "gelu",
        "elu",
        "silu",
        "sigmoid",
        "softplus",
        "hardtanh",
        "hardswish",
        "rrelu_with_noise",
        "celu",
        "mish",
        "prelu",
        "_prelu_kernel",
        "threshold",
    }
)
# Operations that may stand between the score and the softmax: masks, factors, and a curve that comes last.
_AFTER = (
    ops.PASSING
    | NONLINEARITIES
    | ops.CLAMPS
    | {"mul", "div", "masked_fill", "where", "add", "sub", "rsub", "neg", "cat"}
)
_MOST_NORM_OPERATIONS = 8  # operations searched backwards; a normalisation written out has fewer


def note_pairs(node: Node) -> None:
    """Mark the node as pairs, if it combines rows of one activation with rows of another, element by element.

    A mark is set for `q[:, None] * k[None]`, for rows that two lists gathered, and for a concatenation of such rows.
    """
    args = node.args[1:] if node.op == "addcmul" else node.args
    if node.op == "cat":
        _note_side_by_side(node)
    elif node.op in _PAIRING and len(args) > 1 and is_act(args[0]) and is_act(args[1]):
        _note_spread(node, args[0], args[1])


def _note_spread(node: Node, left: Node, right: Node) -> None:
    if node.op in DISTANCES or _are_gathered(node, left, right):
        node.pairs = Pairs(left, right, both=True)
        return
    left, right = _unspread(left), _unspread(right)
    if left is right or _is_length(left) or _is_length(right) or node.kwargs.get("alpha", 1) != 1:
        return
    first = len(node.shape) > 2  # the leading axis is then the batch
    owners = {a == 1 for a, b in [*broadcast_sizes(left, right, node.shape)][first:] if (a == 1) != (b == 1)}
    if owners:  # an axis that only one of them has: its rows are combined with every row of the other
        node.pairs = Pairs(left, right, both=len(owners) == 2)


def _are_gathered(node: Node, left: Node, right: Node) -> bool:
    """Whether two lists gathered the rows, q[target] and k[source], or one side is already a pair: q + k + edge."""
    lists = {list_serial(left), list_serial(right)}
    if node.op == "mul":  # q[target] * (k[source] + edge): the sum hides the second list
        return len(lists) > 1 and left.shape == right.shape and len(left.shape) > 1
    return (len(lists) > 1 and None not in lists) or any(_pairs(side) for side in (left, right))


def list_serial(node: Node) -> int | None:
    """Return the serial number of the index list that gathered the rows of `node`; None if none or several did."""
    for before in back(node, ops.PASSING | {"mul", "div", "neg"}):
        if before.root is not None:
            return before.root.gathered_by
        if before.op in ("index", "index_select"):
            lists = [arg for arg in before.parents() if not arg.act and len(arg.shape) == 1]
            return lists[0].serial if len(lists) == 1 else None
    return None


def _is_length(node: Node) -> bool:
    """Whether the node holds lengths of vectors, `x.pow(2).mean(-1, keepdim=True)`: a norm makes no pairs of rows."""
    for at, main in itertools.pairwise(back(node, None)):
        if not at.act or 1 not in at.shape[-2:]:
            return False
        if at.op in _FEATURE_REDUCTIONS and 1 not in main.shape[-2:]:
            return True
    return False


def _note_side_by_side(node: Node) -> None:
    """Marks `torch.cat([q_repeated, k_repeated], -1)`: two activations, each repeated for every row of the other."""
    parts, last = node.args[0], len(node.shape) - 1
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(node.shape)
    before_convolution = last == 3 and dim == 1
    if len(parts) != 2 or not all(is_act(part) for part in parts) or not (dim == last or before_convolution):
        return
    grown = [_is_grown(part) for part in parts]
    if any(grown):
        node.pairs = Pairs(parts[0], parts[1], both=all(grown))


def _is_grown(node: Node) -> bool:
    """Whether an activation was repeated before this node."""
    steps = itertools.pairwise(back(node, ops.PASSING))
    return any(later.op in _ROW_REPEATS and math.prod(later.shape) > math.prod(before.shape) for later, before in steps)


def _unspread(node: Node) -> Node:
    """Return the node before it was broadcast over axes of size 1."""
    source = node
    for before in back(node, _EXPANSIONS | ops.CASTS_AND_COPIES):
        sizes = (1,) * (len(source.shape) - len(before.shape)) + before.shape
        if any(size not in (1, spread) for size, spread in zip(sizes, source.shape, strict=True)):
            break
        source = before
    if source.is_root:
        return source
    for axis in _constant(
        source, _MOST_NORM_OPERATIONS
    ):  # F.normalize(q.expand(...)): broadcast first, normalised later
        if source.shape[axis] > 1:
            sizes = tuple(1 if d == axis else n for d, n in enumerate(source.shape))
            source = unrun_node("slice", torch.ops.aten.slice.Tensor, sizes, source, axis, 0, 1)
    return source


def _constant(node: Node, depth: int) -> set[int]:
    """Return the axes along which a tensor is one number repeated."""
    axes = {axis for axis, size in enumerate(node.shape) if size == 1}
    parents = [parent for parent in node.parents() if parent.act]
    if node.is_root or not depth or not parents or node.op not in _ELEMENTWISE:
        return axes
    if any(len(parent.shape) != len(node.shape) for parent in parents):
        return axes
    return axes | set.intersection(*(_constant(parent, depth - 1) for parent in parents))


def is_act(arg: Any) -> bool:
    """Return whether an argument is the node of an activation, a tensor that descends from the model's activations."""
    return isinstance(arg, Node) and arg.act


def broadcast_sizes(left: Node, right: Node, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (size of `left`, size of `right`) along each axis of the shape that both are broadcast to.

    Args:
        left: node of one tensor; axes that it lacks have size 1.
        right: node of the other, likewise.
        shape: the shape of the result.
    """
    sizes = ((1,) * (len(shape) - len(node.shape)) + node.shape for node in (left, right))
    return zip(*sizes, strict=True)


def unrun_node(op: str, func: Any, shape: tuple[int, ...], *args: Any, operands: Any = None) -> Node:
    """Return a node for an operation that never ran, used to rewrite a sum over pairs as a matrix product.

    Products, roots and the module path are those of the first activation among the arguments.

    Args:
        op: name of the operation.
        func: operator, to replay it.
        shape: shape of the result.
        args: arguments, with nodes in place of tensors; at least one is an activation.
        operands: the other operands by position; None for none.
    """
    main = next(arg for arg in args if is_act(arg))
    node = Node(op, shape, func=func, args=args, act=True, site=main.site)
    node.learned = main.learned
    node.products, node.roots = main.products, main.roots
    node.operands = operands or {}
    return node


# -- additive scores ---------------------------------------------------------------------------------------------------


def reads_pairs(node: Node) -> bool | None:
    """Return what a projection of `node` reads, as `Root.paired` is defined.

    Returns:
        True if it reads all pairs of rows of q and k, bare or after a curve such as tanh; False for pairs with a single
        row; None if it reads no pairs.
    """
    source = _within(node)
    return None if source is None else _pairs(source)


def pairs_queries_and_keys(node: Node) -> bool:
    """Return whether `node` is a curve over pairs of queries and keys, `tanh(q + k)`; the curve of a pooling is not."""
    curve = first_behind(node, ops.PASSING)
    inside = _within(node) if curve is not None and curve.op in NONLINEARITIES else None
    if curve is None or inside is None or _pairs(inside) is not None:
        return inside is not None
    added = inside.op == "add" and (inside.is_root or sum(p.act for p in inside.parents()) > 1)
    return curve.op == "tanh" and (added or len(curve.shape) >= 4)


def _within(node: Node) -> Node | None:
    """Return the argument of a curve, or without a curve the node, before views and biases."""
    source = first_behind(node, ops.PASSING)
    if source is None or source.op not in NONLINEARITIES:
        return source
    main = source.main()
    return None if main is None else first_behind(main, ops.PASSING)


def is_additive(logits: Node) -> bool:
    """Return whether the logits come from an additive score, v . tanh(q + k), before views, factors and masks."""
    return any(is_score(node) for node in back(logits, _AFTER))


def is_score(score: Node) -> bool:
    """Return whether the node itself is an additive score, also `(v * tanh(q + k)).sum(-1)`, with or without v."""
    if score.root is not None and (score.root.additive or score.root.paired):
        return True
    main = score.main() if score.op == "sum" else None
    inner = None if main is None else first_behind(main, ops.PASSING | {"mul"})
    if inner is not None and (pairs_queries_and_keys(inner) or (inner.op == "add" and _pairs(inner) is True)):
        return True
    return score.op in ("add", "sub") and _pairs(score) is True


def _pairs(node: Node) -> bool | None:
    """Return whether rows of two activations are added or concatenated; None if they are not (see `Root.paired`)."""
    if node.root is not None and node.root.paired is not None:
        return node.root.paired
    return node.pairs.both if node.op in ("add", "sub", "cat") and node.pairs is not None else None


def is_of_all_pairs(node: Node) -> bool:
    """Return whether `node` is q + k or q - k of all pairs of rows, before views."""
    source = first_behind(node, ops.PASSING)
    if source is None or source.op not in ("add", "sub") or source.pairs is None:
        return False
    return source.pairs.both and len(source.shape) > 3


def first_behind(node: Node, passed: frozenset[str]) -> Node | None:
    """Return the first node, from `node` backwards, that is neither passed over nor the addition of a bias.

    Args:
        node: where the search begins, `node` itself included.
        passed: names of the operations that are passed over; a root always ends the search.

    Returns:
        The node; None if the search reaches the end of the tape.
    """
    for at in back(node, None):
        adds_bias = at.op == "add" and sum(p.act for p in at.parents()) == 1
        if at.is_root or not (at.op in passed or adds_bias):
            return at
    return None
