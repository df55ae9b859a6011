"""Recognising additive scores, v . tanh(q + k) (Bahdanau et al. 2014, arXiv:1409.0473), which are no product.

Queries and keys meet in a sum of two activations, or side by side before a projection, for every pair of positions.
The curve between is tanh, or in graph attention (arXiv:1710.10903, arXiv:2105.14491) a leaky ReLU, which may come
last: a . [q; k] is a_q . q + a_k . k.
"""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

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
    """Whether `score` is (v * tanh(...)).sum(-1), with or without v."""
    main = score.main() if score.op == "sum" else None
    inner = behind(main, _PASSED | {"mul"}) if main is not None else None
    return inner is not None and pairs_queries_and_keys(inner)


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
