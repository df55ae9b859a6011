"""What stands in for a graph's missing config.json: another model's attentions, or the rule of its family.

`--like MODEL`: MODEL's own attentions are taken as the declaration for a graph of it. Both are read without values.
If the scales agree within 1%, the graph gets MODEL's verdict, because MODEL has the attributes that a graph lacks.

Without `--like`, a graph of a family whose scale is not 1/sqrt(head_dim) asks for the config. T5's scale is 1 because
its factor was folded into the initialisation of q. Nothing in an exported graph says so, and each attention, judged by
itself, would lack a scale. The names of modules and classes that exporters keep identify the family, and `families.py`
has its rule. A scale that is not the family's stays a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from sqrtdk.audit.attributes import Key
from sqrtdk.audit.families import FAMILIES, MLA_YARN, Family
from sqrtdk.audit.model_run import ModelRun, run_model, without_verdicts
from sqrtdk.audit.records import UNMEASURED, Finding, JudgedCall, with_calls_named, with_health
from sqrtdk.audit.rules.scales import SCALE_RULES, on_scales
from sqrtdk.audit.rules.unmeasured import UNMEASURED_SOURCE, not_read
from sqrtdk.audit.tolerance import are_close, scales_of
from sqrtdk.graphs.opening import NOTHING_DECLARED
from sqrtdk.messages import Message, id_of
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.tracing.records import AttentionCall, NotMeasured

# Families whose config always declares a scale. The graph does not say which, so any scale may be right.
_DECLARING = ("gemma2", "gemma3", "gemma3_text", "t5gemma", "t5gemma2", "vaultgemma", "granite", "granitemoe",
              "granitemoeshared", "granitemoehybrid", "granite4", "hyperclovax", "helium", *MLA_YARN)  # fmt: skip
_CLASS_ENDING = r"(Text|Vision|Audio)?(For\w+|PreTrained\w*|\w*(Model|Attention|Layer|Block|Stack|Encoder|Decoder)\w*)"

# How a family is recognised if the graph keeps no class names: a pattern for the end of the attentions' paths, and one
# for the names of weights ("" matches any).
_BY_NAMES = (
    ("t5", r"(SelfAttention|EncDecAttention)$", "relative_attention_bias"),  # block.0.layer.0.SelfAttention
    ("gpt_neo", r"\bh\.\d+\.attn\.attention$", ""),  # transformer.h.0.attn.attention
    ("deberta-v2", r"attention\.self$", "rel_embeddings"),
    ("cvt", r"attention\.attention$", "convolution_projection"),
)
_FORMULA_PARTS = ("softcap", "norm", "rope", "sinks")


def as_like(run: ModelRun, module: nn.Module, model: str, options: LoadOptions) -> ModelRun:
    """Return the run of a graph of `module`, judged by what `model` does.

    `model` is an argument of `sqrtdk.models.load.resolve`. Of the loading options only seed and trust are used.

    Raises:
        ModelError: The model can't be built, or none of its attentions can be read.
    """
    own = LoadOptions(static=True, seed=options.seed, trust_remote_code=options.trust_remote_code)
    other = run_model(resolve_model(model, own), "own", seed=options.seed, compare="never")
    pairs = _pairs(run.calls, other.calls)
    calls = tuple(
        judged if pair is None else _judged(judged, pair, model) for judged, pair in zip(run.calls, pairs, strict=True)
    )
    kept = (entry for entry in run.findings if entry.rule not in SCALE_RULES)
    others = with_calls_named(_others(run.calls, pairs, other.calls, model), (judged.site for judged in calls))
    findings = (*kept, *on_scales(module, calls, run.mode), *others)
    note = Message("rules.graph.like", model=model[:200])
    notes = [*(n for n in run.environment["notes"] if id_of(n) != NOTHING_DECLARED), note]
    calls = with_health(calls, findings)
    return replace(run, calls=calls, findings=findings, environment=run.environment | {"notes": notes})


def _pairs(calls: Sequence[JudgedCall], others: Sequence[JudgedCall]) -> list[JudgedCall | None]:
    """Return the model's call for each call of the graph: by site, or in order if the numbers of calls agree."""
    by_key = {other.key: other for other in others}
    found = [by_key.get(judged.key) for judged in calls]
    # If sites do not match, the order decides, provided that the counts agree.
    if None in found and len(calls) == len(others):
        return [*others]
    return found


def _judged(judged: JudgedCall, other: JudgedCall, model: str) -> JudgedCall:
    here, there = scales_of(judged.call), scales_of(other.call)
    if not here or not there:
        reason = judged.reason or other.reason or Message("rules.verdict.like_not_read")
        return replace(judged, verdict=UNMEASURED, mistake=None, declared_by=None, reason=reason)
    if len(here) == len(there) or len(there) == 1 or len(here) == 1:
        # One value serves for all heads.
        wide = max(len(here), len(there))
        if are_close(here * (wide // len(here)), there * (wide // len(there))):
            by = other.declared_by
            if other.verdict == "declared" and by is not None:
                by = Message("sources.declared.by_like", model=model[:80], declaration=by)
            return replace(other, call=judged.call, declared_by=by)
    named = judged.mistake or "unknown"
    reason = Message("rules.verdict.unlike_model", model=f"{there[0]:.6g}", graph=f"{here[0]:.6g}")
    by = Message("sources.declared.like", model=model[:80])
    return JudgedCall(judged.call, "unexplained", named, by, there[0], reason)


def _others(
    calls: Sequence[JudgedCall], pairs: Sequence[JudgedCall | None], others: Sequence[JudgedCall], model: str
) -> Iterator[Finding]:
    """Yield a finding for each difference beside the scale, and for each call without a partner."""
    for judged, pair in zip(calls, pairs, strict=True):
        call = judged.call
        if pair is None:
            reason = Message("rules.declared_vs_actual.no_partner", model=model[:80])
            yield not_read(NotMeasured(call.site, reason, call.formula))
            continue
        for part in _FORMULA_PARTS:
            here, there = getattr(call, part), getattr(pair.call, part)
            if here != there:
                message = Message(
                    "rules.declared_vs_actual.unlike_part", part=part, here=str(here), there=str(there),
                    model=model[:80], formula=call.formula, other=pair.call.formula,
                )  # fmt: skip
                fix, source = Message("rules.declared_vs_actual.fix_unlike_part"), Message("sources.threshold.like")
                yield Finding(
                    "declared_vs_actual", "fail", call.site, str(here), str(there), message, fix, source,
                    call.product_at, call.index,
                )  # fmt: skip
    met = {id(pair) for pair in pairs}
    for other in others:
        if id(other) not in met:
            reason = Message("rules.declared_vs_actual.not_in_graph", model=model[:80])
            yield not_read(NotMeasured(other.call.site, reason, other.call.formula))


def ask_for_config(run: ModelRun, model: nn.Module) -> ModelRun:
    """Withdraw the verdicts on scales that would be right by the config of the graph's family.

    `model` holds the modules that the graph names.
    """
    found = _family(run, model)
    if found is None:
        return run
    name, rule = found
    reasons: dict[Key, str] = {
        judged.key: Message("rules.graph.looks_like", family=name, scale=f"{judged.call.scale.effective:.4g}")
        for judged in run.calls
        if judged.verdict == "unexplained" and _is_right(judged.call, rule)
    }

    def asks(judged: JudgedCall) -> Finding:
        fix, source = Message("rules.graph.fix_config"), Message(UNMEASURED_SOURCE)
        site, index = judged.key
        return Finding(UNMEASURED, "warn", site, None, None, judged.reason or "", fix, source, call=index)

    return without_verdicts(run, reasons, asks) if reasons else run


def _is_right(call: AttentionCall, rule: Family | None) -> bool:
    """Return whether a scale is the family's; always True if the family's configs differ."""
    if rule is None:
        return True
    values = rule.values(call, None)
    return not values or any(are_close(scales_of(call), (value,)) for value in values)


def _family(run: ModelRun, model: nn.Module) -> tuple[str, Family | None] | None:
    """Return the family's name and rule, found by the exporter's class names, else by names of modules and weights."""
    classes = {type(module).__name__ for module in model.modules()}
    by_class = {re.sub("[_-]", "", name): name for name in (*FAMILIES, *_DECLARING)}
    for name in sorted(by_class, key=len, reverse=True):  # "T5Gemma" before "T5"
        if any(re.fullmatch(name + _CLASS_ENDING, kind, re.IGNORECASE) for kind in classes):
            return by_class[name], FAMILIES.get(by_class[name])
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    biased = any(judged.call.bias is not None for judged in run.calls)
    for family, sites, weights in _BY_NAMES:
        named = any(re.search(weights, tensor) for tensor in tensors) or (family == "t5" and biased)
        if named and any(re.search(sites, judged.call.site) for judged in run.calls):
            return family, FAMILIES[family]
    return None
