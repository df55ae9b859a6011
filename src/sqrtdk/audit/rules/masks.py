"""Rules `mask_audit` and `padding`: what the mask and the bias do to the rows.

- Leaks of the future, and masks that are off by a key, inverted, or aligned with the wrong corner: see `audit.sight`.
- Blind rows see no key. Note, because padding makes them (their output must be 0 or unused; NaN is reported by
  `nonfinite`); fail if every row is blind.
- Uniform rows have every key at finfo.min, so the softmax averages masked keys. Note, because padding makes them; fail
  if every row is uniform.
- Weight on masked keys above 1e-4: fail. Without values, a softcap after the mask that leaves as much: fail.
- A mask multiplied by the scale: warn; note if the fill is too large for it to matter (-inf, or beyond 1e30: CodeGen)
  or unknown (meta device).
- A float mask of 0 and 1 that is added: fail, because it moves the logits by 1 and hides nothing.
- Weights masked after the softmax: fail; note if the logits are masked as well, or may be in steps that were not
  followed. Not reported if the weights are then divided by their sum, which is a correct mask.
- A bias multiplied by the scale: warn, unless the family does so on purpose (Falcon's ALiBi), or the bias stands beside
  a factor of the data (de-stationary attention: (tau q.k + delta) / sqrt(d)).
Sources: a masked key has weight 0 by definition (Vaswani et al. 2017, section 3.2.3); 1e-4 is above what an additive
-1e4 leaves (e^-1e4 = 0) and below what a mask of -10 leaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sqrtdk.audit.configs import field, model_type
from sqrtdk.audit.context import Context
from sqrtdk.audit.families import SCALED_BIAS
from sqrtdk.audit.gains import gained_by_inputs
from sqrtdk.audit.records import Finding, JudgedCall, has_nonfinite
from sqrtdk.audit.sight import (
    LEAK_SOURCE,
    LEAST_WEIGHT_AHEAD,
    Fault,
    corner,
    leak,
    lookahead,
    may_see_ahead,
    own_key,
    says_causal,
    shape_fault,
    unordered,
)
from sqrtdk.audit.tolerance import is_close
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall, Mask

_PADDING_SOURCE = "sources.threshold.padding"
UNIFORM_SHARE = 1.0  # share of rows from which on it fails
ZERO_ONE = "zero-one mask"  # the trace's name for such a bias
HARMLESS_FILL = 1e30  # still hides after any scale
_SDPA_SOURCE = "sources.threshold.kinds_of_mask"
_BIAS_SOURCE = "sources.threshold.bias"


def _blind(mask: Mask, rows: int) -> Fault:
    """Return the fault of rows that see no key: a note, since padding makes them, unless no row sees any."""
    blind = mask.blind_rows or 0
    if blind >= rows:
        message, fix = Message("rules.mask_audit.all_blind", rows=rows), Message("rules.mask_audit.fix_inverted")
        return "fail", float(rows), 0.0, message, fix, _SDPA_SOURCE
    fix = Message("rules.mask_audit.fix_blind_window" if mask.kind == "window" else "rules.mask_audit.fix_blind")
    return "note", float(blind), 0.0, Message("rules.mask_audit.blind", blind=blind, rows=rows), fix, LEAK_SOURCE


def _additions(call: AttentionCall) -> Iterable[Fault]:
    """Yield the faults of masks that do not mask: 0 and 1 added to the logits, or weights masked after the softmax."""
    if call.bias == ZERO_ONE:
        message, fix = Message("rules.mask_audit.zero_one"), Message("rules.mask_audit.fix_zero_one")
        yield "fail", 1.0, 0.0, message, fix, _SDPA_SOURCE
    after = {stage.name for stage in call.stages if stage.where == "weights"}
    unread = any((stage.where, stage.name) == ("logits", "unknown") for stage in call.stages)
    if "mask" in after and "normalise" not in after:
        severity = "fail" if call.mask is None and not unread else "note"
        message, fix = Message("rules.mask_audit.after_softmax"), Message("rules.mask_audit.fix_after_softmax")
        yield severity, 1.0, 0.0, message, fix, LEAK_SOURCE


def _of_rows(call: AttentionCall, *, shaped: bool, own: bool) -> Iterable[Fault]:
    """Yield the faults of blind rows, of uniform rows, and of weight on hidden keys.

    `shaped` says that a fault in the mask's shape was named, which explains blind rows. `own` says that this fault is
    the hidden own key of one projection for q and k, which explains uniform rows.
    """
    mask, rows = call.mask, call.batch * call.heads * call.query_len
    if mask is None:
        return
    blind, uniform = mask.blind_rows or 0, mask.uniform_rows or 0
    if (
        not shaped and blind > uniform and not has_nonfinite(call)
    ):  # a uniform row is blind too; `nonfinite` reports NaN
        yield _blind(mask, rows)
    if uniform and not own:
        severity = "fail" if uniform >= UNIFORM_SHARE * rows else "note"
        message = Message("rules.mask_audit.uniform", uniform=uniform, rows=rows, fill=str(mask.fill))
        yield severity, float(uniform), 0.0, message, Message("rules.mask_audit.fix_uniform"), LEAK_SOURCE
    fix = Message("rules.mask_audit.fix_masked_weight")
    if mask.masked_weight is not None:
        if mask.masked_weight > LEAST_WEIGHT_AHEAD:
            weight = f"{mask.masked_weight:.3g}"
            message = Message("rules.mask_audit.masked_weight", weight=weight, fill=str(mask.fill))
            yield "fail", mask.masked_weight, LEAST_WEIGHT_AHEAD, message, fix, LEAK_SOURCE
        return
    # `cap * tanh((logits + mask) / cap)` turns a mask of -inf into a logit of -cap.
    order = [stage.name for stage in call.stages if stage.where == "logits" and stage.name in ("mask", "softcap")]
    cap = call.softcap if "mask" in order and "softcap" in order[order.index("mask") :] else None
    if cap is not None and math.exp(-abs(cap)) > LEAST_WEIGHT_AHEAD:  # weight of logit -cap beside logit 0
        message = Message("rules.mask_audit.softcap_after_mask", cap=f"{cap:.4g}", logit=f"{-cap:.4g}")
        yield "fail", math.exp(-cap), LEAST_WEIGHT_AHEAD, message, fix, LEAK_SOURCE


def _scaled(call: AttentionCall, on_purpose: bool) -> Iterable[Fault]:
    """Yield the fault of a mask or bias that was multiplied by the scale; `on_purpose`: the family scales its bias."""
    mask, gained = call.mask, gained_by_inputs(call)
    if mask is not None and mask.scaled_by is not None and not is_close(mask.scaled_by, 1.0):
        unread = mask.fill is None and (on_purpose or gained)  # without values a bias looks like a mask
        severity = "note" if mask.fill is None or mask.fill <= -HARMLESS_FILL else "warn"
        factor = f"{mask.scaled_by:.4g}"
        message = Message("rules.mask_audit.scaled_mask", factor=factor)
        if mask.fill is None:
            message = Message("rules.mask_audit.scaled_mask_of_unknown_fill", factor=factor)
        if not unread:
            yield severity, mask.scaled_by, 1.0, message, Message("rules.mask_audit.fix_scaled_mask"), LEAK_SOURCE
    bias, meant = call.bias_scaled_by, on_purpose or (gained and call.bias == "bias")
    if bias is not None and not is_close(bias, 1.0) and not meant:
        message = Message("rules.mask_audit.scaled_bias", bias=call.bias or "bias", factor=f"{bias:.4g}")
        yield "warn", bias, 1.0, message, Message("rules.mask_audit.fix_scaled_bias"), _BIAS_SOURCE


def _faults(context: Context, judged: JudgedCall) -> Iterable[Fault]:
    """Yield the faults of one call."""
    call = judged.call
    owners = context.module(call.site), context.config(call.site)
    own = own_key(call)
    pattern = own or corner(call) or shape_fault(call, lookahead(owners), context.tokens.longest(call))
    picked = unordered(call, *owners)
    if picked is not None:
        yield picked
    elif pattern is not None:
        yield pattern
    elif says_causal(call, *owners) and may_see_ahead(owners, field(context.model, "config"), call.mask) is None:
        yield from leak(call, lookahead(owners), context.mode == "static")
    yield from _additions(call)
    yield from _of_rows(call, shaped=pattern is not None, own=own is not None)
    yield from _scaled(call, model_type(owners[1]) in SCALED_BIAS)


def mask_audit(context: Context) -> Iterable[Finding]:
    """Yield one finding for each fault in the mask of a call, the one with the largest value first.

    Faults are, among others, queries that see later keys against a declaration, and masks that are shifted or inverted.
    Calls of which only a part of each row was recorded are skipped.
    """
    faults = [(judged.call, *fault) for judged in context.whole_rows for fault in _faults(context, judged)]
    for call, severity, value, threshold, message, fix, source in sorted(faults, key=lambda entry: -entry[2]):
        numbers = value, threshold
        yield Finding("mask_audit", severity, call.site, *numbers, message, fix, Message(source), call=call.index)


def padding(context: Context) -> Iterable[Finding]:
    """Compare the padding of the inputs with what the masks hide: one finding for each call, the most keys first.

    Formula: the attention mask marks positions as tokens or padding. Counted are the keys of padding that a token's row
    sees in any head, and the keys of tokens that no token's row sees. Threshold: 0 of both. What the rows of padding
    see does not matter. If no input has padding, there is nothing to compare with.
    """
    faults = [fault for judged in context.whole_rows if (fault := _padding_fault(context, judged.call)) is not None]
    source = Message(_PADDING_SOURCE)
    for count, call, message, fix in sorted(faults, key=lambda fault: -fault[0]):
        yield Finding("padding", "fail", call.site, float(count), 0.0, message, fix, source, call=call.index)


def _padding_fault(context: Context, call: AttentionCall) -> tuple[int, AttentionCall, str, str] | None:
    """Return the count, the call, the message, and the fix, or None."""
    mask, keys, seen, hidden = call.mask, context.tokens.keys(call), call.padding_seen or 0, call.tokens_hidden or 0
    least, greatest = (None, None) if mask is None or not mask.band else (mask.least, mask.greatest)
    if least is None or greatest is None or not least <= 0 <= greatest:
        hidden = hidden if seen else 0  # a choice by content, or a band off the diagonal, hides tokens on purpose
    if keys is None or not (seen or hidden):
        return None
    padding, tokens = int((~keys).sum()), int(keys.sum())
    blind = 0 if mask is None else mask.blind_rows or 0
    if seen == padding and blind == padding * call.heads and call.self_attention is not False:
        message = Message("rules.padding.on_rows", seen=seen, padding=padding)
        fix = Message("rules.padding.fix_on_rows")
    elif seen and hidden:
        message = Message("rules.padding.inverted", seen=seen, padding=padding, hidden=hidden, tokens=tokens)
        fix = Message("rules.padding.fix_inverted")
    elif seen:
        message = Message("rules.padding.not_hidden", seen=seen, padding=padding)
        fix = Message("rules.padding.fix_not_hidden")
    else:
        message = Message("rules.padding.tokens_hidden", hidden=hidden, tokens=tokens)
        fix = Message("rules.padding.fix_tokens_hidden")
    return seen + hidden, call, message, fix
