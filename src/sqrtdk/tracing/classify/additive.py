"""Recognising additive scores, v . tanh(q + k) (Bahdanau et al. 2014, arXiv:1409.0473), which are no product."""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node

_PASSED = ops.VIEWS | ops.SAME


def pairs_queries_and_keys(node: Node) -> bool:
    """Whether `node` is a tanh over pairs of positions, or of two activations added; a pooling's tanh is neither."""
    tanh = _behind(node, _PASSED)
    if tanh is None or tanh.op != "tanh":
        return False
    main = tanh.main()
    inside = _behind(main, _PASSED) if main is not None else None
    added = inside is not None and inside.op == "add" and (inside.is_root or sum(p.act for p in inside.parents()) > 1)
    return added or len(tanh.shape) >= 4


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
