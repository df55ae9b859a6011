"""Weights of several softmaxes that become one before they meet the values: sums, differences, mixtures.

ConViT (d'Ascoli et al. 2021, arXiv:2103.10697) adds positions to content, the Differential Transformer (Ye et al. 2024,
arXiv:2410.05258) takes one softmax from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqrtdk.tracing.classify.mixing import OVER_HEADS
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.marks import SoftmaxEntry, Weighing, Weights

POSITIONAL = "its logits are no product of q and k, and its weights join those of an attention"
_WORDS = {
    "add": "added to another softmax",
    "sub": "less another softmax",
    "rsub": "less another softmax",
    "mul": "times another softmax",
    "lerp": "averaged with another softmax",
    "where": "in part those of another softmax",
    "cat": "side by side with another softmax",
    "stack": "side by side with another softmax",
}
_PARTS = frozenset(
    {"select", "slice", "split", "split_with_sizes", "chunk", "unbind", "narrow", "index", "index_select"}
)
_SIDE_BY_SIDE = frozenset({"cat", "stack"})


def combine_weights(node: Node, active: Sequence[Node], entries: list[SoftmaxEntry]) -> bool:
    """Whether `node` holds weights of several softmaxes, or of two parts of one; it is then filled in.

    Args:
        node: the result.
        active: its operands that descend from activations.
        entries: every softmax so far, to which one of constants is added.
    """
    detail = _WORDS.get(node.op)
    carriers = [p for p in active if p.weights is not None]
    if detail is None or not carriers:
        return False
    if (mixed := _plus_their_mixing(node, carriers)) is not None:
        node.weights, node.args = mixed.weights, (mixed,)
        return True
    constants = [] if len(carriers) > 1 else [p for p in node.parents() if not p.act and _is_weights(p)]
    if not constants and not _several(node, carriers):
        return False
    first = next((p for p in carriers if _is_product(p)), carriers[0])
    assert first.weights is not None
    weighings = dict.fromkeys(weighing for p in carriers for weighing in _weighings(p))
    carried = first.weights.carried
    for other in [p for p in carriers if p is not first] or [first]:
        assert other.weights is not None
        carried = carried.beside(other.weights.carried, detail)
    others = tuple(weighing for weighing in weighings if weighing is not first.weighing)
    node.weights = replace(first.weights, carried=carried, beside=others)
    node.args = (first,)
    entries += [SoftmaxEntry(node.site, constant.shape, POSITIONAL) for constant in constants]
    return True


def complete(weights: Weights) -> list[Weighing]:
    """The softmaxes that are attentions when their weights meet values; the others among them are told why not."""
    both = [weights.weighing, *weights.beside]
    attentions = [weighing for weighing in both if weighing.node.products] or both
    for weighing in both:
        if weighing in attentions:
            weighing.entry.attention = True
        else:
            weighing.entry.reason = POSITIONAL
    return attentions


def _plus_their_mixing(node: Node, carriers: Sequence[Node]) -> Node | None:
    """Of weights and their own mixing over the heads, which are added, the mixing; None for any other sum."""
    if node.op != "add" or len(carriers) != 2 or any(p.shape != node.shape for p in carriers):
        return None
    first, second = (p.weights for p in carriers)
    if first is None or second is None or first.weighing is not second.weighing:
        return None
    for mixed, plain, node_of in ((first, second, carriers[0]), (second, first, carriers[1])):
        if mixed.carried == plain.carried.then("mix", OVER_HEADS) != plain.carried:
            return node_of
    return None


def _several(node: Node, carriers: Sequence[Node]) -> bool:
    """Whether the operands carry weights of different softmaxes, or of parts of one that do not just part to rejoin."""
    if len(carriers) < 2:
        return False
    if len({weighing for p in carriers for weighing in _weighings(p)}) > 1:
        return True
    if node.op in _SIDE_BY_SIDE or len(set(carriers)) < 2:
        return False
    whole = carriers[0].weighing
    pairs = whole is not None and node.shape[-2:] == whole.entry.shape[-2:]  # heads were parted, not queries or keys
    return pairs and all(map(_is_part, carriers))


def _weighings(node: Node) -> tuple[Weighing, ...]:
    return () if node.weights is None else (node.weights.weighing, *node.weights.beside)


def _is_product(node: Node) -> bool:
    return node.weighing is not None and bool(node.weighing.node.products)


def _is_part(node: Node) -> bool:
    """Whether weights were taken out of those of more heads."""
    while node.args:
        if node.op in _PARTS:
            return True
        parent = node.main()
        if parent is None:
            return False
        node = parent
    return False


def _is_weights(constant: Node) -> bool:
    """Whether a tensor of constants alone is a softmax, or a part of one."""
    while constant.op in ops.VIEWS | ops.SAME | {"mul", "div"}:
        parent = next((p for p in constant.parents() if p.op not in ("parameter", "buffer", "constant")), None)
        if parent is None:
            return False
        constant = parent
    return constant.op in ops.SOFTMAX
