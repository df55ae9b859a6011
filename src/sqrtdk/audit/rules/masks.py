"""What the mask and the bias do to the rows.

- leaks of the future, and masks off by a key, inverted, or aligned with the wrong corner: the list is in `audit.sight`;
- blind rows see no key (note: padding makes them; their output must be 0 or unused, NaN is `nonfinite`'s; fail when
  every row is one);
- uniform rows have every key at finfo.min, so the softmax averages masked keys (note: padding makes them; fail when
  every row is one);
- weight on masked keys above 1e-4: fail; so is, without values, a softcap after the mask that leaves them as much;
- a mask multiplied by the scale: warn, a note where the fill is too large to care (-inf, or beyond 1e30: CodeGen) or
  is not known (meta device);
- a float mask of 0 and 1 that was added: fail, it moves the logits by 1 and hides nothing;
- weights masked after the softmax: fail, a note where the logits are masked as well, or may be in steps that were not
  followed; none where they are then divided by their sum, which is a mask;
- a bias multiplied by the scale: warn, unless the family does so on purpose (Falcon's ALiBi), or it stands beside a
  factor of the data (de-stationary attention: (tau q.k + delta) / sqrt(d)).
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
from sqrtdk.audit.records import Finding, JudgedCall, broken
from sqrtdk.audit.sight import (
    SOURCE,
    WEIGHT,
    Fault,
    corner,
    leak,
    lookahead,
    may_see_ahead,
    own_key,
    says_causal,
    shape,
    unordered,
)
from sqrtdk.audit.tolerance import close
from sqrtdk.tracing.records import AttentionCall, Mask

PADDING_SOURCE = (
    "transformers: attention_mask is 1 at tokens and 0 at padding; torch: key_padding_mask is True at padding"
)
UNIFORM = 1.0
ZERO_ONE = "zero-one mask"  # as the trace names such a bias
HARMLESS_FILL = 1e30
SDPA_SOURCE = "torch scaled_dot_product_attention: a float mask is added, a bool mask is True where a key takes part"
BIAS_SOURCE = "Press et al. 2021 (ALiBi), Raffel et al. 2019 (T5): the bias is added to the scaled product"


def _blind(mask: Mask, rows: int) -> Fault:
    """Rows that see no key, which padding explains unless there is no other row, or the mask is a band."""
    fix = "expected of padding; leave those rows out of the loss"
    if (mask.blind_rows or 0) >= rows:
        fix = "negate the mask: True lets a key take part in SDPA, and hides it in nn.MultiheadAttention"
        return "fail", float(rows), 0.0, f"all {rows} rows see no key: the mask hides everything", fix, SDPA_SOURCE
    if mask.kind == "window":
        fix = "leave rows of padding out of the loss; any other row must see its own key"
    return "note", float(mask.blind_rows or 0), 0.0, f"{mask.blind_rows} of {rows} rows see no key", fix, SOURCE


def _additions(call: AttentionCall) -> Iterable[Fault]:
    """Masks that are no masks: numbers 0 and 1 that are added, and what comes after the softmax."""
    if call.bias == ZERO_ONE:
        message = "a float mask of 0 and 1 is added to the logits, not applied: it hides no key"
        yield "fail", 1.0, 0.0, message, "convert the mask to bool, or to 0 and -inf", SDPA_SOURCE
    after = {stage.name for stage in call.stages if stage.where == "weights"}
    unread = any((stage.where, stage.name) == ("logits", "unknown") for stage in call.stages)
    if "mask" in after and "normalise" not in after:
        severity = "fail" if call.mask is None and not unread else "note"
        message = "weights are masked after the softmax: rows do not sum to 1, and hidden keys count in their sum"
        yield severity, 1.0, 0.0, message, "mask the logits with -inf before the softmax", SOURCE


def _of_rows(call: AttentionCall, *, shaped: bool, own: bool) -> Iterable[Fault]:
    """Rows that see nothing, rows that average what is hidden, and weight on hidden keys.

    `shaped`: a fault in the shape of the mask was named, which explains blind rows; `own`: that is the hidden own key
    of one projection for q and k, which explains uniform rows.
    """
    mask, rows = call.mask, call.batch * call.heads * call.query_len
    if mask is None:
        return
    blind, uniform = mask.blind_rows or 0, mask.uniform_rows or 0
    if not shaped and blind > uniform and not broken(call):  # a uniform row sees no key either; NaN is `nonfinite`'s
        yield _blind(mask, rows)
    if uniform and not own:
        severity = "fail" if uniform >= UNIFORM * rows else "note"
        message = f"{uniform} of {rows} rows have every key at {mask.fill}: they average masked keys"
        fix = "mask with -inf and set such rows to 0, or leave them out of the loss"
        yield severity, float(uniform), 0.0, message, fix, SOURCE
    fix = "mask with -inf or finfo.min, added after scale and softcap"
    if mask.masked_weight is not None:
        if mask.masked_weight > WEIGHT:
            message = f"masked keys get up to {mask.masked_weight:.3g} of a row's weight (fill {mask.fill})"
            yield "fail", mask.masked_weight, WEIGHT, message, fix, SOURCE
        return
    order = [stage.name for stage in call.stages if stage.where == "logits" and stage.name in ("mask", "softcap")]
    cap = call.softcap if "mask" in order and "softcap" in order[order.index("mask") :] else None
    if cap is not None and math.exp(-abs(cap)) > WEIGHT:  # what a hidden key's logit of -cap leaves it beside others
        message = f"the softcap of {cap:.4g} comes after the mask: hidden keys keep a logit of {-cap:.4g}"
        yield "fail", math.exp(-cap), WEIGHT, message, fix, SOURCE


def _scaled(call: AttentionCall, on_purpose: bool) -> Iterable[Fault]:
    """A mask or a bias that was multiplied by the scale; `on_purpose`: the family does so with its bias."""
    mask, gained = call.mask, gained_by_inputs(call)
    if mask is not None and mask.scaled_by is not None and not close(mask.scaled_by, 1.0):
        unread = mask.fill is None and (on_purpose or gained)  # without values a bias looks like a mask
        severity = "note" if mask.fill is None or mask.fill <= -HARMLESS_FILL else "warn"
        message = f"the mask was multiplied by {mask.scaled_by:.4g}"
        message += " (fill not known)" if mask.fill is None else ""
        if not unread:
            yield severity, mask.scaled_by, 1.0, message, "add the mask after the scale", SOURCE
    bias, meant = call.bias_scaled_by, on_purpose or (gained and call.bias == "bias")
    if bias is not None and not close(bias, 1.0) and not meant:
        message = f"the {call.bias or 'bias'} was multiplied by {bias:.4g}"
        yield "warn", bias, 1.0, message, "add the bias after the scale", BIAS_SOURCE


def _faults(context: Context, judged: JudgedCall) -> Iterable[Fault]:
    """The faults of one call."""
    call = judged.call
    owners = context.module(call.site), context.config(call.site)
    own = own_key(call)
    pattern = own or corner(call) or shape(call, lookahead(owners), context.tokens.longest(call))
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
    """One finding for each call and fault; the largest value of a fault first."""
    faults = [(judged.call.site, *fault) for judged in context.calls for fault in _faults(context, judged)]
    for site, severity, value, threshold, message, fix, source in sorted(faults, key=lambda entry: -entry[2]):
        yield Finding("mask_audit", severity, site, value, threshold, message, fix, source)


def padding(context: Context) -> Iterable[Finding]:
    """The padding of the inputs against what the masks hid: one finding for each call, the most keys first.

    Formula: with the positions that the attention mask marks as tokens and as padding, the keys of padding that the row
    of a token sees in any head, and the keys of tokens that no row of a token sees. Threshold: 0 of both. What the rows
    of padding see is of no account. Where no input has padding there is nothing to hold against.
    """
    faults = [fault for judged in context.calls if (fault := _padding_fault(context, judged.call)) is not None]
    for count, site, message, fix in sorted(faults, key=lambda fault: -fault[0]):
        yield Finding("padding", "fail", site, float(count), 0.0, message, fix, PADDING_SOURCE)


def _padding_fault(context: Context, call: AttentionCall) -> tuple[int, str, str, str] | None:
    """The count, the site, what is wrong, and the fix."""
    mask, keys, seen, hidden = call.mask, context.tokens.keys(call), call.padding_seen or 0, call.tokens_hidden or 0
    least, greatest = (None, None) if mask is None or not mask.band else (mask.least, mask.greatest)
    if least is None or greatest is None or not least <= 0 <= greatest:
        hidden = hidden if seen else 0  # keys chosen by their content, or a row's own by a band beside the diagonal
    if keys is None or not (seen or hidden):
        return None
    padding, tokens = int((~keys).sum()), int(keys.sum())
    blind = 0 if mask is None else mask.blind_rows or 0
    if seen == padding and blind == padding * call.heads and call.self_attention is not False:
        message = (
            f"the padding mask lies on the rows, not on the keys: tokens see {seen} of {padding} keys of padding, "
            "and the rows of padding see no key"
        )
        fix = "lay it on the keys: attention_mask[:, None, None, :], not attention_mask[:, None, :, None]"
    elif seen and hidden:
        message = (
            f"the padding mask looks inverted or shifted: tokens see {seen} of {padding} keys of padding, "
            f"and {hidden} of {tokens} keys of tokens are hidden from all"
        )
        fix = "hide the keys where attention_mask is 0: masked_fill wants True there, a bool attn_mask of SDPA False"
    elif seen:
        message = f"padding is not hidden: tokens see {seen} of {padding} keys of padding"
        fix = "add the padding mask to this call, as -inf over the keys where attention_mask is 0"
    else:
        message = f"{hidden} of {tokens} keys of tokens are hidden from all rows, as if they were padding"
        fix = "hide the keys where attention_mask is 0, and no others"
    return seen + hidden, call.site, message, fix
