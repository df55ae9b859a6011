"""Two parts of law `cache` for a single module: keys given as tensors, and keys in slots of a buffer.

A module that takes keys and values but returns none is given the keys of one pass, as a trace saw them. A module that
writes keys into a larger tensor leaves slots that are exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.records import LawAnswer
from sqrtdk.laws.answers import law_broken, law_holds, law_refused
from sqrtdk.laws.decoding import cache_arguments, misaligned
from sqrtdk.laws.inputs import Content, other_content
from sqrtdk.laws.moved import moved_entries, moved_positions, position_axis
from sqrtdk.laws.subject import NotAsked, Outputs, Subject
from sqrtdk.messages import Message, joined
from sqrtdk.modules.structures import tensors_of
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import trace

LAW = "cache"
GIVEN, EMPTY = "laws.cache.about.given_keys", "laws.cache.about.empty_slots"


def given_keys(subject: Subject, content: Content) -> Iterator[LawAnswer]:
    """Yield one answer for a module whose forward takes cached keys and values as two tensors and returns none.

    Args:
        subject: The module with its inputs by name.
        content: The input whose positions are decoded in steps.
    """
    try:
        yield _answer_on_keys(subject, content)
    except NotAsked as error:
        yield law_refused(LAW, Message(GIVEN), error)


def _answer_on_keys(subject: Subject, content: Content) -> LawAnswer:
    names = cache_arguments(subject)
    given = [subject.inputs.get(name) for name in names]
    if len(names) == 1 and isinstance(given[0], tuple | list):
        given = list(given[0])
    pair = [part for part in given if isinstance(part, Tensor) and part.dim() == 4]
    if len(pair) != 2 or len(given) != 2:
        raise NotAsked(Message("laws.cache.no_given_keys"))
    if others := [name for name in subject.tensors if name not in (*names, content.name)]:
        raise NotAsked(Message("laws.cache.unknown_input", name=others[0]))
    _, step = _traced(subject)
    new = int(content.tensor.shape[1])
    axis, keys = _as_cached(step, pair, step.key.values.shape[2] - new)
    cached = int(pair[0].shape[axis])
    # Any earlier tokens will do, as long as their number is right.
    earlier = content.tensor[:, torch.arange(cached) % new]
    earlier = other_content(subject, Content(content.name, earlier), torch.ones(earlier.shape[:2], dtype=torch.bool))

    def caches(key: Tensor, value: Tensor) -> dict[str, Any]:
        parts = [part.transpose(1, axis).transpose(1, 2) if axis == 1 else part for part in (key, value)]
        return (
            dict(zip(names, parts, strict=True))
            if len(names) == 2
            else {names[0]: type(subject.inputs[names[0]])(parts)}
        )

    # One pass over earlier and new tokens has a cache of length 0.
    empty = caches(step.key.values[:, :, :0], step.value.values[:, :, :0])
    whole = {**subject.inputs, content.name: torch.cat((earlier, content.tensor), 1), **empty}
    full, seen = _traced(subject.over(whole))
    all_keys = seen.key.values if keys == "rotated" else seen.key.projected
    if all_keys is None or seen.key.values.shape[2] != cached + new:
        raise NotAsked(Message("laws.cache.keys_unread"))
    behind = subject.over({**subject.inputs, **caches(all_keys[:, :, :cached], seen.value.values[:, :, :cached])})
    rows = _unlike(full, behind.base, content, cached)
    if not bool(rows.any()):
        return law_holds(LAW, Message(GIVEN))
    return _broken(behind, rows, cached, seen, subject.over({**subject.inputs, **empty}))


def _broken(behind: Subject, rows: Tensor, cached: int, seen: CallTensors, alone: Subject) -> LawAnswer:
    count, worst = int(rows.any(0).sum()), rows[int(rows.sum(1).argmax())]
    site, about, source = seen.site, Message(GIVEN), Message("laws.cache.source")
    message: str = Message("laws.cache.given_differ", count=count, cached=cached)
    if (corner := misaligned(behind, rows.shape[1], cached)) is not None:
        message, fix = joined([message, corner[1]]), Message("laws.cache.fix_align")
        return law_broken(LAW, about, "fail", corner[0], message, fix, source, value=float(count), positions=worst)
    keys, first = (_traced(run)[1].key.values for run in (behind, alone))
    before, whole = (part[:, :, :cached] for part in (keys, seen.key.values))
    new, whole_new = keys[:, :, cached:], seen.key.values[:, :, cached:]
    fix = Message("laws.cache.fix_count")
    # New keys that are the same without a cache were rotated by positions from 0 on.
    if _equal(new, first) and not _equal(new, whole_new):
        message = Message("laws.cache.turned_from_zero", cached=cached)
        fix = Message("laws.cache.fix_offset")
    elif _equal(new, whole_new) and not _equal(before, whole):
        message = joined([message, Message("laws.cache.turned_again")])
        fix = Message("laws.cache.fix_turn_once")
    return law_broken(LAW, about, "warn", site, message, fix, source, value=float(count), positions=worst)


def _traced(subject: Subject) -> tuple[Outputs, CallTensors]:
    """Return the outputs of a run, and the tensors of its only attention."""
    with trace(subject.module, stats=False, numeric=False, keep=True) as traced:
        outputs = tensors_of(subject.returned({}))
    if len(traced.tensors) != 1:
        raise NotAsked(Message("laws.cache.several_attentions", count=len(traced.tensors)))
    return outputs, traced.tensors[0]


def _as_cached(step: CallTensors, pair: list[Tensor], cached: int) -> tuple[int, str]:
    """Return the axis of positions of given keys, and whether they are cached after their rotation or before it.

    Raises:
        NotAsked: The given keys are changed on the way.
    """
    for axis in (2, 1):
        key, value = (part if axis == 2 else part.transpose(1, 2) for part in pair)
        if key.shape[2] != cached or not _equal(value, step.value.values[:, :, :cached]):
            continue
        if _equal(key, step.key.values[:, :, :cached]):
            return axis, "rotated"
        if step.key.projected is not None and _equal(key, step.key.projected[:, :, :cached]):
            return axis, "projected"
    raise NotAsked(Message("laws.cache.keys_changed"))


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not bool(moved_entries(one, other).any())


def _unlike(full: Outputs, step: Outputs, content: Content, cached: int) -> Tensor:
    batch, new = content.tensor.shape[:2]
    for name, one in full.items():
        axis = position_axis(one, batch, cached + new)
        if axis is not None and name in step:
            part = one.narrow(axis, cached, new)
            if part.shape == step[name].shape:
                return moved_positions(part, step[name], axis).cpu()
    raise NotAsked(Message("laws.asking.no_output_per_token"), by_length=True)


def empty_slots(subject: Subject) -> LawAnswer | None:
    """Return the answer whether queries see cache slots that were never written, or None if no attention has slots.

    Runs the model once under a trace. If such keys are visible, the answer is broken with a warning at the first
    attention that sees some.
    """
    if not any(_has_slots(judged.call) for judged in subject.calls):
        return None
    with trace(subject.module, stats=False, numeric=False, keep=True) as traced:
        subject.run({})
    for tensors in traced.tensors:
        if tensors.call is None or not _has_slots(tensors.call):
            continue
        seen = _empty_and_visible(tensors)
        if seen:
            message = Message("laws.cache.empty_slots_seen", count=seen)
            fix, source = Message("laws.cache.fix_empty_slots"), Message("laws.cache.source_empty_slots")
            return law_broken(LAW, Message(EMPTY), "warn", tensors.site, message, fix, source, value=float(seen))
    return law_holds(LAW, Message(EMPTY))


def _has_slots(call: Any) -> bool:
    return any(stage.where == "k" and stage.name == "cache" for stage in call.stages)


def _empty_and_visible(tensors: CallTensors) -> int:
    """Return how many zero keys at the end a row sees; 0 if the last one is hidden or the mask is unknown."""
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for term in tensors.terms or ():
        if term.name == "unknown" or (term.name == "mask" and not isinstance(term.value, Tensor)):
            return 0
        if term.name == "mask" and isinstance(term.value, Tensor):
            visible = visible.to(term.value.device) & term.value
    key, value = tensors.key.values, tensors.value.values
    empty = ((key == 0).all(-1) & (value == 0).all(-1)).all(1)  # (B, S)
    # A slot counts if it and all slots behind it are empty.
    at_the_end = empty.flip(1).long().cumprod(1).flip(1).bool()
    seen = at_the_end & visible.expand(key.shape[0], -1, -1, key.shape[2]).any(2).any(1).to(key.device)
    return int(seen.sum(1).max()) if bool(seen[:, -1].any()) else 0
