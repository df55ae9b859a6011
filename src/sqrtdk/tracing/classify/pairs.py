"""Pairs of rows: two activations that met element by element.

They were spread over one another by broadcasting, or gathered by two lists, a row for each edge of a graph. A sum of
their features may be a product of queries and keys (`sums`). An additive score is v . tanh(q + k) (Bahdanau et al.
2014, arXiv:1409.0473), or a projection of the two side by side; in graph attention (arXiv:1710.10903,
arXiv:2105.14491) the curve is a leaky ReLU, which may come last: a . [q; k] is a_q . q + a_k . k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import Pairs

DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist"})
LENGTHS = frozenset({"linalg_vector_norm", "norm"})
_REDUCTIONS = frozenset({"mean", "var", "std", "sum"}) | LENGTHS
_PAIRING = frozenset({"mul", "add", "sub"}) | DISTANCES
_GROWING = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
_SPREADS = frozenset({"expand", "repeat"})
_ELEMENTWISE = _SPREADS | LENGTHS | ops.SAME | ops.CLAMPS | {"mul", "div"}
_PASSED = ops.VIEWS | ops.SAME
CURVES = frozenset(
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
# Between the score and the softmax: masks, factors, and a curve that comes last.
_AFTER = _PASSED | CURVES | ops.CLAMPS | {"mul", "div", "masked_fill", "where", "add", "sub", "rsub", "neg", "cat"}
_DEEPEST = 8  # operations of a normalisation


def note_pairs(node: Node) -> None:
    """Mark a node in which rows of one activation meet rows of another, element by element."""
    if node.op == "cat":
        _note_side_by_side(node)
    elif node.op in _PAIRING and len(node.args) > 1 and is_act(node.args[0]) and is_act(node.args[1]):
        _note_spread(node, node.args[0], node.args[1])
    elif node.op == "addcmul" and is_act(node.args[1]) and is_act(node.args[2]):
        _note_spread(node, node.args[1], node.args[2])


def _note_spread(node: Node, left: Node, right: Node) -> None:
    if node.op in DISTANCES or _are_gathered(node, left, right):
        node.pairs = Pairs(left, right, both=True)
        return
    left, right = _unspread(left), _unspread(right)
    if left is right or _is_length(left) or _is_length(right) or node.kwargs.get("alpha", 1) != 1:
        return
    first = len(node.shape) > 2  # a leading axis is the batch's
    owners = {a == 1 for a, b in [*facing(left, right, node.shape)][first:] if (a == 1) != (b == 1)}
    if owners:
        node.pairs = Pairs(left, right, both=len(owners) == 2)


def _are_gathered(node: Node, left: Node, right: Node) -> bool:
    """Whether rows were gathered by two lists, q[target] and k[source], or have more added to them."""
    lists = {list_of(left), list_of(right)}
    if node.op == "mul":  # k[source] may have had features of the edge added to it
        return len(lists) > 1 and left.shape == right.shape and len(left.shape) > 1
    return (len(lists) > 1 and None not in lists) or any(_pairs(side) for side in (left, right))


def list_of(node: Node) -> int | None:
    """Serial number of the list by which the rows of `node` were gathered; None where they were not."""
    while node.root is None:
        if node.op in ("index", "index_select"):
            lists = [arg for arg in node.parents() if not arg.act and len(arg.shape) == 1]
            return lists[0].serial if len(lists) == 1 else None
        parent = node.main() if node.op in ops.VIEWS | ops.SAME | {"mul", "div", "neg"} else None
        if parent is None:
            return None
        node = parent
    return node.root.gathered_by


def _is_length(node: Node) -> bool:
    """Whether it is made of the lengths of vectors, `x.pow(2).mean(-1, keepdim=True)`: it meets those, and no rows."""
    while node.act and not node.is_root and 1 in node.shape[-2:]:
        main = node.main()
        if main is None:
            return False
        if node.op in _REDUCTIONS and 1 not in main.shape[-2:]:
            return True
        node = main
    return False


def _note_side_by_side(node: Node) -> None:
    """Two activations that were repeated for every row of the other, features beside features."""
    parts = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if len(parts) != 2 or not all(is_act(part) for part in parts) or dim % len(node.shape) not in _features(node):
        return
    grown = [_is_grown(part) for part in parts]
    if any(grown):
        node.pairs = Pairs(parts[0], parts[1], both=all(grown))


def _features(node: Node) -> set[int]:
    last = len(node.shape) - 1
    return {last, 1} if last == 3 else {last}  # 1 before a convolution


def _is_grown(node: Node) -> bool:
    """Whether an activation was repeated on its way here."""
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            break
        if node.op in _GROWING and math.prod(node.shape) > math.prod(parent.shape):
            return True
        node = parent
    return False


def _unspread(node: Node) -> Node:
    """What was spread over axes of size 1, before that."""
    source = node
    while not source.is_root and source.op in _SPREADS | ops.SAME:
        parent = source.main()
        if parent is None:
            break
        sizes = (1,) * (len(source.shape) - len(parent.shape)) + parent.shape
        if any(size not in (1, spread) for size, spread in zip(sizes, source.shape, strict=True)):
            break
        source = parent
    if source.is_root:
        return source
    for axis in _repeated(source):  # normalised after it was spread
        sizes = tuple(1 if d == axis else n for d, n in enumerate(source.shape))
        source = step("slice", torch.ops.aten.slice.Tensor, sizes, source, axis, 0, 1)
    return source


def _repeated(node: Node) -> list[int]:
    """The axes along which a tensor is one number repeated."""
    return [axis for axis in _constant(node, _DEEPEST) if node.shape[axis] > 1]


def _constant(node: Node, depth: int) -> set[int]:
    axes = {axis for axis, size in enumerate(node.shape) if size == 1}
    if node.is_root or not depth or node.op not in _ELEMENTWISE:
        return axes
    parents = [parent for parent in node.parents() if parent.act]
    if not parents or any(len(parent.shape) != len(node.shape) for parent in parents):
        return axes
    return axes | set.intersection(*(_constant(parent, depth - 1) for parent in parents))


def is_act(arg: Any) -> bool:
    """Whether an argument is an activation."""
    return isinstance(arg, Node) and arg.act


def facing(left: Node, right: Node, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The sizes of both along each axis of the shape that they are spread to."""
    sizes = ((1,) * (len(shape) - len(node.shape)) + node.shape for node in (left, right))
    return zip(*sizes, strict=True)


def step(op: str, func: Any, shape: tuple[int, ...], *args: Any, operands: Any = None) -> Node:
    """A node for an operation that never ran: one of those that lead from the sum to its product."""
    main = next(arg for arg in args if is_act(arg))
    node = Node(op, shape, func=func, args=args, act=True, site=main.site)
    node.learned = main.learned
    node.products, node.roots = main.products, main.roots
    node.operands = operands or {}
    return node


# -- additive scores ---------------------------------------------------------------------------------------------------


def reads_pairs(node: Node) -> bool | None:
    """Whether a projection of `node` reads pairs of queries and keys, side by side or after a curve; see `Root`."""
    source = behind(node, _PASSED)
    if source is not None and source.op in CURVES:
        main = source.main()
        source = None if main is None else behind(main, _PASSED)
    return None if source is None else _pairs(source)


def pairs_queries_and_keys(node: Node) -> bool:
    """Whether `node` is a curve over pairs of queries and keys, one number a pair; a pooling's curve is not."""
    curve = behind(node, _PASSED)
    main = curve.main() if curve is not None and curve.op in CURVES else None
    inside = behind(main, _PASSED) if main is not None else None
    if curve is None or inside is None or _pairs(inside) is not None:
        return inside is not None
    added = inside.op == "add" and (inside.is_root or sum(p.act for p in inside.parents()) > 1)
    return curve.op == "tanh" and (added or len(curve.shape) >= 4)


def is_additive(logits: Node) -> bool:
    """Whether `logits` come from an additive score."""
    score: Node | None = logits
    while score is not None and not score.is_root and score.op in _AFTER and not is_score(score):
        score = score.main()
    return score is not None and is_score(score)


def is_score(score: Node) -> bool:
    """Whether a node is an additive score itself."""
    if score.root is not None and (score.root.additive or score.root.paired):
        return True
    return (score.op in ("add", "sub") and _pairs(score) is True) or _summed_by_hand(score)


def _summed_by_hand(score: Node) -> bool:
    """Whether `score` is (v * tanh(q + k)).sum(-1), with or without v, or without the curve."""
    main = score.main() if score.op == "sum" else None
    inner = behind(main, _PASSED | {"mul"}) if main is not None else None
    return inner is not None and (pairs_queries_and_keys(inner) or (inner.op == "add" and _pairs(inner) is True))


def _pairs(node: Node) -> bool | None:
    """Whether rows of two activations were added to one another, or stand side by side; see `Root`."""
    if node.root is not None and node.root.paired is not None:
        return node.root.paired
    return node.pairs.both if node.op in ("add", "sub", "cat") and node.pairs is not None else None


def _adds_bias(node: Node) -> bool:
    return node.op == "add" and sum(parent.act for parent in node.parents()) == 1


def behind(node: Node, passed: frozenset[str]) -> Node | None:
    """The first node that is none of `passed`, nor the addition of a bias, from `node` backwards."""
    while not node.is_root and (node.op in passed or _adds_bias(node)):
        parent = node.main()
        if parent is None:
            return None
        node = parent
    return node
