"""What a side tells of a formula that it does not tell whole, and that put into another formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.numbers import rescaled, times
from sqrtdk.compare.observed import Seen
from sqrtdk.compare.options import BIAS, DROPOUT, FILL, MASK, SCALE, SINKS, SOFTCAP
from sqrtdk.compare.program import Formula
from sqrtdk.tracing.tensors import CallTensors, Term


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Parts of a formula that a side tells; None is what it does not tell.

    Attributes:
        scale: all factors of the logits, 1.0 where it says that there are none.
        softcap: its value, infinity where it says that there is none; where it stands is looked for.
        bias: what is added, broadcasts to (B, Hq, L, S), a single 0 where it says that there is none.
        bias_name: as records have it.
        visible: the mask, True throughout where it says that there is none.
        mask: kind of the mask, as records have it.
        fill: what hidden keys have.
        fill_added: whether that is added.
        sinks: (Hq,), minus infinity where it says that there are none.
        kept: True where dropout kept the weight.
        dropout: its rate, where `kept` is known.
        logits_dtype: dtype to which logits are rounded, where that is less than the side's own.
        weights_dtype: the weights, likewise.
    """

    scale: Tensor | float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    bias_name: str = "bias"
    visible: Tensor | None = None
    mask: str = ""
    fill: float | None = None
    fill_added: bool = False
    sinks: Tensor | None = None
    kept: Tensor | None = None
    dropout: float = 0.0
    logits_dtype: str | None = None
    weights_dtype: str | None = None


def merged(known: Known | None, other: Formula) -> tuple[Formula, frozenset[int]]:
    """The other's formula with what is known in it, and the parts that are known."""
    base = other
    fixed: set[int] = set()
    if known is None:
        return base, frozenset()
    if known.scale is not None:
        base = rescaled(base, Formula(known.scale))
        fixed.add(SCALE)
    if known.softcap is not None:
        base = replace(base, softcap=None if math.isinf(known.softcap) else known.softcap)
        fixed.add(SOFTCAP)
    if known.bias is not None:
        none = not bool(known.bias.any())
        base = replace(base, bias=None if none else known.bias, bias_name=known.bias_name, bias_by=1.0)
        fixed.add(BIAS)
    if known.visible is not None:
        base = replace(base, visible=known.visible, mask=known.mask)
        fixed.add(MASK)
    if known.fill is not None:
        base = replace(base, fill=known.fill, fill_by=1.0, fill_added=known.fill_added)
        fixed.add(FILL)
    if known.sinks is not None:
        base = replace(base, sinks=None if bool(torch.isneginf(known.sinks).all()) else known.sinks)
        fixed.add(SINKS)
    if known.kept is not None:
        base = replace(base, kept=known.kept, dropout=known.dropout)
        fixed.add(DROPOUT)
    for name in ("logits_dtype", "weights_dtype"):
        if getattr(known, name) is not None:
            base = replace(base, **{name: getattr(known, name)})
    return base, frozenset(fixed)


def known_of(call: CallTensors, seen: Mapping[str, Seen]) -> Known | None:
    """What a call tells of its formula; None where that is nothing.

    A list of terms is whole: what it does not name is not there. With an operation that was not followed it may be,
    and then the values that are named are known and no more; nor is the scale, which that operation may have changed.

    Args:
        call: its tensors.
        seen: of `observe(call)`.
    """
    lesser = torch.finfo(dtype_of(call.dtype)).eps
    told = {name: getattr(call, name) for name in ("logits_dtype", "weights_dtype")}
    known = Known(
        kept=call.kept,
        dropout=call.dropout,
        **{name: dtype for name, dtype in told.items() if torch.finfo(dtype_of(dtype)).eps > lesser},
    )
    if call.terms is None:
        return known if call.kept is not None or known.logits_dtype or known.weights_dtype else None
    whole = all(term.name != "unknown" for term in call.terms)
    terms = {name: [term for term in call.terms if term.name == name] for name in ("softcap", "bias", "mask", "sinks")}
    if whole:
        known = replace(known, scale=_scale(call.terms, seen))
    if len(terms["softcap"]) == 1 and terms["softcap"][0].value is not None and not terms["softcap"][0].detail:
        known = replace(known, softcap=float(terms["softcap"][0].value))
    elif whole and not terms["softcap"]:
        known = replace(known, softcap=math.inf)
    last = [term.name for term in call.terms if term.name in ("bias", "scale")][-1:]
    if len(terms["bias"]) == 1 and last == ["bias"] and isinstance(terms["bias"][0].value, Tensor):
        bias = terms["bias"][0]
        known = replace(known, bias=bias.value.double(), bias_name=bias.detail)  # type: ignore[union-attr]
    elif whole and not terms["bias"]:
        known = replace(known, bias=torch.zeros(1, dtype=torch.float64))
    known = _with_mask(known, terms["mask"], whole)
    sinks = [term.value for term in terms["sinks"]]
    if len(sinks) == 1 and isinstance(sinks[0], Tensor):
        known = replace(known, sinks=sinks[0])
    elif whole and not sinks:
        known = replace(known, sinks=torch.full((call.query.values.shape[1],), -math.inf, dtype=torch.float64))
    return known


def _scale(terms: tuple[Term, ...], seen: Mapping[str, Seen]) -> Tensor | float | None:
    """The product of all factors; None where one is not known or is no number."""
    factors = [seen["query"].factor, seen["key"].factor, *(term.value for term in terms if term.name == "scale")]
    result: Tensor | float = 1.0
    for factor in factors:
        if factor is None or (isinstance(factor, Tensor) and factor.numel() != 1):
            return None
        result = times(result, float(factor))
    return result


def _with_mask(known: Known, masks: list[Term], whole: bool) -> Known:
    if not masks:
        return replace(known, visible=torch.ones(1, 1, 1, 1, dtype=torch.bool)) if whole else known
    values = [term.value for term in masks]
    if any(not isinstance(value, Tensor) for value in values):
        return known
    visible = values[0]
    for value in values[1:]:
        visible = visible & value  # type: ignore[operator]
    assert isinstance(visible, Tensor)
    kind = masks[0].detail if len({term.detail for term in masks}) == 1 else "mask"
    added = all(term.added for term in masks)
    return replace(known, visible=visible, mask=kind, fill=min(term.fill for term in masks), fill_added=added)
