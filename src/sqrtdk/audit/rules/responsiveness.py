"""Does the scale of the run follow the module's scale attribute?

Formula: multiply every scale-like number of every site (`audit.attributes`) by 1.25, run once more, and compare the
effective scales: followed when new / old is 1.25, its inverse (a divisor) or its square (on both q and k), within 1%.
A custom attention function that ignores its `scaling` argument does not follow. Threshold: any change at all. An
attribute that holds the right scale but is not read is a note while the scale is right anyway, a failure when not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from sqrtdk.audit.attributes import ScaleAttribute, holding, scale_attributes
from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.errors import kind_and_text
from sqrtdk.trace.records import NotMeasured

FACTOR = 1.25  # exact in every binary format, far outside the tolerance, too small to overflow
SOURCE = "an attention function must honour the scaling that it is given (transformers AttentionInterface)"


@contextmanager
def enlarged(attributes: Iterable[ScaleAttribute], factor: float = FACTOR) -> Iterator[None]:
    """Multiply numbers and buffers by `factor` for the time of the block; the same objects are put back."""
    restore: list[tuple[MutableMapping[str, Any], str, Any]] = []
    seen: set[tuple[int, str]] = set()
    try:
        for attribute in attributes:
            store, key = attribute.store, (id(attribute.owner), attribute.name)
            if attribute.learned or store is None or key in seen:
                continue
            seen.add(key)
            value = store[attribute.name]
            restore.append((store, attribute.name, value))
            store[attribute.name] = (value.detach() if isinstance(value, torch.Tensor) else value) * factor
        yield
    finally:
        for store, name, value in restore:
            store[name] = value


def _right_values(judged: JudgedCall) -> tuple[float, ...]:
    values = [inverse_root(judged.call.head_dim)]
    if judged.expected is not None:
        values.append(judged.expected)
    if judged.call.scale.effective is not None and judged.verdict in ("exact", "declared"):
        values.append(judged.call.scale.effective)
    return tuple(values)


def check(context: Context) -> Iterable[Finding | NotMeasured]:
    """One finding for each call whose scale attribute is not read."""
    if context.rerun is None:
        return
    held: dict[tuple[str, int], tuple[JudgedCall, str]] = {}
    attributes: list[ScaleAttribute] = []
    for judged in context.calls:
        call = judged.call
        attributes_here = scale_attributes(context.module(call.site), call.heads)
        own = tuple(a for a in attributes_here if not a.learned and a.store is not None)
        found = next((f for value in _right_values(judged) if (f := holding(own, (value,), call.head_dim))), None)
        if found is not None and call.scale.effective:
            held[call.site, call.index] = (judged, found[1])
            attributes.extend(own)
    if not held:
        return
    try:
        with enlarged(attributes):
            after = {(call.site, call.index): call for call in context.rerun(False, None).calls}
    except Exception as error:  # the attribute was something else's number as well
        yield NotMeasured(
            "", f"responsiveness: with its scale attributes x{FACTOR} the model raised {kind_and_text(error)}"
        )
        return
    for key, (judged, text) in held.items():
        new = after[key].scale.effective if key in after else None
        old = judged.call.scale.effective
        if new is None or not old or not close(new, old):
            continue
        wrong = judged.verdict == "unexplained"
        yield Finding(
            rule="responsiveness",
            severity="fail" if wrong else "note",
            site=judged.call.site,
            value=1.0,
            threshold=FACTOR,
            message=f"attribute {text} is not read: the effective scale stays {old:.6g} when it grows by {FACTOR}",
            fix="pass the attribute to the attention function" if wrong else "remove the attribute, or read it",
            source=SOURCE,
        )
