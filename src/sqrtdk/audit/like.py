"""`--like MODEL`: what MODEL's own attentions do is what is declared for a graph of it.

Both are read without values. Formula: |effective scale of the graph / that of MODEL - 1| <= 1%. Where they are the same
the graph has MODEL's verdict, as MODEL has the attributes that a graph lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from sqrtdk.audit.context import Context
from sqrtdk.audit.model_run import SCALE_RULES, ModelRun, run_model
from sqrtdk.audit.records import UNMEASURED, Finding, JudgedCall, with_health
from sqrtdk.audit.rules.scales import declared_vs_actual, scale_ledger
from sqrtdk.audit.rules.unmeasured import not_read
from sqrtdk.audit.tolerance import matches, scales_of
from sqrtdk.models.load import resolve
from sqrtdk.models.options import LoadOptions
from sqrtdk.tracing.records import NotMeasured

_PARTS = ("softcap", "norm", "rope", "sinks")


def as_like(run: ModelRun, module: nn.Module, model: str, options: LoadOptions) -> ModelRun:
    """The run of a graph, judged by what a model does.

    Args:
        run: of the graph.
        module: that was run.
        model: what `sqrtdk.models.load.resolve` takes.
        options: of loading; its seed and trust count.

    Raises:
        ModelError: the model can't be built, or no attention of it can be read.
    """
    own = LoadOptions(static=True, seed=options.seed, trust_remote_code=options.trust_remote_code)
    other = run_model(resolve(model, own), "own", seed=options.seed, compare="never")
    pairs = _pairs(run.calls, other.calls)
    calls = tuple(
        judged if pair is None else _judged(judged, pair, model) for judged, pair in zip(run.calls, pairs, strict=True)
    )
    context = Context(module, calls, run.mode, compare="never")
    found = [entry for rule in (scale_ledger, declared_vs_actual) for entry in rule(context)]
    findings = (
        *(entry for entry in run.findings if entry.rule not in SCALE_RULES),
        *found,
        *_others(run.calls, pairs, other.calls, model),
    )
    note = f"what is declared are the attentions of {model[:200]}"
    notes = [*(n for n in run.environment["notes"] if "nothing is declared" not in n), note]
    return replace(
        run,
        calls=with_health(calls, findings),
        findings=findings,
        environment=run.environment | {"notes": notes},
    )


def _pairs(calls: Sequence[JudgedCall], others: Sequence[JudgedCall]) -> list[JudgedCall | None]:
    """For each call of the graph the one of the model: by site, by the end of it, or by order where all fit."""
    by_site = {(other.call.site, other.call.index): other for other in others}
    found = [by_site.get((judged.call.site, judged.call.index)) for judged in calls]
    if None in found and len(calls) == len(others):
        return [*others]
    return found


def _judged(judged: JudgedCall, other: JudgedCall, model: str) -> JudgedCall:
    here, there = scales_of(judged.call), scales_of(other.call)
    if not here or not there:
        reason = judged.reason or other.reason or "its scale, or that of the other model, could not be read"
        return replace(judged, verdict=UNMEASURED, mistake=None, declared_by=None, reason=reason)
    if len(here) == len(there) or len(there) == 1 or len(here) == 1:
        wide = max(len(here), len(there))
        if matches(here * (wide // len(here)), there * (wide // len(there))):
            by = other.declared_by if other.verdict != "declared" else f"{model[:80]}: {other.declared_by}"
            return replace(other, call=judged.call, declared_by=by)
    named = judged.mistake or "unknown"
    reason = f"it applies {there[0]:.6g}, the graph {here[0]:.6g}"
    return JudgedCall(judged.call, "unexplained", named, f"the attention of {model[:80]}", there[0], reason)


def _others(
    calls: Sequence[JudgedCall],
    pairs: Sequence[JudgedCall | None],
    others: Sequence[JudgedCall],
    model: str,
) -> Iterator[Finding]:
    """What differs beside the scale, and calls without a partner."""
    for judged, pair in zip(calls, pairs, strict=True):
        call = judged.call
        if pair is None:
            yield not_read(NotMeasured(call.site, f"no attention of {model[:80]} belongs to it", call.formula))
            continue
        for part in _PARTS:
            here, there = getattr(call, part), getattr(pair.call, part)
            if here != there:
                message = f"{part} is {here}, and {there} in {model[:80]}: {call.formula} against {pair.call.formula}"
                yield Finding(
                    "declared_vs_actual", "fail", call.site, str(here), str(there), message,
                    "export the model again, and run sqrtdk diff on the two", "the model that was named",
                    call.product_at,
                )  # fmt: skip
    met = {id(pair) for pair in pairs}
    for other in others:
        if id(other) not in met:
            yield not_read(NotMeasured(other.call.site, f"of {model[:80]}, is not in the graph", other.call.formula))
