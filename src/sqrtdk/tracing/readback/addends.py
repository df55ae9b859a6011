"""Reads what is added to the logits or written over them: tells masks from biases, and finds the hidden keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.masks.band import TRIANGLES, mask_pattern
from sqrtdk.tracing.steps import ZERO_ONE, Bias, Hide, LearnedSinks, Step, Unknown
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.graph import ancestors, evaluate, is_learned, written_logits, written_view
from sqrtdk.tracing.tape.node import Node

# A quarter of the most negative float16: logits and biases stay above it, every finfo.min is below.
HIDING_LOGIT = -16000.0
# In a tensor that holds -inf, finfo.min of bfloat16 or float32 (-3.4e38) hides as well.
BOTTOM = -1e30
HIDES = -1e3  # a number written over logits hides them below this; so does the lowest entry of a mask plus bias
# Older models hide with -10000 (BERT), -65500 (XLNet) or -100 (Swin): such a mask holds only 0 and that number.
_TWO_VALUED = -50.0
LEAST_PATTERN_KEYS = 4  # with fewer keys two numbers fit a pattern by chance
_MOST_ANCESTORS = 500  # ancestors that are searched to classify a tensor without values
MOST_MASK_ELEMENTS = 2**28  # elements of a mask, one byte each
_FILL_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2}  # position of the fill value: torch.full(size, -1e9)


# -- what is added -----------------------------------------------------------------------------------------------------


def read_addend(
    node: Node, value: Tensor | None, alpha: float, views: Sequence[Node], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    """Return the steps of a tensor added to the logits: a bias, a mask, both, or none if it is 0 everywhere.

    The values decide; without values, the operations that made the tensor.

    Args:
        node: node of the addend.
        value: values of the addend; None if they are unknown.
        alpha: factor on the addend.
        views: views from this step's layout to the softmax's.
        shape: shape of the logits at this step.
    """
    value = evaluate(node) if value is not None and value.is_meta else value
    content = len(node.products) or (node.terms if node.act else 0)
    of_content = "disentangled" if content > 1 else "relative"
    if value is None:
        return (Bias(of_content, None, content),) if content else _by_origin(node)
    added, views = value if alpha == 1 else value * alpha, tuple(views)
    addend, hidden = StepTensor(added, views, shape), _hidden_entries(added)
    if hidden is None and not node.act and not is_learned(node):
        hidden = _shallow_entries(added)
    if content and hidden is None:
        return (Bias(of_content, addend, content),)
    if not bool(added.any()):
        return ()
    if hidden is None:
        zero_one = _is_zero_one(added) and not is_learned(node)
        return (Bias(ZERO_ONE if zero_one else bias_name(added, None) or "bias", addend),)
    steps: tuple[Step, ...] = ()
    rest, name = added.masked_fill(hidden, 0.0), bias_name(added, hidden)
    if name is not None and float(rest.min()) <= HIDING_LOGIT:
        steps = read_addend(node, rest, 1.0, views, shape)  # a second mask: finfo.min for causal, -1e9 for padding
    elif name is not None:
        steps = (Bias(name, StepTensor(rest, views, shape)),)
    beside = any(isinstance(step, Bias) for step in steps)
    fill = float(added.min())
    return (*steps, Hide("float", fill, StepTensor(~hidden, views, shape), beside_bias=beside, source=node))


def _is_zero_one(value: Tensor) -> bool:
    """Whether the addend holds only 0 and 1, with the ones in a mask's pattern: `z + mask.float()` by mistake."""
    zero, one = value == 0, value == 1
    two = value.dim() > 1 and bool((zero | one).all()) and bool(zero.any()) and bool(one.any())
    return two and mask_pattern(one) in (*TRIANGLES, "window", "padding")


def _shallow_entries(value: Tensor) -> Tensor | None:
    """Return the hidden entries of a mask of 0 and one negative number, however small; None for any other tensor.

    `z + (1 - mask) * -1` is such a mask; only its pattern tells it from a bias.
    """
    if value.dim() < 2 or value.shape[-1] < LEAST_PATTERN_KEYS or not value.is_floating_point() or not value.numel():
        return None
    hidden = value == value.min()
    if not bool(value.min() < 0) or not bool((hidden | (value == 0)).all()):
        return None
    return hidden if mask_pattern(~hidden) in (*TRIANGLES, "padding") else None


def _hidden_entries(value: Tensor) -> Tensor | None:
    """Return which entries of an additive tensor hide their key, or None if none does.

    Hidden entries lie far below all others, with nothing in between. This gap tells -1e4 beside a small bias from the
    far end of a steep ALiBi.
    """
    if not value.numel() or not value.is_floating_point():
        return None
    lowest = float(value.min())
    if math.isnan(lowest) or lowest > _TWO_VALUED:
        return None
    if math.isinf(lowest):
        return value <= BOTTOM
    hidden = value <= 0.5 * lowest
    if lowest > HIDES and not bool(((value == 0) | (value == lowest)).all()):
        return None
    return None if bool(((value < 0.1 * lowest) & ~hidden).any()) else hidden


def bias_name(value: Tensor, hidden: Tensor | None) -> str | None:
    """Return the name of the bias in a tensor that is added to the logits.

    Args:
        value: the tensor, (..., L, S).
        hidden: True at its entries that hide a key, which don't count; None if there are none.

    Returns:
        "alibi" if it is linear in j on either side of the diagonal, "relative" if it is a function of i - j, else
        "bias"; None if the tensor is only a mask.
    """
    hidden = torch.zeros_like(value, dtype=torch.bool) if hidden is None else hidden
    rest = value.float().masked_fill(hidden, 0.0)
    if bool(hidden.any()) and not bool(rest.any()):
        return None
    if value.dim() < 2 or value.shape[-1] < 3:
        return "bias"
    rows, columns = rest.shape[-2:]
    two = hidden[..., 1:] | hidden[..., :-1]
    step = (rest[..., 1:] - rest[..., :-1]).masked_fill(two, 0.0)
    bend = (step[..., 1:] - step[..., :-1]).masked_fill(two[..., 1:] | two[..., :-1], 0.0)
    if rows == columns:  # -slope * |i - j| bends on the diagonal: exempt it from the test of straightness
        bend = bend.masked_fill(torch.eye(rows, columns - 2, device=rest.device).roll(1, 0).bool(), 0.0)
    steepest = float(step.abs().amax())
    if steepest > 0 and float(bend.abs().amax()) <= 1e-2 * steepest:
        return "alibi"
    if rows > 1:
        either = hidden[..., 1:, 1:] | hidden[..., :-1, :-1]
        off = (rest[..., 1:, 1:] - rest[..., :-1, :-1]).masked_fill(either, 0.0)
        if bool(rest.any()) and float(off.abs().amax()) <= 1e-6 * float(rest.abs().amax()):
            return "relative"
    return "bias"


def _by_origin(node: Node) -> tuple[Step, ...]:
    """Return the steps of an addend without values: a parameter among its ancestors is a bias, -1e9 is a mask."""
    parameter = negative = False
    for _, ancestor in zip(range(_MOST_ANCESTORS), ancestors(node), strict=False):
        parameter |= ancestor.op == "parameter" or ancestor.learned
        negative |= any(isinstance(a, (int, float)) and not isinstance(a, bool) and a <= HIDES for a in ancestor.args)
    if not parameter:
        return (Hide("float", None),)
    bias = Bias("bias", None)
    return (bias, Hide("float", None, beside_bias=True)) if negative else (bias,)


def as_passed(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps with each mask in the form that SDPA's caller passed.

    SDPA turns a bool mask and `is_causal` into a float mask right before use.
    """
    return tuple(_as_passed(step) if isinstance(step, Hide) else step for step in steps)


def _as_passed(hide: Hide) -> Hide:
    made = hide.source
    if made is None or made.op != "where" or any(p.op != "scalar_tensor" for p in list(made.parents())[1:]):
        return hide
    condition = made.args[0]
    ones = condition.main() if condition.op == "tril" else None
    by_flag = ones is not None and ones.op == "ones" and made.serial - ones.serial <= 4
    if not by_flag:
        return replace(hide, form="bool")
    hides = hide.visible is not None and not bool(hide.visible.value.all())
    return replace(hide, form="implicit", name="causal" if hides else None)  # a single row would look like padding


# -- logits that were written part by part: blocks of a product in a larger tensor, keys that a number hides -----------


def spread_over(steps: Sequence[Step], write: Node, node: Node, views: tuple[Node, ...]) -> tuple[Step, ...] | None:
    """Return the biases and masks of a part of the logits as steps on all logits; None if there are other steps.

    Args:
        steps: steps from the part as it was taken to the part as it was put back.
        write: the operation that put it back.
        node: the whole logits.
        views: views from the whole logits to the softmax, innermost first.
    """

    def whole(placed: StepTensor, elsewhere: float) -> StepTensor:
        value = placed.at_softmax()
        every = value.new_full(node.shape, elsewhere)
        written_view(write, every).copy_(value)
        return StepTensor(every, views, node.shape)

    spread: list[Step] = []
    for step in steps:
        if isinstance(step, Bias):
            spread.append(replace(step, addend=None if step.addend is None else whole(step.addend, 0.0)))
        elif isinstance(step, Hide) and step.visible is not None:
            spread.append(replace(step, visible=whole(step.visible, 1.0)))
        else:
            return None
    return tuple(spread)


def numbers_over(node: Node, writes: tuple[Node, ...], views: tuple[Node, ...]) -> tuple[Step, ...]:
    """Return the step of numbers written over logits in place, such as `z[:, :, :, pad] = -1e9`.

    Args:
        node: node of the logits.
        writes: nodes of the writes.
        views: the views from there to the softmax, innermost first.

    Returns:
        A mask if all numbers are low enough to hide a key; () without writes; an unknown step for any other write.
    """
    numbers, visible = [_fill(write) for write in writes], torch.ones(node.shape, dtype=torch.bool)
    known = [number for number in numbers if number is not None and number < HIDES]
    if len(known) < len(writes):
        return (Unknown("overwrite"),)
    for write in writes:
        written_view(write, visible).fill_(False)
    return (Hide("bool", min(known), StepTensor(visible, views, node.shape)),) if writes else ()


def numbers_around(node: Node, base: Node, writes: tuple[Node, ...], views: tuple[Node, ...]) -> tuple[Step, ...]:
    """Return the step of the numbers that surround logits written into a larger tensor.

    Args:
        node: node of the larger tensor after the writes.
        base: its node before them.
        writes: nodes of the writes, of logits and of numbers.
        views: the views from there to the softmax, innermost first.

    Returns:
        A mask if all these numbers hide keys; learned sinks if they are the last column; () if there are none; an
        unknown step for anything else.
    """
    around, inside = _numbers(base, node.shape), torch.zeros(node.shape, dtype=torch.bool)
    for write in writes:
        is_block, number = written_logits(write) is not None, _fill(write)
        if around is None or (number is None and not is_block):
            return (Unknown("overwrite"),)
        written_view(write, inside).fill_(is_block)
        if number is not None:
            written_view(write, around).fill_(number)
    numbers = torch.zeros(0) if around is None else around[~inside]
    if not numbers.numel():
        return ()
    if bool((numbers < HIDES).all()):  # full = torch.full(shape, -1e9); full[..., :n] = z
        return (Hide("float", float(numbers.max()), StepTensor(inside, views, node.shape)),)
    # full = torch.zeros(shape); full[..., :-1] = z: the last column is an attention sink.
    column = bool(inside[..., :-1].all()) and not bool(inside[..., -1].any()) and not bool(numbers.isnan().any())
    return (LearnedSinks(),) if column else (Unknown("overwrite"),)


def _numbers(base: Node, shape: tuple[int, ...]) -> Tensor | None:
    """Return a tensor's values before it was written to (NaN for `torch.empty`), or None if they are unknown."""
    if "empty" in base.op:
        return torch.full(shape, torch.nan)
    number = base.number(_FILL_ARGUMENT[base.op]) if base.op in _FILL_ARGUMENT else None
    known = evaluate(base) if number is None else torch.full(shape, number)
    return known.to(torch.float32).cpu().clone() if known is not None and known.shape == shape else None


def _fill(write: Node) -> float | None:
    """Return the number that a write put everywhere, or None for any other write."""
    if write.op == "zero":
        return 0.0
    if write.op not in ("fill", "copy") or len(write.args) < 2:
        return None
    if (number := write.number(1)) is not None:
        return number
    value = evaluate(write.args[1]) if isinstance(write.args[1], Node) else None
    return float(value.min()) if value is not None and value.numel() and bool(value.min() == value.max()) else None
