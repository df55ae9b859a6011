"""Rules on what is built or declared but not used: QK norms, gains, softcaps, scale attributes; dropout in eval."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sqrtdk._wrappers import named_modules, named_parameters
from sqrtdk.audit.attributes import PROBE_FACTOR, Key, ScaleAttribute, enlarged, holders, moves, scale_attributes
from sqrtdk.audit.configs import field, number_at
from sqrtdk.audit.context import Context
from sqrtdk.audit.declared import SOFTCAP_ATTRIBUTES, SOFTCAP_FIELDS
from sqrtdk.audit.gains import norm_of_q_and_k
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import are_close, inverse_root, is_close
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message, joined
from sqrtdk.modules.calls import hooked
from sqrtdk.tracing.records import NotMeasured

NORM_NAMES = (
    "q_norm", "k_norm", "qk_norm", "query_norm", "key_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm",
    "query_layernorm", "key_layernorm", "q_ln", "k_ln", "q_layer_norm", "k_layer_norm",
)  # fmt: skip
NORM_FIELDS = (
    "qk_norm", "use_qk_norm", "qk_norm_type", "qk_layernorm", "qk_layernorms", "use_qk_layernorm", "qk_layer_norm",
    "use_qk_layer_norm", "qk_layer_norms", "normalize_qk", "query_key_norm", "use_query_key_norm",
    "query_key_layer_norm", "query_key_layernorm",
)  # fmt: skip
NO_NORM = ("", "none", "identity")  # values of a field that names the kind of norm
GAIN_NAMES = (
    "logit_scale", "attn_logit_scale", "log_scale", "temperature", "tau", "scale", "scaling", "softmax_scale",
    "attn_scale", "qk_scale", "q_scale", "k_scale", "scale_q", "scale_k", "query_scale", "key_scale", "q_gain",
    "k_gain", "qk_gain", "q_norm_weight", "k_norm_weight", "q_norm_scale", "k_norm_scale", "q_gamma", "k_gamma",
)  # fmt: skip
_UNUSED_SOURCE = "sources.threshold.unused"
_DROPOUT_SOURCE = "sources.threshold.dropout"
_ATTRIBUTE_SOURCE = "sources.threshold.attribute"
# A scale follows its attribute as it is, over it, by its root, or by its square if q and k are both multiplied.
_POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)


@contextmanager
def watch_norms(model: nn.Module) -> Iterator[set[str]]:
    """Record which norms of q and k are called within the block.

    Yields a set of module paths that fills during the block. TorchScript norms are in it from the start, because hooks
    can't observe them.
    """
    # A norm that layers share has a path in each of them.
    every = named_modules(model, remove_duplicate=False)
    norms = {path: module for path, module in every if path.rpartition(".")[2] in NORM_NAMES}
    ran = {path for path, module in norms.items() if isinstance(module, torch.jit.ScriptModule)}
    with hooked(norms, ends=lambda place, *_: ran.add(place[0])):
        yield ran


def unused(context: Context) -> Iterable[Finding]:
    """Report a QK normalisation, a gain or a softcap that is built but that no call shows.

    Formula: any of these cases.

    - A module at the site that is named like a QK norm, and whose forward never ran.
    - A parameter of such a norm, or one named like a gain on the logits, that no operation read, though others of the
      same module were read.
    - A softcap in the config or on the module, and a call that has none, or another value (1%), or the logits in place
      of the cap: z * tanh(z / c). A call with steps that were not followed is left out: one of them may be the cap.

    Threshold: any. Fail if the config declares it, because the weights were trained with it, else warn.
    """
    source = Message(_UNUSED_SOURCE)
    for judged in context.calls:
        site, index, actual = *judged.key, judged.call.softcap
        norm, unread = _idle_norm(context, judged), _unread_gains(context, judged)
        of_norm = norm is not None or any(name.split(".")[0] in NORM_NAMES for name in unread)
        config = context.config(site) if of_norm else None
        said = [field(config, name) for name in NORM_FIELDS]  # use_qk_norm = True, qk_norm_type = "rms"
        declared = any(x is True or (isinstance(x, str) and x.lower() not in NO_NORM) for x in said)
        severity = "fail" if declared else "warn"
        if norm is not None:
            message, fix = Message("rules.unused.norm", norm=norm), Message("rules.unused.fix_norm", norm=norm)
            yield Finding("unused", severity, site, None, None, message, fix, source, call=index)
        elif unread:
            gains = "rules.unused.gain" if len(unread) == 1 else "rules.unused.gains"
            names = joined(unread, "comma")
            message, fix = Message(gains, names=names), Message("rules.unused.fix_gain", names=names)
            yield Finding("unused", severity, site, None, None, message, fix, source, call=index)
        cap = _declared_cap(context, judged)
        bent = next((s.detail for s in judged.call.stages if s.name == "softcap" and s.detail[:1] == "z"), "")
        if bent:  # the logits in place of the cap: z * tanh(z / c)
            right = f"{bent.partition('/ ')[2].rstrip(')')} * {bent.removeprefix('z * ')}"
            message = Message("rules.unused.bent_cap", wrong=bent, right=right)
            fix = Message("rules.unused.fix_bent_cap", right=right)
            severity = "warn" if cap is None else cap[2]
            yield Finding("unused", severity, site, None, None, message, fix, source, call=index)
            continue
        if cap is None or judged.call.unknown or (actual is not None and is_close(actual, cap[1])):
            continue
        by, value, severity = cap
        if actual is None:
            message = Message("rules.unused.not_capped", cap=by, value=f"{value:g}")
            fix = Message("rules.unused.fix_not_capped", cap=by)
        else:
            message = Message("rules.unused.other_cap", cap=by, value=f"{value:g}", actual=f"{actual:g}")
            fix = Message("rules.unused.fix_other_cap", value=f"{value:g}")
        yield Finding("unused", severity, site, actual, value, message, fix, source, call=index)


def _idle_norm(context: Context, judged: JudgedCall) -> str | None:
    site = judged.call.site
    module = context.module(site)
    if module is None or norm_of_q_and_k(judged.call) is not None or context.ran is None:
        return None
    for name, norm in module.named_children():
        path = f"{site}.{name}" if site else name
        # `self.q_norm = nn.Identity()` is a norm that is switched off.
        if name in NORM_NAMES and not isinstance(norm, nn.Identity) and path not in context.ran:
            return name
    return None


def _unread_gains(context: Context, judged: JudgedCall) -> list[str]:
    """Return the parameters of QK norms and the gains on logits that nothing read; none if no parameter was read."""
    site = judged.call.site
    module = context.module(site)
    prefix = f"{site}." if site else ""
    held = [] if module is None else [name for name, _ in named_parameters(module)]
    unread = [name for name in held if prefix + name in context.unread]
    if len(unread) == len(held):  # the whole module ran in a way that was not followed
        return []
    return [name for name in unread if name in GAIN_NAMES or (name.split(".")[0] in NORM_NAMES and "." in name)]


def _declared_cap(context: Context, judged: JudgedCall) -> tuple[str, float, str] | None:
    """Return what declares a softcap, its value, and how severe it is to ignore it."""
    config, module = context.config(judged.call.site), context.module(judged.call.site)
    for owner, names, severity in ((config, SOFTCAP_FIELDS, "fail"), (module, SOFTCAP_ATTRIBUTES, "warn")):
        for name in names:
            value = number_at(owner, name)
            if value is not None and value > 0:
                by = f"config.{name}" if owner is config else Message("sources.declared.attribute", name=name)
                return by, value, severity
    return None


def dropout(context: Context) -> Iterable[Finding]:
    """Report dropout of the attention weights in eval mode: two runs differ, and neither is the trained model.

    Formula: the rate that reached the weights of a call. Threshold: 0. `nn.Dropout` is the identity in eval mode, but
    `F.dropout` and SDPA's `dropout_p` are not.
    """
    fix, source = Message("rules.dropout.fix"), Message(_DROPOUT_SOURCE)
    for judged in context.calls:
        rate = judged.call.dropout
        if rate > 0 and not context.model.training:
            message = Message("rules.dropout.on", rate=f"{rate:g}")
            site, index = judged.key
            yield Finding("dropout", "fail", site, rate, 0.0, message, fix, source, call=index)


def responsiveness(context: Context) -> Iterable[Finding | NotMeasured]:
    """Test whether the scale of the run follows the module's scale attribute.

    Formula: multiply every scale-like number of every site (`audit.attributes`) by 1.25, run once more, and compare the
    effective scales. A custom attention function that ignores its `scaling` argument does not follow. Threshold: any
    change at all. An attribute that holds the right scale but is not followed is a failure if the scale is wrong. If
    the scale is right anyway it is a note, because the attribute may be another number, as a LoRA layer's alpha/r.
    """
    holding, changed = _tried(context)
    if context.rerun is None or not holding:
        return
    try:
        moved = _follow_in_first_tokens(context, holding, changed)
        if moved is None:
            with enlarged(changed):
                moved = moves((judged.call for judged in context.calls), context.rerun(None).calls)
    except Exception as error:  # the attribute has another use too: a size, for instance
        reason = Message("rules.responsiveness.raised", factor=PROBE_FACTOR, error=kind_and_text(error))
        yield NotMeasured("", reason, code="other_run")
        return
    for key, (judged, attribute) in holding.items():
        site, path = key[0], attribute.path
        if key not in moved:
            yield NotMeasured(site, Message("rules.responsiveness.not_read", attribute=path), code="other_run")
        elif not moved[key]:
            scale = f"{judged.call.scale.effective:.6g}"
            message = Message("rules.responsiveness.idle", attribute=path, scale=scale, factor=PROBE_FACTOR)
            severity, fix = "note", Message("rules.responsiveness.fix_right", attribute=path)
            if judged.verdict == "unexplained":
                severity, fix = "fail", Message("rules.responsiveness.fix", attribute=path)
            source = Message(_ATTRIBUTE_SOURCE)
            yield Finding("responsiveness", severity, site, 1.0, PROBE_FACTOR, message, fix, source, call=key[1])


def _follow_in_first_tokens(
    context: Context, holding: Collection[Key], changed: list[ScaleAttribute]
) -> dict[Key, bool] | None:
    """Return that every scale follows its attribute, as the first tokens show it; None if they do not show it.

    The scale may also follow the number of tokens, so it has to be that of all tokens times a power of the factor.
    """
    if context.rerun_first is None:
        return None
    try:
        with enlarged(changed):
            again = context.rerun_first(None).calls
    except Exception:  # asked of the whole inputs
        return None
    scales = {(call.site, call.index): call.scale.effective for call in again}
    for judged in context.calls:
        new, old = scales.get(judged.key), judged.call.scale.effective
        if judged.key in holding and not (new and old and any(is_close(new, old * PROBE_FACTOR**p) for p in _POWERS)):
            return None
    return dict.fromkeys(holding, True)


def _tried(context: Context) -> tuple[dict[Key, tuple[JudgedCall, ScaleAttribute]], list[ScaleAttribute]]:
    """Return the calls with the attribute that holds their right scale, and all attributes changed for them."""
    holding: dict[Key, tuple[JudgedCall, ScaleAttribute]] = {}
    changed: list[ScaleAttribute] = []
    for judged in context.calls:
        call = judged.call
        attributes = scale_attributes(context.module(call.site), call.heads)
        own = tuple(a for a in attributes if not a.learned and a.store is not None)
        actual = call.scale.effective if judged.verdict in ("exact", "declared") else None
        right = [x for x in (inverse_root(call.head_dim), judged.expected, actual) if x is not None]
        holding_it = (pair for value in right for pair in holders(own, (value,), call.head_dim))
        # A 1 that gives the scale only over sqrt(head_dim) is no evidence: `self.alpha = 1.0`.
        held = next(
            (a for a, text in holding_it if "head_dim" not in text or not are_close(a.values or (), (1.0,))), None
        )
        if held is not None and call.scale.effective:
            holding[judged.key] = (judged, held)
            changed.extend(own)
    return holding, changed
