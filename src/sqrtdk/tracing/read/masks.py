"""What is added to the logits, or written over them: telling a mask from a bias, and which keys are hidden."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.read.patterns import TRIANGLES, pattern
from sqrtdk.tracing.steps import Bias, Hide, Step
from sqrtdk.tracing.steps.bias import ZERO_ONE
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node, ancestors

# A quarter of the most negative float16: logits and biases stay above it, every finfo.min is below.
HIDDEN = -16000.0
BOTTOM = -1e30  # beside -inf, a finfo.min of bfloat16 or float32 hides as well
_FAR = -1e3  # a mask that carries a bias besides reaches at least this low
# Older models hide with -10000 (BERT), -65500 (XLNet) or -100 (Swin): a mask then holds 0 and that number alone.
_TWO_VALUED = -50.0
LEAST_KEYS = 4  # below it two numbers fit a pattern by chance
_FURTHEST = 500  # ancestors of a tensor without values that are asked what it is
LARGEST = 2**28  # elements of a mask, one byte each


def band(rows: int, columns: int, above: int, device: torch.device) -> Tensor:
    """(1, 1, L, S) bool, True where row i sees key j: j <= i + above."""
    return torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device).tril_(above)


def read_overwritten(
    condition: Tensor | None,
    node: object,
    fill: float | None,
    views: Sequence[Node],
    shape: tuple[int, ...],
    *,
    keep: bool,
) -> Hide:
    """The mask that `masked_fill` or `where` writes over the logits.

    Args:
        condition: its values; None where they are not known.
        node: its node.
        fill: what is written.
        views: from this step's layout to the softmax's.
        shape: the logits' at this step.
        keep: it is True where the logits stay.
    """
    if condition is not None and condition.is_meta and isinstance(node, Node):
        condition = evaluate(node)
    visible = None
    if condition is not None and not condition.is_meta:
        visible = Placed(condition if keep else ~condition, tuple(views), shape)
    return Hide("bool", -math.inf if fill is None else fill, visible)


def read_addend(
    node: Node, value: Tensor | None, alpha: float, views: Sequence[Node], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    """The steps that an addend is, by its values where there are any, else by what it was made from.

    A bias, a mask, both in one tensor, or nothing where it is 0 everywhere.

    Args:
        node: what was added.
        value: its values; None where they are not known.
        alpha: the number that they were multiplied by.
        views: from this step's layout to the softmax's.
        shape: the logits' at this step.
    """
    views = tuple(views)
    if value is not None and value.is_meta:
        value = evaluate(node)
    added = None if value is None else value if alpha == 1 else value * alpha
    hidden, fill = (None, None) if added is None else hidden_entries(added)
    if hidden is None and added is not None and not node.act and not _learned(node):
        hidden, fill = _shallow_entries(added)
    addend = None if added is None else Placed(added, views, shape)
    content = len(node.products) or (node.terms if node.act else 0)
    if content and hidden is None:
        return (Bias("disentangled" if content > 1 else "relative", addend, content),)
    if added is None:
        return _by_origin(node)
    if not bool(added.any()):
        return ()
    if hidden is None and _is_zero_one(added) and not _learned(node):
        return (Bias(ZERO_ONE, addend),)
    bias = bias_name(added, hidden)
    rest = addend if hidden is None else Placed(added.masked_fill(hidden, 0.0), views, shape)
    steps: tuple[Step, ...] = ()
    if bias is not None and rest is not addend and rest is not None and float(rest.value.min()) <= HIDDEN:
        steps = read_addend(node, rest.value, 1.0, views, shape)  # keys that are hidden by less
    elif bias is not None:
        steps = (Bias(bias, rest),)
    if hidden is not None:
        beside = any(isinstance(step, Bias) for step in steps)
        steps = (*steps, Hide("float", fill, Placed(~hidden, views, shape), beside_bias=beside, source=node))
    return steps


def _is_zero_one(value: Tensor) -> bool:
    """Whether it holds 0 and 1 alone, the ones where a mask has them: a mask that was meant to be bool."""
    zero, one = value == 0, value == 1
    two = value.dim() > 1 and bool((zero | one).all()) and bool(zero.any()) and bool(one.any())
    return two and pattern(one) in (*TRIANGLES, "window", "padding")


def _shallow_entries(value: Tensor) -> tuple[Tensor | None, float | None]:
    """Entries of one number below 0 beside zeros that lie where a mask has them, however near to 0 that number is."""
    if value.dim() < 2 or value.shape[-1] < LEAST_KEYS or not value.is_floating_point() or not value.numel():
        return None, None
    lowest = float(value.min())
    hidden = value == lowest
    if not lowest < 0 or not bool((hidden | (value == 0)).all()):
        return None, None
    return (hidden, lowest) if pattern(~hidden) in (*TRIANGLES, "padding") else (None, None)


def _learned(node: Node) -> bool:
    """Whether a parameter is among what `node` was made from."""
    return any(ancestor.op == "parameter" or ancestor.learned for ancestor in ancestors(node))


def as_passed(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps with each mask in the form in which SDPA got it.

    SDPA turns a bool mask, and is_causal, into floats right before it uses them.
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
    return replace(hide, form="implicit", name="causal" if hides else None)  # of one row it looks like padding


def hidden_entries(value: Tensor) -> tuple[Tensor | None, float | None]:
    """Which entries of an additive tensor hide their key, and by what number; (None, None) where none does.

    Hidden entries lie far below all others, with nothing in between: that tells -1e4 beside a small bias from the
    far end of a steep ALiBi.
    """
    if not value.numel() or not value.is_floating_point():
        return None, None
    lowest = float(value.min())
    if math.isnan(lowest) or lowest > _TWO_VALUED:
        return None, None
    if math.isinf(lowest):
        return value <= BOTTOM, lowest
    hidden = value <= 0.5 * lowest
    if lowest > _FAR and not bool(((value == 0) | (value == lowest)).all()):
        return None, None
    if bool(((value < 0.1 * lowest) & ~hidden).any()):
        return None, None
    return hidden, lowest


def bias_name(value: Tensor, hidden: Tensor | None) -> str | None:
    """Name an additive tensor from its values: ALiBi, relative positions, another bias; None for a mere mask."""
    rest = value.float() if hidden is None else value.float().masked_fill(hidden, 0.0)
    if hidden is not None and not bool(rest.any()):
        return None
    if value.dim() < 2 or value.shape[-1] < 3:
        return "bias"
    return _position_bias(rest, hidden)


def _position_bias(rest: Tensor, hidden: Tensor | None) -> str:
    """Name a bias: straight lines on either side of the diagonal are "alibi", a function of i - j "relative"."""
    rows, columns = rest.shape[-2:]
    step = rest[..., 1:] - rest[..., :-1]
    bend = (step[..., 1:] - step[..., :-1]).abs()
    size = float(rest.abs().amax())
    if hidden is not None:
        three = hidden[..., 2:] | hidden[..., 1:-1] | hidden[..., :-2]
        bend = bend.masked_fill(three.expand_as(bend), 0.0)
        step = step.masked_fill((hidden[..., 1:] | hidden[..., :-1]).expand_as(step), 0.0)
    if rows == columns:  # |i - j| has its corner on the diagonal
        i, j = torch.arange(rows, device=rest.device)[:, None], torch.arange(columns - 2, device=rest.device)[None, :]
        bend = bend.masked_fill((j + 1 == i).expand_as(bend), 0.0)
    steepest = float(step.abs().amax())
    if steepest > 0 and float(bend.amax()) <= 1e-2 * steepest:
        return "alibi"
    if rows > 1:
        off = (rest[..., 1:, 1:] - rest[..., :-1, :-1]).abs()
        if hidden is not None:
            either = hidden[..., 1:, 1:] | hidden[..., :-1, :-1]
            off = off.masked_fill(either.expand_as(off), 0.0)
        if size > 0 and float(off.amax()) <= 1e-6 * size:
            return "relative"
    return "bias"


def _by_origin(node: Node) -> tuple[Step, ...]:
    """Without values: a parameter in its origin makes a bias, a large negative number makes a mask."""
    parameter = negative = False
    for _, ancestor in zip(range(_FURTHEST), ancestors(node), strict=False):
        parameter |= ancestor.op == "parameter" or ancestor.learned
        negative |= any(isinstance(a, (int, float)) and not isinstance(a, bool) and a <= _FAR for a in ancestor.args)
    if not parameter:
        return (Hide("float", None),)
    bias = Bias("bias", None)
    return (bias, Hide("float", None, beside_bias=True)) if negative else (bias,)
