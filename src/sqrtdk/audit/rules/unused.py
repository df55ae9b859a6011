"""QK normalisation or a softcap that is built but that no call shows.

Formula: a module named like a QK norm (q_norm, k_norm, ...) at a site whose forward never ran; a softcap in the config
or on the module (attn_logit_softcapping, softcap, ...) with a call that has none, or another value (1%).
Threshold: any. A call with steps that the lineage could not follow is left out: the cap may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from sqrtdk.audit.configs import number
from sqrtdk.audit.context import Context, folded
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close

NORM_NAMES = (
    "q_norm", "k_norm", "qk_norm", "query_norm", "key_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm",
    "query_layernorm", "key_layernorm", "q_ln", "k_ln", "q_layer_norm", "k_layer_norm",
)  # fmt: skip
SOFTCAP_FIELDS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_softcapping", "attention_logit_cap")
SOFTCAP_ATTRIBUTES = ("attn_logit_softcapping", "attn_logit_softcap", "softcap", "soft_cap", "logit_softcap")
SOURCE = "the module or the config says so, the run does not show it"


def _idle_norm(context: Context, judged: JudgedCall) -> str | None:
    call = judged.call
    module = context.module(call.site)
    if module is None or call.norm is not None or context.ran is None:
        return None
    for name in NORM_NAMES:
        norm = getattr(module, name, None)
        path = f"{call.site}.{name}" if call.site else name
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) and path not in context.ran:
            return name
    return None


def _declared_cap(context: Context, judged: JudgedCall) -> tuple[str, float] | None:
    module = context.module(judged.call.site)
    for name in SOFTCAP_ATTRIBUTES:
        value = number(module, name)
        if value is not None and value > 0:
            return f"attribute {name}", value
    config = context.config(judged.call.site)
    for name in SOFTCAP_FIELDS:
        value = number(config, name)
        if value is not None and value > 0:
            return f"config.{name}", value
    return None


def check(context: Context) -> Iterable[Finding]:
    """One finding for each kind of site and thing that lies idle."""
    pairs: list[tuple[JudgedCall, tuple[str, str, float | None]]] = []
    for judged in context.calls:
        idle = _idle_norm(context, judged)
        if idle is not None:
            pairs.append((judged, ("norm", idle, None)))
        cap = _declared_cap(context, judged)
        if cap is None or judged.call.unknown:
            continue
        if judged.call.softcap is None:
            pairs.append((judged, ("softcap", cap[0], cap[1])))
        elif not close(judged.call.softcap, cap[1]):
            pairs.append((judged, ("softcap value", cap[0], cap[1])))
    for judged, (kind, name, value), more in folded(pairs):
        if kind == "norm":
            message, fix = f"{name} is built but never runs", "apply it to q and k after the projection, or remove it"
        elif kind == "softcap":
            message = f"{name} = {value:g}, but the logits are not capped"
            fix = "use an attention implementation that applies the softcap (eager or flex), or unset it"
        else:
            message = f"{name} = {value:g}, but the logits are capped at {judged.call.softcap:g}"
            fix = "apply the declared softcap"
        actual = judged.call.softcap if kind == "softcap value" else None
        yield Finding("unused", "warn", judged.call.site, actual, value, message + more, fix, SOURCE)
