"""What the mask and the bias do to the rows.

- blind rows see no key (note: padding makes them; their output must be 0 or unused);
- uniform rows have every key at finfo.min, so the softmax averages masked keys (note: padding makes them; warn when
  every row is one);
- weight on masked keys above 1e-4, or on future keys (j > i) in a module that says it is causal: fail;
- a mask multiplied by the scale: warn, a note where the fill is too large to care (-inf, or beyond 1e30: CodeGen);
- a bias multiplied by the scale: warn, unless the family does so on purpose (Falcon's ALiBi).
Sources: a masked key has weight 0 by definition (Vaswani et al. 2017, section 3.2.3); 1e-4 is above what an additive
-1e4 leaves (e^-1e4 = 0) and below what a mask of -10 leaks.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.configs import field, model_type
from sqrtdk.audit.context import Context
from sqrtdk.audit.families import SCALED_BIAS
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close

WEIGHT = 1e-4
UNIFORM = 1.0
HARMLESS_FILL = 1e30
SOURCE = "Vaswani et al. 2017, section 3.2.3: an illegal connection has weight 0"
BIAS_SOURCE = "Press et al. 2021 (ALiBi), Raffel et al. 2019 (T5): the bias is added to the scaled product"


def is_causal(context: Context, judged: JudgedCall) -> bool:
    """Whether the module says of itself that it is causal, and the call is one to which that applies."""
    call = judged.call
    module = context.module(call.site)
    said = any(field(module, name) is True for name in ("is_causal", "causal"))
    return said and call.self_attention is not False and call.query_len == call.key_len > 1


def _scaled_on_purpose(context: Context, site: str) -> bool:
    return model_type(context.config(site)) in SCALED_BIAS


def _found(context: Context, judged: JudgedCall) -> Iterable[tuple[str, float, float, str, str, str]]:
    """(severity, value, threshold, message, fix, source) for one call."""
    call, mask = judged.call, judged.call.mask
    rows = call.batch * call.heads * call.query_len
    if mask is not None:
        if mask.blind_rows and mask.blind_rows > (mask.uniform_rows or 0):  # a uniform row sees no key either
            yield (
                "note", float(mask.blind_rows), 0.0,
                f"{mask.blind_rows} of {rows} rows see no key", "expected of padding; leave those rows out of the loss",
                SOURCE,
            )  # fmt: skip
        if mask.uniform_rows:
            yield (
                "warn" if mask.uniform_rows >= UNIFORM * rows else "note", float(mask.uniform_rows), 0.0,
                f"{mask.uniform_rows} of {rows} rows have every key at {mask.fill}: they average masked keys",
                "mask with -inf and set such rows to 0, or leave them out of the loss", SOURCE,
            )  # fmt: skip
        if mask.masked_weight is not None and mask.masked_weight > WEIGHT:
            yield (
                "fail", mask.masked_weight, WEIGHT,
                f"masked keys get up to {mask.masked_weight:.3g} of a row's weight (fill {mask.fill})",
                "mask with -inf or finfo.min, added after scale and softcap", SOURCE,
            )  # fmt: skip
        unread = mask.fill is None and _scaled_on_purpose(context, call.site)  # without values a bias looks like a mask
        if mask.scaled_by is not None and not close(mask.scaled_by, 1.0) and not unread:
            yield (
                "note" if mask.fill is not None and mask.fill <= -HARMLESS_FILL else "warn",
                mask.scaled_by, 1.0,
                f"the mask was multiplied by {mask.scaled_by:.4g}", "add the mask after the scale", SOURCE,
            )  # fmt: skip
    future = call.future_weight
    if future is not None and future > WEIGHT and is_causal(context, judged):
        yield (
            "fail", future, WEIGHT,
            f"a causal module gives {future:.3g} of its weight to future keys",
            "pass the causal mask to this call (a custom attention function must register its mask function too)",
            SOURCE,
        )  # fmt: skip
    bias = call.bias_scaled_by
    if bias is not None and not close(bias, 1.0) and not _scaled_on_purpose(context, call.site):
        yield (
            "warn", bias, 1.0,
            f"the {call.bias or 'bias'} was multiplied by {bias:.4g}", "add the bias after the scale", BIAS_SOURCE,
        )  # fmt: skip


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call and fault; the largest value of a fault first."""
    found = [(judged.call.site, *fault) for judged in context.calls for fault in _found(context, judged)]
    for site, severity, value, threshold, message, fix, source in sorted(found, key=lambda entry: -entry[2]):
        yield Finding("mask_audit", severity, site, value, threshold, message, fix, source)
