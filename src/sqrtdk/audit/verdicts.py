"""The verdicts on all calls of a run: each call by itself, then what the probe and the other layers show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from sqrtdk.audit.attributes import ScaleAttribute, holders, scale_attributes
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.explanations import judge
from sqrtdk.audit.governing import config_at
from sqrtdk.audit.layers import layer_of, layer_pattern, ranks, siblings_text, strangers
from sqrtdk.audit.probe import Key, Probe
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import close, inverse_root, scales_of
from sqrtdk.tracing.records import AttentionCall

# Runs that ask which attribute a call follows. Each asks of one more attribute: a module with more than this many that
# hold one value (`scale`, `scaling` and `norm_factor` that are all 0.125) has not been seen.
ROUNDS = 3


def judge_all(calls: Sequence[AttentionCall], model: nn.Module, probe: Probe | None = None) -> tuple[JudgedCall, ...]:
    """Judge every call of a run; the calls together show patterns over the layers that no call shows alone.

    `probe` runs the model once more and says which calls follow the attributes that hold their scale.
    """
    rank = ranks(calls)
    layers = {site: layer_of(module_at(model, site), place) for site, place in rank.items()}
    pattern = layer_pattern(calls, layers)
    known: dict[tuple[Key, str], bool] = {}

    def verdict(call: AttentionCall) -> JudgedCall:
        return judge(
            call,
            module_at(model, call.site),
            config_at(model, call.site),
            layers[call.site],
            layered=pattern.get(call.site),
            follows=lambda attribute: known.get(((call.site, call.index), attribute.path)),
        )

    judged = [verdict(call) for call in calls]
    for _ in range(ROUNDS if probe else 0):
        asked = _unasked(judged, model, known)
        answers = probe(asked) if probe and asked else {}
        if not answers:
            break
        known.update({(key, asked[key].path): answer for key, answer in answers.items()})
        judged = [verdict(call) for call in calls]
    return tuple(_alone(judged))


def _unasked(
    judged: Sequence[JudgedCall], model: nn.Module, known: Mapping[tuple[Key, str], bool]
) -> dict[Key, ScaleAttribute]:
    """The attribute that each verdict leans on, unless it is known already whether the call follows it."""
    asked: dict[Key, ScaleAttribute] = {}
    for entry in judged:
        call, key = entry.call, (entry.call.site, entry.call.index)
        if entry.attribute is None or call.scale.effective is None:
            continue
        attributes = scale_attributes(module_at(model, call.site), call.heads)
        holding = holders(attributes, scales_of(call), call.head_dim)
        held = next((attribute for attribute, text in holding if text == entry.attribute), None)
        if held is not None and (key, held.path) not in known:
            asked[key] = held
    return asked


def _alone(judged: Sequence[JudgedCall]) -> list[JudgedCall]:
    """The verdicts, with a scale of 1 that an attribute of one layer alone declares turned into a missing one."""
    verdicts = list(judged)
    for place, siblings in strangers(judged).items():
        entry = judged[place]
        if entry.expected is not None and close(entry.expected, 1.0):
            reason = f"attribute {entry.attribute} differs from its {siblings_text(siblings)}"
            verdicts[place] = JudgedCall(
                entry.call, "unexplained", "missing", None, inverse_root(entry.call.head_dim), reason, entry.attribute
            )
    return verdicts
