"""Reads the steps on weights between the softmax and the values, from the weights' numbers before and after each.

Weights may be dropped out, masked again, thinned out, divided by their sum, or multiplied by one number or one per row.
Heads may be mixed and softmaxes combined (`mixing`). Another tensor may join the weights:

    w = 0.5 * p + 0.5 * adjacency          # Molecule Attention Transformer (Maziarka et al. 2020, arXiv:2002.08264)
    w = p - 1 / n                          # centred attention (Ali et al. 2023, arXiv:2306.01610)
    w = (1 - g) * p + g * positions        # ConViT, where the positions are constants

Such a tensor is not computed from the weights, so each weight still contains its share of the softmax, and the scale
of the logits keeps its meaning. A power of the weights amounts to another scale: an unknown change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.mixing import over_heads
from sqrtdk.tracing.probe.replays import subgraph_between
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import ancestors, evaluate, is_learned
from sqrtdk.tracing.tape.node import Node, SoftmaxRun, WeightCode, WeightSteps, back, origin

WHOLE_ROW_TOLERANCE = 1e-2  # a sum this near to 1 is that of a whole row
_SPARSE = frozenset({"_sparse_coo_tensor_with_dims_and_tensors", "_sparse_csr_tensor_unsafe", "_coalesce"})
_KEEPING_WEIGHTS = ops.PASSING - {"native_dropout"} | _SPARSE | {"cat", "stack", "constant_pad_nd", "copy"}
_JOINED = {  # messages for another tensor
    "add": "trace.joined.added",
    "sub": "trace.joined.subtracted",
    "rsub": "trace.joined.taken_from",
    "mul": "trace.joined.multiplied",
    "div": "trace.joined.divided",
    "lerp": "trace.joined.averaged",
    "where": "trace.joined.replaced",
    "masked_fill": "trace.joined.constant.replaced",
}
_CONSTANT = {  # messages for a constant, which neither multiplies nor averages
    "add": "trace.joined.constant.added",
    "sub": "trace.joined.constant.subtracted",
    "rsub": "trace.joined.constant.taken_from",
    "where": "trace.joined.constant.replaced",
}
_SUM_OR_DIFFERENCE = frozenset({"add", "sub"})


def carry_weights(
    node: Node, tensor: Tensor, tensors: dict[int, Tensor], weights: Node, softmax_run: SoftmaxRun
) -> WeightSteps:
    """Return the steps on weights after the operation of `node`.

    Args:
        node: node of the result.
        tensor: values of the result.
        tensors: the tensor operands by position.
        weights: the operand that carries the weights.
        softmax_run: the softmax of the weights.
    """
    before = _of(weights)
    if node.op in _KEEPING_WEIGHTS:
        return before
    if (drop := dropout_of(node)) is not None:
        return before.times((1 - drop[0]) * drop[1], node.op)
    if (after := over_heads(node, weights, before)) is not None:
        return after
    numbers = _before_and_after(node, tensor, tensors, weights, softmax_run) if node.shape == weights.shape else None
    after = (
        None if numbers is None else _known_change(node, weights, softmax_run, numbers, torch.finfo(tensor.dtype).eps)
    )
    return after or join_weights(node, weights, softmax_run, before) or before.changed(node.op)


def _known_change(
    node: Node, weights: Node, softmax_run: SoftmaxRun, numbers: tuple[Tensor, Tensor], eps: float
) -> WeightSteps | None:
    """Return the steps on weights after a mask or a multiplication by one number per row; None for other changes."""
    before, (old, new) = _of(weights), numbers
    rounding = 8 * max(eps, 2.0**-20)
    keys = softmax_run.dim if node.shape == softmax_run.entry.shape else -1
    moved = ((new - old).abs() > rounding * old.abs()) & ~old.isnan()
    changed = bool(moved.any()) or bool((new.isnan() & ~old.isnan()).any())
    if bool(moved.any()) and not bool((new.masked_select(moved) != 0).any()):
        if new.numel() >= math.prod(softmax_run.entry.shape):
            # A row or a head that is 0 as a whole hides no key from the others: a head mask, not a mask of keys.
            moved &= (new != 0).any(keys, keepdim=True)
        return _masked(node, weights, softmax_run, before) if bool(moved.any()) else before
    every = tuple(range(new.dim()))
    if changed and _is_single(node, weights) and (by := _factor(old, new, every, rounding)) is not None:
        return before.times(float(by), node.op)
    # w / w.sum(-1): the keys' axis, the last, is tried first; a sum over any other axis is one over the queries.
    for axis in sorted(every, reverse=True):
        if new.shape[axis] < 2 or not _sums_to_one(new, axis):
            continue
        if _meets_their_sum(node, softmax_run, axis) or (changed and _factor(old, new, (axis,), rounding) is not None):
            return before.over_sum() if axis == every[-1] else _over_other_sum(before)
    same = not changed or _factor(old, new, (keys,), rounding) is not None  # a head mask, a learned gate
    return before if same else None


def _masked(node: Node, weights: Node, softmax_run: SoftmaxRun, before: WeightSteps) -> WeightSteps:
    """Return the steps after some weights became 0: by their own size (top-k), or by a mask."""
    others = [parent for parent in node.parents() if parent is not weights]
    alone = node.op not in ("tril", "triu", "zero") and not others
    if alone or any(_is_made_of(other, softmax_run) for other in others):
        return replace(before, thinned=True)
    return replace(before, remasked=True, renormalised=False)


def _over_other_sum(before: WeightSteps) -> WeightSteps:
    code: WeightCode = "sinkhorn" if before.has("other_sum", "sinkhorn") else "other_sum"
    return before.without("other_sum", "sinkhorn").changed(Message(f"trace.step.{code}"), code)


def overwritten(old: Node, new: Node, tensor: Tensor) -> WeightSteps:
    """Return the steps on weights after a part of them was written in place.

    Args:
        old: node of the weights before the write.
        new: node of the part that was written.
        tensor: numbers of that part.
    """
    before = _of(old)
    if new.weights is not None and new.softmax_run is old.softmax_run:
        return new.weights.weight_steps
    zero = number_of(new, 1) == 0 if tensor.is_meta else not bool(tensor.any())
    if zero:
        return replace(before, remasked=True, renormalised=False)
    return before.changed(Message("trace.step.in_place", name=new.op))


def _of(node: Node) -> WeightSteps:
    return WeightSteps() if node.weights is None else node.weights.weight_steps


# -- values ------------------------------------------------------------------------------------------------------------


def _before_and_after(
    node: Node, tensor: Tensor, tensors: dict[int, Tensor], weights: Node, softmax_run: SoftmaxRun
) -> tuple[Tensor, Tensor] | None:
    """Return the weights before and after an operation, in float32 or float64, or None.

    For an operation in place the weights before are the softmax's output. If they are gone, or have no data, the
    operation runs again on random weights.
    """
    old = next((tensors[i] for i, arg in enumerate(node.args) if arg is weights and i in tensors), None)
    if old is not None and not tensor.is_meta and (old is tensor or old.data_ptr() == tensor.data_ptr()):
        known = _of(weights) == WeightSteps() and softmax_run.weights.numel() == tensor.numel()
        old = softmax_run.weights.reshape(tensor.shape) if known else None
    if old is None or tensor.is_meta:
        return _made_up(node, tensors, weights)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return old.detach().to(wide), tensor.detach().to(wide)


def _made_up(node: Node, tensors: dict[int, Tensor], weights: Node) -> tuple[Tensor, Tensor] | None:
    """Return random weights before and after an operation; a mask without values hides a random half of them."""
    random = torch.Generator().manual_seed(0)
    before = node.operands
    others = {i: value for i, value in tensors.items() if node.args[i].weights is None}
    node.operands = {i: value for i, value in others.items() if not value.is_meta}
    for i, value in others.items():
        arg = node.args[i]
        if value.is_meta and not arg.act and not is_learned(arg) and evaluate(arg) is None:
            shape = tuple(value.shape)
            half = torch.rand(shape, generator=random) < 0.5
            node.operands[i] = half if value.dtype == torch.bool else torch.full(shape, _unknown(value))
    part = subgraph_between(weights, node)
    try:
        if part is None or part.is_large:
            return None
        old = torch.rand(weights.shape, generator=random, dtype=torch.float64).softmax(-1).to(part.device)
        return old, part.run(old)
    except Exception:  # the operation does not run in float64, or an operand is unknown
        return (old, old) if node.op in ("mul", "div") else None
    finally:
        node.operands = before


def _unknown(value: Tensor) -> float:
    """Return a stand-in for a tensor without values: NaN for one number (any gain), ones for several."""
    return math.nan if value.numel() == 1 else 1.0


def _factor(old: Tensor, new: Tensor, axes: tuple[int, ...], rounding: float) -> Tensor | None:
    """Return f of the least squares new = f * old, constant along `axes`; None if off by more than `rounding`."""
    products, squares = ((x * old).masked_fill(old.isnan(), 0.0).sum(axes, keepdim=True) for x in (new, old))
    by = products / squares
    expected = by.nan_to_num() * old
    near = (new - expected).abs() <= rounding * (expected.abs() + torch.finfo(torch.float16).tiny)
    return by if bool((near | old.isnan() | new.isnan()).all()) else None


def _sums_to_one(new: Tensor, axis: int) -> bool:
    sums = new.nansum(axis)
    return bool((((sums - 1).abs() < WHOLE_ROW_TOLERANCE) | (sums == 0)).all()) and bool((sums != 0).any())


def _meets_their_sum(node: Node, softmax_run: SoftmaxRun, axis: int) -> bool:
    """Whether an operand is computed from the weights with one number along an axis, as their sum is."""
    made = [p for p in node.parents() if p.softmax_run is softmax_run and len(p.shape) == len(node.shape)]
    return any(p.shape[axis] == 1 for p in made)


def _is_single(node: Node, weights: Node) -> bool:
    """Whether the other operands are one number each and not learned; a learned number is a gate, not a gain."""
    others = [parent for parent in node.parents() if parent is not weights]
    return all(math.prod(other.shape) == 1 and origin(other).op != "parameter" for other in others)


# -- another tensor ----------------------------------------------------------------------------------------------------


def join_weights(node: Node, weights: Node, softmax_run: SoftmaxRun, before: WeightSteps) -> WeightSteps | None:
    """Return the steps on weights after another tensor or a number was added or multiplied.

    Args:
        node: node of the result.
        weights: node of the weights.
        softmax_run: their softmax.
        before: the steps until then.

    Returns:
        The steps; None if nothing joined: the other tensor comes from the weights themselves, or the shape changed.
    """
    joined = _JOINED.get(node.op)
    others = [parent for parent in node.parents() if parent is not weights]
    if joined is None or node.shape != weights.shape or not softmax_run.node.products:
        return None
    if (node.op == "div" and node.args[0] is not weights) or (node.op in ("mul", "div") and not others):
        return None
    # w - w.mean(-1, keepdim=True): one number per row may come from the weights; adding it still counts as joining.
    rows = node.op in _SUM_OR_DIFFERENCE
    inside = [p for p in others if not (rows and p.shape[-1:] == (1,) and len(p.shape) == len(node.shape))]
    if any(_is_made_of(other, softmax_run) for other in inside):
        return None
    return before.joined(Message(joined if others else _CONSTANT.get(node.op, joined)))


def _is_made_of(node: Node, softmax_run: SoftmaxRun) -> bool:
    """Whether a tensor is computed from the numbers of the weights, not only from their shape."""
    return any(ancestor.softmax_run is softmax_run for ancestor in ancestors(node, closed=ops.CREATIONS))


# -- dropout -----------------------------------------------------------------------------------------------------------

# Dropout by hand, w * (torch.rand_like(w) > 0.1): the rate from the bound of each comparison.
_DROPOUT_RATES: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("gt", "ge"), lambda bound: bound),
    **dict.fromkeys(("lt", "le"), lambda bound: 1 - bound),
}
_UNIFORM_RANDOM = frozenset({"rand", "rand_like", "uniform"})


def dropout_of(node: Node) -> tuple[float, float] | None:
    """Return the dropout that `node` applies to its input.

    Returns:
        (rate, gain), where gain multiplies the numbers that remain, 1 / (1 - rate) for PyTorch's; None if no operand is
        a random mask.
    """
    if node.op == "native_dropout":
        rate = float(node.args[1]) if node.args[2] else 0.0
        return (rate, 1 / (1 - rate)) if 0 < rate < 1 else None
    if node.op != "mul":
        return None
    return next(
        (keep_scale for parent in node.parents() if not parent.act and (keep_scale := _keep_scale(parent)) is not None),
        None,
    )


def _keep_scale(mask: Node) -> tuple[float, float] | None:
    # (torch.rand_like(w) > p).float() / (1 - p)
    *passed, mask = back(mask, ops.PASSING | {"div", "mul"})
    gain = 1.0
    for step in passed:
        number = number_of(step, 1) if step.op in ("div", "mul") else 1.0
        if not number:
            return None
        gain *= 1 / number if step.op == "div" else number
    rate = _rate(mask)
    return None if rate is None else (rate, gain)


def _rate(mask: Node) -> float | None:
    """Return the rate of entries that a random mask sets to 0, or None if the mask is not random."""
    if mask.op == "bernoulli":
        probability = number_of(mask, 1) if len(mask.args) > 1 else _probability(mask)
        return None if probability is None else 1 - probability
    bound = number_of(mask, 1)
    if bound is None or mask.op not in _DROPOUT_RATES or mask.args[0].op not in _UNIFORM_RANDOM:
        return None
    return _DROPOUT_RATES[mask.op](bound)


def _probability(mask: Node) -> float | None:
    """Return the probability of ones: 0.5 is the default of `x.bernoulli_()`, and `torch.bernoulli(x)` has it in x."""
    if mask.func is not None and mask.func._schema.is_mutable:
        return 0.5
    value = evaluate(mask.args[0])
    known = value is not None and value.numel() and bool((value == value.flatten()[0]).all())
    return float(value.flatten()[0]) if known and value is not None else None


def number_of(node: Node, position: int) -> float | None:
    """Return an argument of a node as a number, also if the model's code made a tensor of one constant of it.

    Args:
        node: node of the operation.
        position: position of the argument.

    Returns:
        The number; None if there is none, or if it depends on inputs or parameters.
    """
    arg = node.args[position] if position < len(node.args) else None
    if isinstance(arg, Node):
        value = evaluate(arg)
        return float(value) if value is not None and value.numel() == 1 else None
    return node.number(position)
