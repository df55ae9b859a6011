"""What happens to the weights between the softmax and the values: masked again, thinned out, changed, or nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.classify.dropped import dropped, number_of
from sqrtdk.tracing.classify.joined import join
from sqrtdk.tracing.classify.mixing import over_heads
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node, ancestors, origin, replay
from sqrtdk.tracing.watch.marks import Carried, Weighing

OTHER_SUM = "division by the sum over the queries"
SINKHORN = "Sinkhorn normalisation"  # of rows and columns in turn
_SPARSE = frozenset({"_sparse_coo_tensor_with_dims_and_tensors", "_sparse_csr_tensor_unsafe", "_coalesce"})
_PUT_TOGETHER = frozenset({"cat", "stack", "constant_pad_nd", "copy", *_SPARSE})
_WRITERS = {"masked_fill": 2, "index_put": 2, "fill": 1}  # position of what they write
_TRIANGLES = frozenset({"tril", "triu"})


def carry(node: Node, tensor: Tensor, tensors: dict[int, Tensor], weights: Node, weighing: Weighing) -> Carried:
    """What `node` adds to what the `weights` it was made from have gone through.

    Args:
        node: of the result, `tensor`.
        tensor: the result.
        tensors: the operands that are tensors, by position.
        weights: the operand that carries the weights.
        weighing: the softmax they come from.
    """
    before = _of(weights)
    if node.op in ops.VIEWS | ops.SAME - {"native_dropout"} | _PUT_TOGETHER or node.total:
        return before
    if (drop := dropped(node)) is not None:
        return before.times((1 - drop[0]) * drop[1], node.op)
    if _divided_by_sum(node):
        return before.over_sum()
    if (after := over_heads(node, weights, before)) is not None:
        return after
    if node.shape == weights.shape and node.op in ("mul", "div") and _by_row_or_head(node, weights, weighing):
        return before
    if _over_other_sum(node, weights):
        again = OTHER_SUM in before.changes or SINKHORN in before.changes
        kept = tuple(name for name in before.changes if name not in (OTHER_SUM, SINKHORN))
        return replace(before, changes=(*kept, SINKHORN if again else OTHER_SUM))
    if (gain := _gain(node, tensors, weights)) is not None:
        return before.times(gain, node.op)
    kind = _change(node, tensor, tensors, weights, weighing)
    if kind == "mask":
        thinned = any(_descends(p, weighing) for p in node.parents() if p is not weights)
        alone = node.op not in _TRIANGLES and len(list(node.parents())) == 1
        if thinned or alone:
            return replace(before, thinned=True)
        return replace(before, remasked=True, renormalised=False)
    if kind == "change":
        return join(node, weights, weighing, before) or before.changed(node.op)
    return before


def _over_other_sum(node: Node, weights: Node) -> bool:
    """Whether weights are divided by their own sum over another axis than the last."""
    other = node.args[1] if node.op == "div" and len(node.args) > 1 else None
    if not isinstance(other, Node) or node.args[0] is not weights or weights.weights is None:
        return False
    total = origin(other)
    return total.op == "sum" and total.weighing is weights.weighing and other.shape[-1:] != (1,)


def overwritten(old: Node, new: Node, tensor: Tensor) -> Carried:
    """What weights went through of which a part, `tensor`, was written in place; `new` is the node of that part."""
    before = _of(old)
    if new.weights is not None and new.weighing is old.weighing:
        return new.weights.carried
    zero = number_of(new, 1) == 0 if tensor.is_meta else not bool(tensor.any())
    if zero:
        return replace(before, remasked=True, renormalised=False)
    return before.changed(f"{new.op} in place")


def _of(node: Node) -> Carried:
    return Carried() if node.weights is None else node.weights.carried


def _change(node: Node, tensor: Tensor, tensors: dict[int, Tensor], weights: Node, weighing: Weighing) -> str | None:
    """ "mask" where all that changed is 0 now, "change" for any other change, None for none."""
    if node.shape != weights.shape:
        return "change"
    earlier = None if tensor.is_meta else _earlier(node, tensor, tensors, weights, weighing)
    if earlier is None:
        return _by_operation(node, weights)
    moved = (tensor != earlier) & ~earlier.isnan()
    if bool((tensor.masked_select(moved) != 0).any()):
        return "change"
    # A row, or a head, that is 0 altogether hides no key from the others.
    moved &= (tensor != 0).any(_keys(node, weighing), keepdim=True)
    return "mask" if bool(moved.any()) else None


def _keys(node: Node, weighing: Weighing) -> int:
    return weighing.dim if node.shape == weighing.entry.shape else -1


def _earlier(
    node: Node, tensor: Tensor, tensors: dict[int, Tensor], weights: Node, weighing: Weighing
) -> Tensor | None:
    """The weights that the operation was given; of one in place, those that left the softmax."""
    operand = next((tensors[i] for i, arg in enumerate(node.args) if arg is weights and i in tensors), None)
    if operand is None:
        return None
    if operand is not tensor and operand.data_ptr() != tensor.data_ptr():
        return operand.detach()
    if _of(weights) != Carried() or weighing.weights.numel() != tensor.numel():
        return None
    return weighing.weights.reshape(tensor.shape).to(tensor.dtype)


def _by_operation(node: Node, weights: Node) -> str | None:
    """Without numbers to compare: what the operation does, by its name and its constants."""
    if node.op in _TRIANGLES or node.op == "zero":
        return "mask"
    if node.op in ops.CLAMPS:
        return None
    if node.op in _WRITERS:
        return "mask" if number_of(node, _WRITERS[node.op]) == 0 else "change"
    if node.op == "where":
        return "mask" if number_of(node, 2 if node.args[1] is weights else 1) == 0 else "change"
    if node.op in ("add", "sub") and number_of(node, 1 if node.args[0] is weights else 0) == 0:
        return None
    if node.op in ("mul", "div"):
        position = 1 if node.args[0] is weights else 0
        other = node.args[position]
        if not isinstance(other, Node):
            return None if number_of(node, position) == 1 else "change"
        value = evaluate(other)
        if value is None or not bool((value != 1).any()):
            return None
        return "mask" if not bool(((value != 0) & (value != 1)).any()) else "change"
    return "change"


def _divided_by_sum(node: Node) -> bool:
    """Whether weights are divided by their sum, or multiplied with its inverse."""
    for parent in node.parents():
        if parent.total:
            return node.op == "div" or (node.op == "mul" and _is_inverse(parent))
    return False


def _is_inverse(size: Node) -> bool:
    """Whether the sum of weights stands in the denominator: 1 / sum, sum ** -1, sum.reciprocal()."""
    inverse = False
    while size.total and size.args:
        turned = size.op == "reciprocal" or (size.op == "div" and not isinstance(size.args[0], Node))
        inverse ^= turned or (size.op == "pow" and number_of(size, 1) == -1)
        parent = size.main()
        if parent is None:
            break
        size = parent
    return inverse


def _gain(node: Node, tensors: dict[int, Tensor], weights: Node) -> float | None:
    """The one number that `node` multiplies all weights by; NaN where it is not known, None where there is none."""
    if node.op not in ("mul", "div") or len(node.args) < 2:
        return None
    position = 1 if node.args[0] is weights else 0
    if node.op == "div" and position == 0:
        return None
    arg, value = node.args[position], tensors.get(position)
    if isinstance(arg, Node) and math.prod(arg.shape) != 1:
        return None
    known = value is not None and not value.is_meta
    number = float(value) if known and value is not None else number_of(node, position)
    if not number:
        return math.nan if number is None else None
    return 1 / number if node.op == "div" else number


def _by_row_or_head(node: Node, weights: Node, weighing: Weighing) -> bool:
    """Whether the factor is one number for all keys of a row, as a head mask or a learned gate is."""
    position = 1 if node.args[0] is weights else 0
    factor = node.args[position] if len(node.args) > 1 else None
    if not isinstance(factor, Node) or (node.op == "div" and position == 0):
        return False
    if not factor.shape or all(n == 1 for n in factor.shape):
        return origin(factor).op == "parameter"
    axis = _keys(node, weighing) % len(node.shape) - len(node.shape)
    return -axis > len(factor.shape) or factor.shape[axis] == 1


def _descends(node: Node, weighing: Weighing) -> bool:
    """Whether a tensor is computed from the numbers of the weights, and not from their shape alone."""
    return any(ancestor.weighing is weighing for ancestor in ancestors(node, closed=ops.CREATIONS))


def over_their_sum(carried: Carried, tensor: Tensor | None, contracted: int) -> Carried:
    """What weights went through, where they were divided by their sum over the axis that the value product sums over.

    Slots compete for an input, and what each has of all inputs sums to 1 (Locatello et al. 2020, section 2.1).

    Args:
        carried: what they went through.
        tensor: their values as they meet those of v.
        contracted: the axis of it that the product sums over, -1 or -2.
    """
    if OTHER_SUM not in carried.changes or tensor is None or tensor.is_meta or not tensor.numel():
        return carried
    sums = tensor.detach().to(torch.float32).sum(contracted)
    if not bool(((sums - 1).abs() < _WHOLE).all()):
        return carried
    return replace(carried, changes=tuple(name for name in carried.changes if name != OTHER_SUM)).over_sum()


OTHER_AXIS = "softmax over another axis than the value product sums over"
QUERIES = "softmax over the queries"


def axis_fault(weights: Node, tensor: Tensor | None, contracted: int, weighing: Weighing) -> str | None:
    """What is wrong where the value product does not sum over the softmax's axis.

    Rows of one matrix that sum to 1 are right; where they do not (dropout, masks), the views since the softmax tell.

    Args:
        weights: the product's operand.
        tensor: its values.
        contracted: the axis of it that the product sums over, -1 or -2.
        weighing: the softmax.
    """
    if len(weights.shape) < 2 or weighing.edges is not None:
        return None
    other = -3 - contracted
    known = tensor is not None and not tensor.is_meta and bool(tensor.numel())
    if known and tensor is not None:
        matrix = tensor.detach().reshape(-1, *tensor.shape[-2:])[0].to(torch.float32)
        over, across = ((matrix.sum(axis) - 1).abs() for axis in (contracted, other))
        if bool((over < _WHOLE).all()):
            return None
        if min(tensor.shape[-2:]) > 1 and bool((across < _WHOLE).all()) and bool((over > _PARTIAL).any()):
            return QUERIES
    axes = _axes(weights, weighing)
    if not axes or contracted % len(weights.shape) in axes:
        return None
    return QUERIES if axes == {other % len(weights.shape)} else OTHER_AXIS


def sum_fault(weights: Node, summed: set[int], weighing: Weighing) -> str | None:
    """The same, where weights and values were multiplied by broadcasting and then summed.

    Args:
        weights: the multiplication's operand.
        summed: axes of its result that the sum is over, counted from the end.
        weighing: the softmax.
    """
    axes = {axis - len(weights.shape) for axis in _axes(weights, weighing) or ()}
    if not axes or axes & summed:
        return None
    beside = {axis for axis in summed if -axis <= len(weights.shape) and weights.shape[axis] > 1}
    return QUERIES if any(abs(a - b) == 1 for a in axes for b in beside) else OTHER_AXIS


_WHOLE, _PARTIAL = 1e-2, 5e-2  # how far from 1 a whole row's sum may be, and how near another's never is


def _axes(weights: Node, weighing: Weighing) -> set[int] | None:
    """Axes of `weights` along which the softmax's axis runs; None where the way there could not be followed."""
    way: list[Node] = []
    while weights.args:
        way.append(weights)
        parent = weights.args[0]
        if not isinstance(parent, Node) or parent.weighing is not weighing:
            return None
        weights = parent
    shape = weighing.entry.shape
    if weights.shape != shape or any(
        node.op not in ops.VIEWS | ops.SAME and node.shape != node.args[0].shape for node in way
    ):
        return None
    line = torch.arange(shape[weighing.dim]) > 0
    place = line.view([-1 if d == weighing.dim % len(shape) else 1 for d in range(len(shape))]).expand(shape)
    try:
        for node in reversed(way):
            place = replay(node, place) if node.op in ops.VIEWS else place
    except (RuntimeError, IndexError):
        return None
    for axis, stride in enumerate(place.stride()):  # along a stride of 0 nothing can differ
        place = place.narrow(axis, 0, 1) if stride == 0 and place.shape[axis] else place
    return {axis for axis in range(place.dim()) if bool((place != place.narrow(axis, 0, 1)).any())}
