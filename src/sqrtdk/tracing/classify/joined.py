"""Weights that another tensor joins between the softmax and the values: a graph's edges, a gate, a constant.

    w = 0.5 * p + 0.5 * adjacency          # Molecule Attention Transformer (Maziarka et al. 2020, arXiv:2002.08264)
    w = p - 1 / n                          # centred attention (Ali et al. 2023, arXiv:2306.01610)
    w = (1 - g) * p + g * positions        # ConViT, where the positions are constants

What joins them is not made of them, so that every weight is still a share of what the softmax gave: the scale of the
logits is what it was, and what was done is told. A power of the weights is another scale, and is not one of these.
"""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, ancestors
from sqrtdk.tracing.watch.marks import Carried, Weighing

_WORDS = {
    "add": "plus another tensor",
    "sub": "less another tensor",
    "rsub": "taken from another tensor",
    "mul": "times another tensor",
    "div": "divided by another tensor",
    "lerp": "averaged with another tensor",
    "where": "in part another tensor",
    "masked_fill": "in part a constant",
}
_LINEAR = frozenset({"add", "sub"})


def join(node: Node, weights: Node, weighing: Weighing, before: Carried) -> Carried | None:
    """What weights have gone through after another tensor, or a number, joined them; None where none did.

    Args:
        node: of the result.
        weights: the operand that carries the weights.
        weighing: the softmax they come from.
        before: what they had gone through.
    """
    detail = _WORDS.get(node.op)
    if detail is None or node.shape != weights.shape or not weighing.node.products:
        return None
    if node.op in ("div", "rdiv") and node.args[0] is not weights:
        return None
    others = [parent for parent in node.parents() if parent is not weights]
    if not others and node.op not in (*_LINEAR, "rsub", "masked_fill"):
        return None  # a gain on all weights is told as such
    if any(_is_made_of_them(other, node, weighing) for other in others):
        return None
    return before.joined(detail if others else detail.replace("another tensor", "a constant"))


def _is_made_of_them(other: Node, node: Node, weighing: Weighing) -> bool:
    """Whether it is computed from the weights, but for one number a row that is added: their mean is a constant."""
    if node.op in _LINEAR and other.shape[-1:] == (1,) and len(other.shape) == len(node.shape):
        return False
    return any(ancestor.weighing is weighing for ancestor in ancestors(other, closed=ops.CREATIONS))
