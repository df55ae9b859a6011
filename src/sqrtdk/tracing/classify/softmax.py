"""A softmax, by its operator or written by hand, begins the lineage of its weights."""

from __future__ import annotations

from torch import Tensor

from sqrtdk.tracing.classify.additive import behind, is_additive
from sqrtdk.tracing.classify.online import is_sum
from sqrtdk.tracing.classify.sums import settle
from sqrtdk.tracing.classify.weights import SINKHORN
from sqrtdk.tracing.records import LOST_SIGHT, NEVER_USED
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import EXTREMES, Node, alias, origin
from sqrtdk.tracing.watch.marks import Carried, SoftmaxEntry, Weighing, Weights
from sqrtdk.tracing.watch.recorder import Made, Scene

_TO_MAXIMUM = ops.VIEWS | ops.SAME | {"masked_fill", "maximum"}
GUARD = 1e-2  # a number at or below it keeps a sum from 0


def begin(scene: Scene, made: Made, logits: Tensor, dim: int, *, sinks: bool = False) -> Weighing:
    """Note that a node holds the weights of a softmax.

    Args:
        scene: the trace.
        made: the weights; the first argument of their node is the node of the logits.
        logits: their values.
        dim: the axis.
        sinks: more than the keys joins the denominator.
    """
    node = made.node
    parent = node.args[0]
    settle(parent)
    behind_it = parent if parent.products else parent.lost_logits
    origin_product = None if behind_it is None else next(iter(behind_it.products))
    site = node.site if origin_product is None else origin_product.site
    entry = SoftmaxEntry(site, node.shape, NEVER_USED if origin_product is None else LOST_SIGHT, place=node.place)
    product = None if origin_product is None else origin_product.product
    weighing = Weighing(
        node=parent,
        logits=alias(logits),
        weights=alias(made.tensor),
        dim=dim,
        op=f"aten.{node.op}",
        entry=entry,
        flex=scene.flex,
        stored=logits.dtype if product is None else product.dtype,
        sinks=sinks,
        ended=scene.listener.ended,
    )
    scene.entries.append(entry)
    scene.store.weighings.add(weighing)
    node.args = ()
    node.products = frozenset()
    node.weights = Weights(weighing)
    return weighing


def by_hand(scene: Scene, made: Made) -> bool:
    """Whether a node of logits is a softmax that was written out, in logarithms or as exp(z) over its sum."""
    node = made.node
    if node.op == "exp":
        return _from_logarithm(scene, made)
    sinks = _joined_by_sinks(node)
    if sinks is None:
        return False
    numerator = node.args[0]
    if 0 not in numerator.operands:
        return False  # exp(z) of what is no score of queries and keys
    inner = numerator.args[0]
    if is_sum(inner.args[0] if inner.op == "sub" else inner):
        return False
    node.args = (numerator.args[0],)
    begin(scene, made, numerator.operands[0], -1, sinks=sinks)
    return True


def may_be_numerator(inner: Node) -> bool:
    """Whether the exponential of what is no product may be a softmax's: of z - max(z), or of another score."""
    other = inner.args[1] if inner.op == "sub" and len(inner.args) > 1 else None
    return (isinstance(other, Node) and is_maximum(other)) or is_additive(inner)


def _from_logarithm(scene: Scene, made: Made) -> bool:
    """Exp of a log-softmax, or of z - logsumexp(z), is a softmax."""
    node = made.node
    inner = node.args[0]
    while inner.op in ops.VIEWS | ops.SAME and inner.main() is not None:
        inner = inner.main()
    if inner.op == "_log_softmax":
        node.args = (inner.args[0],)
        begin(scene, made, inner.operands[0], int(inner.args[1]))
        return True
    if inner.op == "sub" and is_sum(inner.args[0]):
        return False
    axes = _less_logsumexp(inner)
    if axes is None:
        return False
    node.args = (inner,)
    weighing = begin(scene, made, made.tensors[0], axes[0] if len(axes) == 1 else -1)
    if _in_turn(inner, axes):
        node.weights = Weights(weighing, Carried(changes=(SINKHORN,)))
    return True


def _less_logsumexp(node: Node) -> tuple[int, ...] | None:
    """The axes of the logsumexp that is subtracted; None where none is."""
    if node.op != "sub" or not isinstance(node.args[1], Node):
        return None
    total = origin(node.args[1])
    if total.op != "logsumexp" or total.is_root:
        return None
    return tuple(int(axis) % len(node.shape) for axis in total.args[1])


def _in_turn(node: Node, axes: tuple[int, ...]) -> bool:
    """Whether another logsumexp, over other axes, was subtracted before."""
    while (before := node.main()) is not None and not node.is_root:
        node = origin(before)
        earlier = _less_logsumexp(node)
        if earlier is None:
            return False
        if earlier != axes:
            return True
    return False


def is_maximum(node: Node) -> bool:
    """Whether a node is the maximum of a row, or of a row with its hidden entries made harmless."""
    largest = behind(node, _TO_MAXIMUM)
    return largest is not None and largest.op in EXTREMES


def _joined_by_sinks(node: Node) -> bool | None:
    """Whether more than a guard joins the sum that exp(z), by hand, is divided by; None if no such sum divides it."""
    if node.op != "div" or len(node.args) < 2:
        return None
    top, bottom = node.args[0], node.args[1]
    if not isinstance(top, Node) or not isinstance(bottom, Node) or top.op != "exp":
        return None
    sinks = False
    while bottom.op in ops.VIEWS | ops.SAME | ops.CLAMPS | {"add", "masked_fill"}:
        parent = bottom.main()
        if bottom.op == "add":
            weight = next((i for i in (0, 1) if _is_weight(bottom, i)), None)
            sinks |= weight is not None
            parent = bottom.args[1] if weight == 0 else parent
        if not isinstance(parent, Node):
            return None
        bottom = parent
    return sinks if bottom.op == "sum" and bottom.main() is top else None


def _is_weight(added: Node, position: int) -> bool:
    """Whether the addend is a weight, exp(sink) or 1, and no guard against a division by zero."""
    addend = added.args[position]
    if isinstance(addend, Node) and origin(addend).op == "exp":
        return True
    number = added.number(position)
    return number is not None and number > GUARD
