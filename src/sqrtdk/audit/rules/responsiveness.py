"""Does the scale of the run follow the module's scale attribute?

Formula: multiply every scale-like number of every site (`audit.attributes`) by 1.25, run once more, and compare the
effective scales: followed when new / old is 1.25, its inverse (a divisor) or its square (on both q and k), within 1%.
A custom attention function that ignores its `scaling` argument does not follow. Threshold: any change at all. An
attribute that holds the right scale but is not followed is a note while the scale is right anyway (it may be another
number, as a LoRA layer's alpha/r), a failure when not.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.attributes import ScaleAttribute, holders, scale_attributes
from sqrtdk.audit.context import Context
from sqrtdk.audit.probe import FACTOR, Key, enlarged
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close, inverse_root, matches
from sqrtdk.errors import kind_and_text
from sqrtdk.tracing.records import NotMeasured

SOURCE = "an attention function must honour the scaling that it is given (transformers AttentionInterface)"


def _right_values(judged: JudgedCall) -> tuple[float, ...]:
    values = [inverse_root(judged.call.head_dim)]
    if judged.expected is not None:
        values.append(judged.expected)
    if judged.call.scale.effective is not None and judged.verdict in ("exact", "declared"):
        values.append(judged.call.scale.effective)
    return tuple(values)


def _holding(own: tuple[ScaleAttribute, ...], value: float, head_dim: int) -> ScaleAttribute | None:
    """The first attribute that holds the value; a 1 that gives it only over sqrt(head_dim) holds nothing."""
    for attribute, text in holders(own, (value,), head_dim):
        if not ("head_dim" in text and matches(attribute.values or (), (1.0,))):
            return attribute
    return None


def _tried(context: Context) -> tuple[dict[Key, tuple[JudgedCall, ScaleAttribute]], list[ScaleAttribute]]:
    """The calls whose module holds a right scale, with the attribute that does; and all that are changed for them."""
    holding: dict[Key, tuple[JudgedCall, ScaleAttribute]] = {}
    changed: list[ScaleAttribute] = []
    for judged in context.calls:
        call = judged.call
        attributes = scale_attributes(context.module(call.site), call.heads)
        own = tuple(a for a in attributes if not a.learned and a.store is not None)
        held = next((a for value in _right_values(judged) if (a := _holding(own, value, call.head_dim))), None)
        if held is not None and call.scale.effective:
            holding[call.site, call.index] = (judged, held)
            changed.extend(own)
    return holding, changed


def check(context: Context) -> Iterable[Finding | NotMeasured]:
    """One finding for each call that does not follow its scale attribute."""
    if context.rerun is None:
        return
    holding, changed = _tried(context)
    if not holding:
        return
    try:
        with enlarged(changed):
            after = {(call.site, call.index): call for call in context.rerun(False, None).calls}
    except Exception as error:  # the attribute was something else's number as well
        yield NotMeasured(
            "", f"responsiveness: with its scale attributes x{FACTOR} the model raised {kind_and_text(error)}"
        )
        return
    for key, (judged, attribute) in holding.items():
        new = after[key].scale.effective if key in after else None
        old = judged.call.scale.effective
        if new is None or not old:
            reason = f"responsiveness: whether its scale follows attribute {attribute.path} could not be read"
            yield NotMeasured(judged.call.site, reason)
            continue
        if not close(new, old):
            continue
        wrong = judged.verdict == "unexplained"
        yield Finding(
            rule="responsiveness",
            severity="fail" if wrong else "note",
            site=judged.call.site,
            value=1.0,
            threshold=FACTOR,
            message=f"the scale does not follow attribute {attribute.path}: it stays {old:.6g} when the attribute is "
            f"multiplied by {FACTOR}",
            fix="pass the attribute to the attention function"
            if wrong
            else "scale by the attribute if it is meant to be the softmax's scale, else leave it",
            source=SOURCE,
        )
