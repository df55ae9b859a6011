"""Recognising additive scores, which are no product.

v . tanh(q + k) (Bahdanau et al. 2014, arXiv:1409.0473); act(a . q + b . k) and v . act(q + k) of graph attention
(Velickovic et al. 2018, arXiv:1710.10903; Brody et al. 2022, arXiv:2105.14491).
"""

from __future__ import annotations

import math

from sqrtdk.tracing.classify.gathered import rows_of
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

_PASSED = ops.VIEWS | ops.SAME
_ACTIVATIONS = frozenset(
    {
        "tanh",
        "relu",
        "leaky_relu",
        "_prelu_kernel",
        "rrelu_with_noise",
        "elu",
        "gelu",
        "silu",
        "mish",
        "softplus",
        "sigmoid",
        "hardtanh",
        "hardswish",
    }
)
_LOGITS = _PASSED | _ACTIVATIONS | ops.CLAMPS | {"mul", "div", "neg", "sub", "sum", "where", "masked_fill"}


def pairs(node: Node) -> bool:
    """Whether `node` adds, or puts side by side, an activation of one position and one of another, for every pair."""
    if node.is_root:
        return node.root is not None and node.root.pairs
    sides = [parent for parent in node.parents() if parent.act]
    if len(sides) < 2 or not node.shape:
        return False
    if node.op == "cat":
        axis = int(node.args[1]) if len(node.args) > 1 else 0
        return axis in (-1, len(node.shape) - 1) and all(_is_spread(side) for side in sides)
    if node.op not in ("add", "sub"):
        return False
    lists = {rows_of(side) for side in sides}
    outer = all(side.shape != node.shape for side in sides)
    return outer or (len(lists) > 1 and None not in lists) or any(pairs(side) for side in sides)


def _is_spread(node: Node) -> bool:
    """Whether each position of `node` was written several times."""
    while node.op in _PASSED and not node.is_root:
        parent = node.main()
        if parent is None:
            return False
        if math.prod(parent.shape) < math.prod(node.shape):
            return True
        node = parent
    return rows_of(node) is not None


def pairs_queries_and_keys(node: Node) -> bool:
    """Whether `node` is an activation over pairs of positions, or a tanh of two activations added; no pooling's."""
    bent = _behind(node, _PASSED)
    if bent is None or bent.op not in _ACTIVATIONS:
        return False
    main = bent.main()
    inside = _behind(main, _PASSED) if main is not None else None
    if inside is not None and pairs(inside):
        return True
    added = inside is not None and inside.op == "add" and (inside.is_root or sum(p.act for p in inside.parents()) > 1)
    return bent.op == "tanh" and (added or len(bent.shape) >= 4)


def of_pairs(node: Node) -> bool:
    """Whether `node` is pairs of positions, or views of them."""
    inner = _behind(node, _PASSED)
    return inner is not None and pairs(inner)


def adds_queries_and_keys(logits: Node) -> bool:
    """Whether `logits` come from pairs of positions, without a product between."""
    node: Node | None = logits
    while node is not None and not pairs(node):
        node = node.main() if node.op in _LOGITS and not node.is_root else None
    return node is not None


def summed_by_hand(logits: Node) -> bool:
    """Whether `logits` end in (v * tanh(...)).sum(-1), with or without v."""
    node = _behind(logits, _PASSED | {"mul", "div"})
    main = node.main() if node is not None and node.op == "sum" else None
    inner = _behind(main, _PASSED | {"mul"}) if main is not None else None
    return inner is not None and pairs_queries_and_keys(inner)


def _behind(node: Node, passed: frozenset[str]) -> Node | None:
    """The first node that is none of `passed`, from `node` backwards."""
    while node.op in passed and not node.is_root:
        parent = node.main()
        if parent is None:
            return None
        node = parent
    return node
