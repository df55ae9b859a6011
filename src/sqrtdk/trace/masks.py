"""What is added to the logits: telling a mask from a bias, naming both, and seeing which keys are hidden."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.trace.constants import evaluate
from sqrtdk.trace.graph import Node

# A quarter of the most negative float16: logits and biases stay above it, every finfo.min is below.
HIDDEN = -16000.0
BOTTOM = -1e30  # beside -inf, a finfo.min of bfloat16 or float32 hides as well
_FAR = -1e3  # a mask that carries a bias besides reaches at least this low
# Older models hide with -10000 (BERT), -65500 (XLNet) or -100 (Swin): a mask then holds 0 and that number alone.
_TWO_VALUED = -50.0
BESIDES_MASK = " + mask"
ZERO_ONE = "zero-one mask"
LEAST_KEYS = 4  # below it two numbers fit a pattern by chance
_TRIANGLES = ("causal", "causal_lower_right")


@dataclass(slots=True)
class Addend:
    """A tensor added to the logits (or a mask that overwrote some), in the layout of its step.

    Attributes:
        kind: "mask", "alibi", "relative", "disentangled" or "bias"; a bias that also hides keys ends with
            `BESIDES_MASK`.
        form: "bool", "float", "implicit".
        value: what was added, where it is known.
        visible: True where the key takes part, where the mask's values are known.
        fill: the number that marks a hidden key.
        views: from this step's layout to the softmax's.
        shape: the logits' shape at this step.
        content: it depends on the content of q or k, so it belongs to the score.
        terms: how many content products it sums.
        source: the node that was added.
    """

    kind: str
    form: str
    value: Tensor | None
    visible: Tensor | None
    fill: float | None
    views: list[Node]
    shape: tuple[int, ...]
    content: bool
    terms: int = 0
    source: Node | None = None


def read_addend(
    node: Node, value: Tensor | None, alpha: float, views: list[Node], shape: tuple[int, ...]
) -> Addend | None:
    """Classify what was added, by its values where there are any, else by what it was made from.

    None when it is zero everywhere.
    """
    if value is not None and value.is_meta:
        value = evaluate(node)
    known = value is not None
    hidden, fill = hidden_entries(value * alpha) if known and value is not None else (None, None)
    if hidden is None and value is not None and known and not node.act and not _from_parameter(node):
        hidden, fill = _shallow_entries(value * alpha)
    terms = len(node.products) or (node.terms if node.act else 0)
    if terms and hidden is None:
        kind = "disentangled" if terms > 1 else "relative"
        return Addend(kind, "float", _scaled(value, alpha) if known else None, None, None, views, shape, True, terms)
    if value is None:
        return Addend(kind_by_origin(node), "float", None, None, None, views, shape, False)
    if not bool(value.any()):
        return None
    zero_one = hidden is None and _is_zero_one(value * alpha) and not _from_parameter(node)
    kind = ZERO_ONE if zero_one else kind_by_values(value * alpha, hidden)
    visible = None if hidden is None else ~hidden
    return Addend(kind, "float", _scaled(value, alpha), visible, fill, views, shape, False, source=node)


def _is_zero_one(value: Tensor) -> bool:
    """Whether it holds 0 and 1 alone, the ones where a mask has them: a mask that was meant to be bool."""
    zero, one = value == 0, value == 1
    two = value.dim() > 1 and bool((zero | one).all()) and bool(zero.any()) and bool(one.any())
    return two and pattern(one) in (*_TRIANGLES, "window", "padding")


def _shallow_entries(value: Tensor) -> tuple[Tensor | None, float | None]:
    """Entries of one number below 0 beside zeros that lie where a mask has them, however near to 0 that number is."""
    if value.dim() < 2 or value.shape[-1] < LEAST_KEYS or not value.is_floating_point() or not value.numel():
        return None, None
    lowest = float(value.min())
    hidden = value == lowest
    if not lowest < 0 or not bool((hidden | (value == 0)).all()):
        return None, None
    return (hidden, lowest) if pattern(~hidden) in (*_TRIANGLES, "padding") else (None, None)


def _from_parameter(node: Node) -> bool:
    """Whether a parameter is among what `node` was made from."""
    queue, known = [node], set()
    while queue:
        current = queue.pop()
        if current.op == "parameter" or current.learned:
            return True
        if current not in known:
            known.add(current)
            queue.extend(current.parents())
    return False


def _scaled(value: Tensor | None, alpha: float) -> Tensor | None:
    return value if value is None or alpha == 1 or value.is_meta else value * alpha


def given_form(addend: Addend) -> str:
    """In which form SDPA got a mask: it turns a bool one, and is_causal, into floats right before it uses them."""
    made = addend.source
    if made is None or made.op != "where" or any(p.op != "scalar_tensor" for p in list(made.parents())[1:]):
        return addend.form
    condition = made.args[0]
    ones = condition.main() if condition.op == "tril" else None
    return "implicit" if ones is not None and ones.op == "ones" and made.serial - ones.serial <= 4 else "bool"


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


def kind_by_values(value: Tensor, hidden: Tensor | None) -> str:
    """Name an additive tensor from its values: mask, ALiBi, relative positions, or another bias."""
    rest = value.float() if hidden is None else value.float().masked_fill(hidden, 0.0)
    if hidden is not None and not bool(rest.any()):
        return "mask"
    if value.dim() < 2 or value.shape[-1] < 3:
        return "bias" if hidden is None else "bias" + BESIDES_MASK
    kind = _position_kind(rest, hidden)
    return kind if hidden is None else kind + BESIDES_MASK


def _position_kind(rest: Tensor, hidden: Tensor | None) -> str:
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


def kind_by_origin(node: Node) -> str:
    """Without values: a parameter in its origin makes a bias, a large negative number makes a mask."""
    parameter, negative = False, False
    queue, seen = [node], 0
    while queue and seen < 500:
        current = queue.pop()
        seen += 1
        parameter |= current.op == "parameter" or current.learned
        negative |= any(isinstance(a, (int, float)) and not isinstance(a, bool) and a <= -1e3 for a in current.args)
        queue.extend(current.parents())
    if parameter:
        return "bias" + BESIDES_MASK if negative else "bias"
    return "mask"


def reach(visible: Tensor) -> dict[str, Any]:
    """Which keys the rows of (..., L, S) see, as `least`, `greatest`, `band` and `ahead_by_one` of a `Mask`.

    Keys that no row sees and rows that see no key are padding, and say nothing. Nothing of a mask that hides all.
    """
    rows, columns = visible.shape[-2:]
    matrices = visible.reshape(-1, rows, columns)
    i = torch.arange(rows, device=visible.device)[:, None]
    distance = i - torch.arange(columns, device=visible.device)[None, :]
    seen = distance[matrices.any(0)]
    if not seen.numel():
        return {}
    least, greatest = int(seen.min()), int(seen.max())
    live, blind = matrices.any(-2, keepdim=True), ~matrices.any(-1, keepdim=True)
    between = (distance >= least) & (distance <= greatest) & live
    shifted = ((matrices == ((distance >= -1) & live)) | blind).all((-1, -2))
    shifted &= (matrices & (distance == -1)).any((-1, -2))
    return {
        "least": least,
        "greatest": greatest,
        "band": bool(((matrices == between) | blind).all()),
        "ahead_by_one": int(shifted.sum()),
    }


def pattern(visible: Tensor) -> str | None:
    """Name the pattern of visible keys of (..., L, S): "causal", "window", ... or None where every key is seen."""
    if bool(visible.all()):
        return None
    if bool((visible == visible[..., :1, :]).all()):
        return "padding"
    rows, columns = visible.shape[-2:]
    seen = visible.reshape(-1, rows, columns).any(0)
    i = torch.arange(rows, device=visible.device)[:, None]
    j = torch.arange(columns, device=visible.device)[None, :]
    # A row that sees nothing in any batch element (padding on the left) says nothing about the pattern.
    known = seen.any(-1, keepdim=True)
    for name, offset in (("causal", 0), ("causal_lower_right", columns - rows)):
        if bool(((seen == (j <= i + offset)) | ~known).all()):
            return name
    band = i - j + (columns - rows if columns != rows else 0)
    if bool(seen.any()):
        low, high = int(band[seen].min()), int(band[seen].max())
        if (low >= 0 or high < rows - 1) and bool(((seen == ((band >= low) & (band <= high))) | ~known).all()):
            return "window"
    return "mask"
