"""Rules on numbers that a dtype can't hold: NaN and infinity and where they begin, and logits near the limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk._wrappers import named_parameters
from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding, JudgedCall, has_nonfinite
from sqrtdk.errors import SqrtdkError, short_text
from sqrtdk.messages import Message
from sqrtdk.models.modules import is_finite
from sqrtdk.theory import spacing
from sqrtdk.tracing.records import AttentionCall, NotMeasured
from sqrtdk.tracing.tape.nonfinite import Origin

FP16_MAX = 65504.0
FP16_SOURCE = "sources.threshold.fp16"
BF16_OFFSET = 50.0
BF16_SOURCE = "sources.threshold.bf16"
NAN_SOURCE = "sources.threshold.nan"
_MOST_SITES_NAMED = 3
_FIX_OF_ORIGIN = {  # kind of an origin -> id
    "held": "rules.nonfinite.fix_held",
    "overflow": "rules.nonfinite.fix_overflow",
    "blind": "rules.nonfinite.fix_blind",
    "infinite": "rules.nonfinite.fix_infinite",
    "undefined": "rules.nonfinite.fix_undefined",
}
_SCALE_FIRST = "rules.range_forecast.fix_fp16"
_FIND_FIRST = "rules.nonfinite.fix_first"


def is_consequence(finding: Finding) -> bool:
    """Return whether a finding says what NaN or infinity reaches, as opposed to where it begins."""
    return finding.consequence


def nonfinite(context: Context) -> Iterable[Finding | NotMeasured]:
    """Find NaN and infinity in weights, in the logits and outputs of attentions, and in the model's outputs.

    Formula: the number of parameters, and of rows, that are not finite. Threshold: 0 (no finite answer follows).
    Plus infinity in outputs without NaN is a value if no operation overflowed: the distance to what can't be reached.
    If numbers of the run are not finite, the model runs once more, and each operation is examined up to the first that
    gives such a number. One finding names that place and the cause, a second one what it reaches. Causes:

    - A parameter, a buffer or an input holds NaN or infinity.
    - Rows of a softmax see no key: with every logit at -inf it is exp(-inf) / 0. Rows of padding may be such rows. One
      NaN in them becomes NaN in all rows of the sequence at the next attention, because 0 * NaN is NaN. Rows that
      the code sets to 0 behind the softmax are no cause.
    - q . k, or another operation, overflows its dtype (65504 in float16).
    - An operation has no answer: inf - inf, 0 * inf, 0 / 0.
    """
    sick: list[str] = []
    for name, parameter in named_parameters(context.model):
        if not parameter.is_meta and parameter.is_floating_point():
            try:
                sick += [] if is_finite(parameter) else [name]
            except (RuntimeError, TypeError) as error:  # a tensor subclass that lacks the operation
                reason = Message("rules.nonfinite.not_looked_at", name=name, error=short_text(error, 120))
                yield NotMeasured(name.rpartition(".")[0], reason)
    reached = [judged for judged in context.calls if has_nonfinite(judged.call)]
    wrong = bool(reached or context.spoiled)
    origin, lost = None, False
    try:
        origin = context.origin() if wrong and context.origin is not None else None
    except SqrtdkError as error:  # a model that can run only once raises in the search
        lost = True
        yield NotMeasured("", Message("rules.nonfinite.not_searched", error=short_text(error, 200)))
    # Plus infinity may be meant: `distance.masked_fill(~reachable, inf)`, or read from a buffer.
    meant = set(context.infinite) == set(context.spoiled) and (origin is None or origin.kind == "held")
    if meant and not (reached or sick or lost):
        return
    owner = origin.owner if origin is not None else None
    first = owner.name if owner is not None and owner.kind == "parameter" else None
    # The parameter that the run met first is named first.
    if first in sick:
        sick = [first, *(name for name in sick if name != first)]
    if origin is not None and first not in sick:
        yield _of_origin(origin, context.calls)
    if sick:
        yield of_weights(sick)
    if not wrong:
        return
    if origin is None and not sick:
        yield _of_rows(reached)
        reached = reached[1:]  # the first has a finding of its own
    if (sick or origin is not None or reached) and (reached or context.spoiled):
        yield _of_reached(reached, context)


def of_weights(sick: Sequence[str]) -> Finding:
    """Return the finding that parameters hold NaN or infinity.

    Args:
        sick: Names of these parameters, at least one; the finding is located at the module of the first.
    """
    message = Message("rules.nonfinite.parameters", number=len(sick), name=sick[0])
    if len(sick) == 1:
        message = Message("rules.nonfinite.held", what=Message("rules.nonfinite.parameter", name=sick[0]))
    fix = "rules.nonfinite.fix_parameters"
    return _finding(sick[0].rpartition(".")[0], float(len(sick)), message, fix)


def _of_origin(origin: Origin, calls: Iterable[JudgedCall]) -> Finding:
    here = [judged.call for judged in calls if judged.call.site == origin.site]
    value, bar, fix = None, 0.0, _FIX_OF_ORIGIN[origin.kind]
    blind = (origin.rows, origin.of) if origin.kind == "blind" else _blind_rows(origin, here)
    if origin.owner is not None:
        owner = Message(f"rules.nonfinite.{origin.owner.kind}", name=origin.owner.name)
        message = Message("rules.nonfinite.held", what=owner)
    elif origin.kind == "overflow":
        what = origin.op
        if origin.contracts and any(call.product_at in (None, origin.at) for call in here):
            what, fix = "q . k", _SCALE_FIRST
        value, bar = origin.size, torch.finfo(getattr(torch, origin.dtype)).max
        over = {"op": what, "dtype": origin.dtype, "largest": f"{bar:.6g}"}
        message = Message("rules.nonfinite.overflow_of_unknown_size", **over)
        if value is not None:
            message = Message("rules.nonfinite.overflow", value=f"{value:.4g}", **over)
    elif blind is not None:
        value, fix = float(blind[0]), _FIX_OF_ORIGIN["blind"]
        message = Message("rules.nonfinite.blind", blind=blind[0], rows=blind[1])
    elif origin.kind == "infinite":
        message = Message("rules.nonfinite.infinite", op=origin.op)
    else:
        message = Message("rules.nonfinite.undefined", op=origin.op)
    return _finding(origin.site, value, message, fix, bar=bar, at=origin.at)


def _blind_rows(origin: Origin, calls: Iterable[AttentionCall]) -> tuple[int, int] | None:
    """Return the rows of a masked call without a key, and all rows, if these rows of its logits are the NaN.

    A softmax written out gives them exp(-inf - -inf) = NaN. Another operation of the module has rows of other numbers.
    """
    for call in calls:
        rows = call.batch * call.heads * call.query_len
        blind = call.mask.blind_rows if call.mask is not None else None
        if blind and (blind, rows, call.key_len) == (origin.rows, origin.of, origin.columns):
            return blind, rows
    return None


def _of_rows(reached: list[JudgedCall]) -> Finding:
    """Return the finding on the first attention that is reached, for when no operation shows the beginning."""
    if not reached:
        return replace(_finding("", None, Message("rules.nonfinite.reaches.output"), _FIND_FIRST), consequence=True)
    call = reached[0].call
    if call.stats is None or not any(call.stats.nan_rows):
        return replace(_finding(call.site, None, Message("rules.nonfinite.output"), _FIND_FIRST), call=call.index)
    bad, rows = sum(call.stats.nan_rows), call.stats.rows * call.stats.heads
    finding = _finding(call.site, float(bad), Message("rules.nonfinite.rows", bad=bad, rows=rows), _FIND_FIRST)
    return replace(finding, call=call.index)


def _of_reached(reached: list[JudgedCall], context: Context) -> Finding:
    message, fix = Message("rules.nonfinite.reaches.output"), "rules.nonfinite.fix_reaches"
    if not reached:
        return replace(_finding("", 0.0, message, fix), consequence=True)
    sites = fold_sites([judged.call.site for judged in reached])
    more = ", ..." if len(sites) > _MOST_SITES_NAMED else ""
    where = (
        ROOT_NAME if sites == ("",) else f"({', '.join(site or 'root' for site in sites[:_MOST_SITES_NAMED])}{more})"
    )
    total = len(context.calls)
    if total == 1:
        only = "rules.nonfinite.reaches.only_and_output" if context.spoiled else "rules.nonfinite.reaches.only"
        message = Message(only, sites=where)
    else:
        some = "rules.nonfinite.reaches.some_and_output" if context.spoiled else "rules.nonfinite.reaches.some"
        message = Message(some, sites=where, number=len(reached), total=total)
    return replace(_finding(reached[0].call.site, float(len(reached)), message, fix), consequence=True)


def _finding(
    site: str, value: float | None, message: str, fix: str, *, bar: float = 0.0, at: str | None = None
) -> Finding:
    threshold = None if value is None else bar
    return Finding("nonfinite", "critical", site, value, threshold, message, Message(fix), Message(NAN_SOURCE), at)


def _product(judged: JudgedCall) -> float | None:
    """Return the largest unscaled product that was stored before a scale shrank it, or None."""
    call = judged.call
    # `(q * scale) @ k.mT` has no factor after the product, and stores no large product.
    after = math.prod(factor.value for factor in call.scale.factors if factor.where == "logits" and factor.value)
    if call.stats is None or call.kind != "eager" or after >= 1.0 or after <= 0.0 or call.softcap is not None:
        return None
    finite = [value for value in call.stats.max_abs_logit if math.isfinite(value)]
    return max(finite) / after if finite else None


def _offset(judged: JudgedCall) -> float | None:
    """Return the largest row offset if the logits were stored, or if only the offset makes a logit large; else None."""
    stats = judged.call.stats
    if stats is None or (judged.call.kind != "eager" and not any(value > BF16_OFFSET for value in stats.max_logit)):
        return None
    return max((value for value in stats.row_offset if math.isfinite(value)), default=None)


def _above(
    calls: Iterable[JudgedCall], measure: Callable[[JudgedCall], float | None], bar: float
) -> list[tuple[float, JudgedCall]]:
    """Return the calls whose measure is above the bar, the largest first."""
    measured = [(value, judged) for judged in calls if (value := measure(judged)) is not None and value > bar]
    return sorted(measured, key=lambda entry: -entry[0])


def logits_out_of_range(context: Context) -> Iterable[Finding]:
    """Find logits that do not fit the range of fp16 or the spacing of bf16; the largest value first.

    fp16: the unscaled product max|q . k| = max|logit| / scale, if the scale comes after the product and the product is
    stored; threshold 65504. A fused kernel accumulates in fp32 and is not concerned.
    bf16: a row's offset x (|mean logit|) with spacing 2^(floor(log2 x) - 7); threshold 50, where neighbouring logits
    are 0.25 apart. The softmax is blind to the offset, but stored logits lose digits to it. In another dtype both are
    forecasts. For a fused kernel, which stores no logits, the offset is a forecast too, and only reported if it is what
    makes a logit look large.
    """
    for value, judged in _above(context.calls, _product, FP16_MAX):
        severity = "fail" if judged.call.logits_dtype == "float16" else "warn"
        message, (site, index) = Message("rules.range_forecast.fp16", value=f"{value:.4g}"), judged.key
        fix, source = Message(_SCALE_FIRST), Message(FP16_SOURCE)
        yield Finding("range_forecast", severity, site, value, FP16_MAX, message, fix, source, call=index)
    for value, judged in _above(context.calls, _offset, BF16_OFFSET):
        now = judged.call.logits_dtype == "bfloat16" and judged.call.kind == "eager"
        moves = {"value": f"{value:.4g}", "step": f"{spacing(value, 'bfloat16'):.3g}"}
        message = Message("rules.range_forecast.bf16" if now else "rules.range_forecast.bf16_would", **moves)
        fix, source = Message("rules.range_forecast.fix_bf16"), Message(BF16_SOURCE)
        severity, (site, index) = "warn" if now else "note", judged.key
        yield Finding("range_forecast", severity, site, value, BF16_OFFSET, message, fix, source, call=index)
