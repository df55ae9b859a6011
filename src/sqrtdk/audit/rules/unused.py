"""QK normalisation, a gain or a softcap that is built but that no call shows.

Formula: a module named like a QK norm (q_norm, k_norm, ...) at a site whose forward never ran; a parameter of such a
norm, or one named like a gain on the logits (logit_scale, temperature, ...), that no operation read, where others of
the same module were read; a softcap in the config or on the module (attn_logit_softcapping, softcap, ...) with a call
that has none, or another value (1%).
Threshold: any; fail where the config declares it, as the weights were trained with it, else warn. A call with steps
that the lineage could not follow is left out: the cap may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, number
from sqrtdk.audit.context import Context
from sqrtdk.audit.governing import SOFTCAP_ATTRIBUTES, SOFTCAP_FIELDS
from sqrtdk.audit.norms import normalised
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close

NORM_NAMES = (
    "q_norm", "k_norm", "qk_norm", "query_norm", "key_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm",
    "query_layernorm", "key_layernorm", "q_ln", "k_ln", "q_layer_norm", "k_layer_norm",
)  # fmt: skip
NORM_FIELDS = (
    "qk_norm", "use_qk_norm", "qk_norm_type", "qk_layernorm", "qk_layernorms", "use_qk_layernorm", "qk_layer_norm",
    "use_qk_layer_norm", "qk_layer_norms", "normalize_qk", "query_key_norm", "use_query_key_norm",
    "query_key_layer_norm", "query_key_layernorm",
)  # fmt: skip
NO_NORM = ("", "none", "identity")  # in a field that names the kind of norm
GAIN_NAMES = (
    "logit_scale", "attn_logit_scale", "log_scale", "temperature", "tau", "scale", "scaling", "softmax_scale",
    "attn_scale", "qk_scale", "q_scale", "k_scale", "scale_q", "scale_k", "query_scale", "key_scale", "q_gain",
    "k_gain", "qk_gain", "q_norm_weight", "k_norm_weight", "q_norm_scale", "k_norm_scale", "q_gamma", "k_gamma",
)  # fmt: skip
SOURCE = "the module or the config says so, the run does not show it"


def _idle_norm(context: Context, judged: JudgedCall) -> str | None:
    call = judged.call
    module = context.module(call.site)
    if module is None or normalised(call) is not None or context.ran is None:
        return None
    for name, norm in module.named_children():
        path = f"{call.site}.{name}" if call.site else name
        if name in NORM_NAMES and not isinstance(norm, nn.Identity) and path not in context.ran:
            return name
    return None


def _unread_gains(context: Context, judged: JudgedCall) -> list[str]:
    """Parameters of q/k normalisation, and gains on the logits, that nothing read; with a norm that is idle, none."""
    site = judged.call.site
    module = context.module(site)
    prefix = f"{site}." if site else ""
    held = [] if module is None else [name for name, _ in module.named_parameters()]
    unread = [name for name in held if prefix + name in context.unread]
    if len(unread) == len(held):  # whatever ran in their place, it was not followed
        return []
    return [name for name in unread if name in GAIN_NAMES or (name.split(".")[0] in NORM_NAMES and "." in name)]


def _declares_norm(config: Any) -> bool:
    """Whether a config says that q and k are normalised: `use_qk_norm = True`, `qk_norm_type = "rms"`."""
    values = [field(config, name) for name in NORM_FIELDS]
    return any(x is True or (isinstance(x, str) and x.lower() not in NO_NORM) for x in values)


def _declared_cap(context: Context, judged: JudgedCall) -> tuple[str, float, str] | None:
    """Who declares a softcap, how large it is, and how severe it is to ignore it."""
    owners = (
        ("config.", context.config(judged.call.site), SOFTCAP_FIELDS, "fail"),
        ("attribute ", context.module(judged.call.site), SOFTCAP_ATTRIBUTES, "warn"),
    )
    for kind, owner, names, severity in owners:
        for name in names:
            value = number(owner, name)
            if value is not None and value > 0:
                return f"{kind}{name}", value, severity
    return None


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call and thing that lies idle."""
    for judged in context.calls:
        site, actual = judged.call.site, judged.call.softcap
        norm, unread = _idle_norm(context, judged), _unread_gains(context, judged)
        of_norm = norm is not None or any(name.split(".")[0] in NORM_NAMES for name in unread)
        severity = "fail" if of_norm and _declares_norm(context.config(site)) else "warn"
        if norm is not None:
            message, fix = f"{norm} is built but never runs", "apply it to q and k after the projection, or remove it"
            yield Finding("unused", severity, site, None, None, message, fix, SOURCE)
        elif unread:
            message = f"{', '.join(unread)}: stored, but nothing reads {'it' if len(unread) == 1 else 'them'}"
            fix = "multiply by it where q and k are normalised, or their product scaled; or remove it"
            yield Finding("unused", severity, site, None, None, message, fix, SOURCE)
        cap = _declared_cap(context, judged)
        if cap is None or judged.call.unknown or (actual is not None and close(actual, cap[1])):
            continue
        by, value, severity = cap
        if actual is None:
            message = f"{by} = {value:g}, but the logits are not capped"
            fix = "use an attention implementation that applies the softcap (eager or flex), or unset it"
        else:
            message, fix = f"{by} = {value:g}, but the logits are capped at {actual:g}", "apply the declared softcap"
        yield Finding("unused", severity, site, actual, value, message, fix, SOURCE)
