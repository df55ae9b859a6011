"""What a faulty backward pass may have done, each as a `Change` of the formula whose gradients can be computed.

A name is proven: the changed formula gives the gradients of the run, within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.backward.logits import BOTTOM, Change
from sqrtdk.tracing.tensors import CallTensors

_MOST_NUMBERS = 6
LOWER_DTYPES = (torch.bfloat16, torch.float16)
# What is normalised and summed otherwise: autograd of the changed formula, a kernel with the forward's lse and output,
# and the two between them.
_KEPT = ((True, True), (False, False), (True, False), (False, True))


@dataclass(frozen=True, slots=True, eq=False)
class FormulaSlip:
    """A mistake with its name.

    Attributes:
        code: Id of its sentence behind `laws.gradient.what.`.
        change: What it changes of the formula.
        values: Values of the sentence.
        nearly: Whether it need not give the run's gradients to the last bits, because the order of roundings is the
            run's own: half of the difference, three quarters of its squares, must go.
    """

    code: str
    change: Change
    values: dict[str, Any] = field(default_factory=dict)
    nearly: bool = False


def mistakes(
    call: CallTensors, lse: bool, gain: float | None, rows: Tensor | None, keys: Tensor | None
) -> Iterator[FormulaSlip]:
    """Yield the mistakes that are possible in an attention, the simple ones first.

    Args:
        call: The attention.
        lse: Whether its lse has a gradient.
        gain: The factor on the gradient of v, if it is one factor; None if not.
        rows: False for rows where the gradient of q is wrongly zero, (L,); None without such rows.
        keys: False for keys where that of k or v is, (S,); None without such keys.
    """
    names = {term.name for term in call.terms or ()}
    if lse:
        yield FormulaSlip("no_lse", Change(lse=0.0))
        yield FormulaSlip("lse_sign", Change(lse=-1.0))
    for name, left in (("rows", rows), ("keys", keys)):
        if left is not None:
            numbers = {"numbers": numbers_text((~left).nonzero().flatten().tolist())}
            for alone in (False, True):
                both = {"rows": None, "keys": None} | {name: left}
                yield FormulaSlip(
                    f"no_{name}", Change(rows=both["rows"], keys=both["keys"], logits_alone=alone), numbers
                )
    yield FormulaSlip("no_delta", Change(delta=0.0))
    yield FormulaSlip("denominator_alone", Change(numerator=0.0))
    yield FormulaSlip("delta_twice", Change(delta=2.0))
    yield FormulaSlip("delta_unsummed", Change(delta_summed=False))
    if call.kept is not None:
        for own in (True, False):
            yield FormulaSlip("no_dropout", Change(frozenset({"dropout"}), own_delta=own))
    for kind, visible in _other_masks(call):
        for own_sum, own_delta in _KEPT:
            yield FormulaSlip(f"no_{kind}", Change(visible=visible, own_sum=own_sum, own_delta=own_delta))
    if "softcap" in names:
        yield FormulaSlip("flat_softcap", Change(flat_cap=True))
    for name in ("softcap", "bias", "sinks", "scale"):
        if name in names:
            for own_sum, own_delta in _KEPT:
                yield FormulaSlip(f"no_{name}", Change(frozenset({name}), own_sum=own_sum, own_delta=own_delta))
    if gain is not None:
        for own_delta in (True, False):
            yield FormulaSlip("overwritten", Change(gain=gain, own_delta=own_delta), {"factor": f"{gain:.4g}"})
    for what in ("output", "weights", "qk", "softmax", "cotangent"):
        for dtype in LOWER_DTYPES:
            if str(dtype) != f"torch.{call.dtype}":
                values = {"dtype": str(dtype).removeprefix("torch.")}
                own = what != "weights"
                yield FormulaSlip(
                    f"rounded_{what}", Change(rounded=what, dtype=dtype, own_delta=own), values, nearly=True
                )


def _other_masks(call: CallTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield masks with a part of the attention's own mask left out, and the name of the part."""
    own = visible_keys(call)
    if own is None:
        return
    rows, columns = own.shape[-2:]
    distance = torch.arange(rows, device=own.device)[:, None] - torch.arange(columns, device=own.device)
    some = own.any(-2, keepdim=True)  # columns that any row sees: all but padding
    tried = [own]
    for offset in dict.fromkeys((0, columns - rows)):
        causal = distance + offset >= 0
        if bool((own & ~causal).any()):
            continue
        yield from _new("window", causal & some, tried)
        yield from _new("padding", causal, tried)
    yield from _new("causal", some.expand_as(own), tried)
    yield from _new("mask", torch.ones_like(own), tried)


def _new(kind: str, mask: Tensor, tried: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    mask = torch.broadcast_to(mask, tried[0].shape) if mask.dim() <= tried[0].dim() else mask
    if not any(torch.equal(mask, other) for other in tried):
        tried.append(mask)
        yield kind, mask


def visible_keys(call: CallTensors) -> Tensor | None:
    """Return which keys the masks of an attention show, with two axes or more, or None if it has no mask."""
    found: Tensor | None = None
    for term in call.terms or ():
        if term.name == "mask" and isinstance(term.value, Tensor):
            value = term.value.bool()
            found = value if found is None else found & value
    if found is None:
        return None
    whole = (*((1, 1, *found.shape)[-4:-2]), call.query.values.shape[2], call.key.values.shape[2])
    return found.reshape((1,) * (4 - found.dim()) + tuple(found.shape)).expand(-1, -1, *whole[2:])


def blind_rows(call: CallTensors) -> Tensor | None:
    """Return the rows that see no key, (B, Hq, L); None if each sees one."""
    visible = visible_keys(call)
    for term in call.terms or ():
        if term.name == "bias" and isinstance(term.value, Tensor):
            seen = term.value > BOTTOM
            visible = seen if visible is None else visible & seen
    if visible is None:
        return None
    whole = *call.query.values.shape[:3], call.key.values.shape[2]
    blind = torch.broadcast_to(~visible.any(-1, keepdim=True), (*whole[:3], 1))[..., 0]
    return blind if bool(blind.any()) else None


def numbers_text(numbers: Sequence[int]) -> str:
    """Return numbers as text, with ranges, six at most.

    Example:
        >>> numbers_text([0, 2, 5, 6, 7])
        '0, 2, 5-7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts[:_MOST_NUMBERS]) + (", ..." if len(texts) > _MOST_NUMBERS else "")
