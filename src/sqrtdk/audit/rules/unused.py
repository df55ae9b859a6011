"""Rules on what is built or declared but not used: QK norms, gains, softcaps, scale attributes; dropout in eval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sqrtdk.audit.attributes import FACTOR, Key, ScaleAttribute, enlarged, holders, moves, scale_attributes
from sqrtdk.audit.configs import field, number
from sqrtdk.audit.context import Context
from sqrtdk.audit.declared import SOFTCAP_ATTRIBUTES, SOFTCAP_FIELDS
from sqrtdk.audit.gains import normalised
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close, inverse_root, matches
from sqrtdk.errors import kind_and_text
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
SOURCE = "the module or the config says so, the run does not show it"
DROPOUT_SOURCE = "Srivastava et al. 2014, section 4: at test time the whole network is used, without dropout"
ATTRIBUTE_SOURCE = "an attention function must honour the scaling that it is given (transformers AttentionInterface)"


@contextmanager
def watch_norms(model: nn.Module) -> Iterator[set[str]]:
    """Collect the paths of the QK norms whose forward runs. TorchScript norms count as run: hooks can't see them."""
    ran: set[str] = set()
    handles = []
    try:
        # A norm that layers share has a path in each of them.
        for path, module in model.named_modules(remove_duplicate=False):
            if path.rpartition(".")[2] not in NORM_NAMES:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                ran.add(path)
            else:
                handles.append(module.register_forward_hook(lambda *_, path=path: ran.add(path)))
        yield ran
    finally:
        for handle in handles:
            handle.remove()


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
    for judged in context.calls:
        site, actual = judged.call.site, judged.call.softcap
        norm, unread = _idle_norm(context, judged), _unread_gains(context, judged)
        of_norm = norm is not None or any(name.split(".")[0] in NORM_NAMES for name in unread)
        config = context.config(site) if of_norm else None
        said = [field(config, name) for name in NORM_FIELDS]  # use_qk_norm = True, qk_norm_type = "rms"
        declared = any(x is True or (isinstance(x, str) and x.lower() not in NO_NORM) for x in said)
        severity = "fail" if declared else "warn"
        if norm is not None:
            message, fix = f"{norm} is built but never runs", "apply it to q and k after the projection, or remove it"
            yield Finding("unused", severity, site, None, None, message, fix, SOURCE)
        elif unread:
            message = f"{', '.join(unread)}: stored, but nothing reads {'it' if len(unread) == 1 else 'them'}"
            fix = "multiply by it where q and k are normalised, or their product scaled; or remove it"
            yield Finding("unused", severity, site, None, None, message, fix, SOURCE)
        cap = _declared_cap(context, judged)
        bent = next((s.detail for s in judged.call.stages if s.name == "softcap" and s.detail[:1] == "z"), "")
        if bent:  # the logits in place of the cap: z * tanh(z / c)
            right = f"{bent.partition('/ ')[2].rstrip(')')} * {bent.removeprefix('z * ')}"
            message = f"the softcap is {bent}, not {right}: it caps nothing, and no logit stays below 0"
            fix = f"multiply tanh by the cap, not by the logits: {right}"
            yield Finding("unused", "warn" if cap is None else cap[2], site, None, None, message, fix, SOURCE)
            continue
        if cap is None or judged.call.unknown or (actual is not None and close(actual, cap[1])):
            continue
        by, value, severity = cap
        if actual is None:
            message = f"{by} = {value:g}, but the logits are not capped"
            fix = "use an attention implementation that applies the softcap (eager or flex), or unset it"
        else:
            message, fix = f"{by} = {value:g}, but the logits are capped at {actual:g}", "apply the declared softcap"
        yield Finding("unused", severity, site, actual, value, message, fix, SOURCE)


def _idle_norm(context: Context, judged: JudgedCall) -> str | None:
    site = judged.call.site
    module = context.module(site)
    if module is None or normalised(judged.call) is not None or context.ran is None:
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
    held = [] if module is None else [name for name, _ in module.named_parameters()]
    unread = [name for name in held if prefix + name in context.unread]
    if len(unread) == len(held):  # the whole module ran in a way that was not followed
        return []
    return [name for name in unread if name in GAIN_NAMES or (name.split(".")[0] in NORM_NAMES and "." in name)]


def _declared_cap(context: Context, judged: JudgedCall) -> tuple[str, float, str] | None:
    """Return what declares a softcap, its value, and how severe it is to ignore it."""
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


def dropout(context: Context) -> Iterable[Finding]:
    """Report dropout of the attention weights in eval mode: two runs differ, and neither is the trained model.

    Formula: the rate that reached the weights of a call. Threshold: 0. `nn.Dropout` is the identity in eval mode, but
    `F.dropout` and SDPA's `dropout_p` are not.
    """
    fix = "pass dropout_p=rate if self.training else 0.0, or training=self.training to F.dropout"
    for judged in context.calls:
        rate = judged.call.dropout
        if rate > 0 and not context.model.training:
            message = f"attention dropout of {rate:g} is on in eval mode"
            yield Finding("dropout", "fail", judged.call.site, rate, 0.0, message, fix, DROPOUT_SOURCE)


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
        with enlarged(changed):
            moved = moves((judged.call for judged in context.calls), context.rerun(None).calls)
    except Exception as error:  # the attribute has another use too: a size, for instance
        raised = f"with its scale attributes x{FACTOR} the model raised {kind_and_text(error)}"
        yield NotMeasured("", f"responsiveness: {raised}")
        return
    for key, (judged, attribute) in holding.items():
        site, path = judged.call.site, attribute.path
        if key not in moved:
            yield NotMeasured(site, f"responsiveness: whether its scale follows attribute {path} could not be read")
        elif not moved[key]:
            stays = f"it stays {judged.call.scale.effective:.6g} when the attribute is multiplied by {FACTOR}"
            message = f"the scale does not follow attribute {path}: {stays}"
            severity, fix = "note", "scale by the attribute if it is meant to be the softmax's scale, else leave it"
            if judged.verdict == "unexplained":
                severity, fix = "fail", "pass the attribute to the attention function"
            yield Finding("responsiveness", severity, site, 1.0, FACTOR, message, fix, ATTRIBUTE_SOURCE)


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
            (a for a, text in holding_it if "head_dim" not in text or not matches(a.values or (), (1.0,))), None
        )
        if held is not None and call.scale.effective:
            holding[judged.key] = (judged, held)
            changed.extend(own)
    return holding, changed
