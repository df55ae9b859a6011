"""Joins the steps of a grid of ranks, axis by axis: keys first, then heads, then rows, then the stages of a model.

Sums are added, maxima taken, rows concatenated; no quotient is ever averaged. A value that one rank could not measure
counts as unmeasured on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sqrtdk.messages import Message
from sqrtdk.messages import joined as joined_names
from sqrtdk.monitor.samples import (
    CAUSE_BETWEEN,
    CAUSE_WITHIN,
    RULED_OUT,
    Alarm,
    FirstNonfinite,
    reason_unmeasured,
    with_place,
)
from sqrtdk.monitor.sums import (
    MAXIMUM_COLUMNS,
    PRODUCT_COLUMNS,
    HeadSums,
    WatchedCall,
    WatchedStep,
    head_sums,
    join_heads,
    join_rows,
)
from sqrtdk.tracing import merge_rows

Calls = Sequence[WatchedCall | None]  # of the ranks along one axis; None for a rank without the call
# Keys first: their parts belong to one row, whose statistics must be whole before heads or rows are joined.
_AXES_IN_ORDER = ("stages", "rows", "summed", "same", "heads", "keys")  # joined from last to first


@dataclass(frozen=True, slots=True)
class RankAxis:
    """One direction of a grid of ranks.

    Attributes:
        size: number of ranks along it.
        shards: how they split the work, a word of `ranks.SHARDS`.
    """

    size: int
    shards: str


def join_ranks(steps: Sequence[WatchedStep], axes: Sequence[RankAxis]) -> WatchedStep:
    """Join the step of all ranks.

    Args:
        steps: of every rank, in the order of the grid.
        axes: of the grid, the last one varies fastest.
    """
    order = sorted(range(len(axes)), key=lambda at: _AXES_IN_ORDER.index(axes[at].shards))
    # Ranks of one inner axis become neighbours, so joining an axis is joining slices of `axis.size`.
    grid = torch.arange(len(steps)).reshape([axis.size for axis in axes]).permute(order).flatten().tolist()
    axes = [axes[at] for at in order]
    stages = math.prod(axis.size for axis in axes if axis.shards == "stages")
    # DDP and FSDP average gradients over these ranks, so that a rank's own gradients are too large by their number.
    share = 1.0 / math.prod(axis.size for axis in axes if axis.shards == "rows")
    inner = [axis for axis in axes if axis.shards != "stages"]
    width = len(steps) // stages
    by_stage = [_calls([steps[rank] for rank in grid[at : at + width]], inner) for at in range(0, len(grid), width)]
    calls = [_weighed(call, share) for call in _named(by_stage)]
    by_rank = [(steps[rank].first, place // width, rank) for place, rank in enumerate(grid)]
    # Only the last pipeline stage has a loss, so ranks without one do not count in the mean.
    losses = [step.loss for step in steps if step.loss is not None]
    how = next((step.how for step in steps if reason_unmeasured(step.how) is None), steps[0].how)
    # A dict, as a set would give them in another order on each rank.
    alarms: dict[Alarm, None] = dict.fromkeys(alarm for step in steps for alarm in step.alarms)
    return WatchedStep(
        tuple(calls),
        how,
        _missed(steps),
        sum(losses) / len(losses) if losses else None,
        tuple(alarms),
        _first(by_rank, by_stage),
        max(step.modules for step in steps),
        faults=tuple(dict.fromkeys(fault for step in steps for fault in step.faults)),
    )


def _first(
    by_rank: Sequence[tuple[FirstNonfinite | None, int, int]], by_stage: Sequence[Sequence[WatchedCall]]
) -> FirstNonfinite | None:
    """Return the first output of all ranks that is not finite, in the order of passes, stages and modules.

    Args:
        by_rank: for each rank: its first output, the number of its stage, its own number.
        by_stage: the attentions of each stage.
    """
    known = [(first, stage, rank) for first, stage, rank in by_rank if first is not None]
    if not known:
        return None
    found, stage, rank = min(known, key=_order)
    peers = [first for first, where, _ in by_rank if where == stage]
    # If all ranks of the stage found the same, naming one of them would send the reader to the wrong place.
    alike = all(one is not None and (one.site, one.cause) == (found.site, found.cause) for one in peers)
    # In a ring all ranks find it at one module: those that received the keys are not where it began.
    everywhere = alike and len({one is not None and one.received for one in peers}) == 1
    earlier = {call.place for calls in by_stage[:stage] for call in calls}
    if any(call.place in earlier for call in by_stage[stage]):  # one name in two stages, as in `_named`
        prefix = f"stage{stage}."
        names_module = found.cause in (CAUSE_BETWEEN, CAUSE_WITHIN) and found.detail

        def renamed(place: tuple[str, int]) -> tuple[str, int]:
            return (prefix + place[0], place[1]) if place in earlier else place

        before = None if found.before is None else renamed(found.before)
        detail = prefix + found.detail if names_module else found.detail
        behind = tuple(map(renamed, found.behind))
        found = replace(found, site=prefix + found.site, detail=detail, before=before, behind=behind)
    return replace(found, rank=None if everywhere else rank)


def _order(entry: tuple[FirstNonfinite, int, int]) -> tuple[bool, bool, int, int, int, bool]:
    """Sort key: outputs that reach the model's output come first, then the order of passes, stages and modules; of
    ranks at one module, that which did not get it from another.
    """
    first, stage, _ = entry
    number, place = first.order
    return first.cause == RULED_OUT, not first.returned, number, stage, place, first.received


def _calls(steps: Sequence[WatchedStep], axes: Sequence[RankAxis]) -> list[WatchedCall]:
    """Join the calls of one stage, in the order of the first rank that has each."""
    by_rank = [{call.place: call for call in step.calls} for step in steps]
    found = []
    for place in dict.fromkeys(place for each in by_rank for place in each):
        calls: list[WatchedCall | None] = [each.get(place) for each in by_rank]
        for axis in reversed(axes):
            calls = [_of[axis.shards](calls[at : at + axis.size]) for at in range(0, len(calls), axis.size)]
        if calls[0] is not None:
            found.append(calls[0])
    return found


def _named(by_stage: Sequence[Sequence[WatchedCall]]) -> list[WatchedCall]:
    """Return the calls of all stages; the same name in two stages means two attentions."""
    stages: dict[tuple[str, int], int] = {}
    found = []
    for number, calls in enumerate(by_stage):
        for call in calls:
            # Each stage of a pipeline counts its layers from 0, so that "layers.0" may be another layer on each.
            met = stages.setdefault(call.place, number)
            found.append(call if met == number else replace(call, site=f"stage{number}.{call.site}"))
    return found


def _rows(calls: Calls) -> WatchedCall | None:
    known = [call for call in calls if call is not None]
    if not known:
        return None
    if len({call.heads for call in known}) > 1:
        counts = joined_names([str(count) for count in sorted({call.heads for call in known})], "and")
        return _without(known[0], Message("alarms.unmeasured.unlike_heads", counts=counts))
    return _joined(known, join_rows)


def _heads(calls: Calls) -> WatchedCall | None:
    known = [call for call in calls if call is not None]
    if not known:
        return None
    if len(known) < len(calls):
        return _without(known[0], _absent(calls, "alarms.unmeasured.absent_heads"))
    # Tensor-parallel ranks see the same rows; other numbers of rows mean that the mesh's axes were named wrongly.
    lengths = {tuple(one.shape[-1] for one in call.sums.ordered.values()) for call in known if call.sums is not None}
    if len(lengths) > 1:
        return _without(known[0], Message("alarms.unmeasured.heads_of_other_rows"))
    return replace(_joined(known, _beside), heads=sum(call.heads for call in known))


def _keys(calls: Calls) -> WatchedCall | None:
    known = [call for call in calls if call is not None]
    if not known:
        return None
    if len(known) < len(calls):
        return _without(known[0], _absent(calls, "alarms.unmeasured.absent_keys"))
    return _joined(known, _merged, by_row=True)


def _same(calls: Calls) -> WatchedCall | None:
    return next((call for call in calls if call is not None), None)


_of: dict[str, Callable[[Calls], WatchedCall | None]] = {
    "rows": _rows,
    "summed": _rows,
    "heads": _heads,
    "keys": _keys,
    "same": _same,
}


def _joined(
    calls: Sequence[WatchedCall], join: Callable[[Sequence[HeadSums]], HeadSums], *, by_row: bool = False
) -> WatchedCall:
    """Join the sums of one call, if every rank has them."""
    first = calls[0]
    unmeasured = next((call for call in calls if call.sums is None), None)
    if unmeasured is not None:
        return _without(unmeasured, unmeasured.reason or Message("alarms.unmeasured.rows"))
    sums = [call.sums for call in calls if call.sums is not None]
    if by_row:
        rows = merge_rows([call.rows[0] for call in calls])
        if rows is None:
            return _without(first, Message("alarms.unmeasured.keys_of_other_rows"))
        sums = [head_sums(rows), *sums]
    return replace(first, sums=join(sums), rows=())


def _beside(sums: Sequence[HeadSums]) -> HeadSums:
    """Concatenate the heads of all ranks; the largest products are one number of the call, the maximum of all ranks."""
    found = join_heads(sums)
    # The largest |q . k| is known per call, so a rank repeats it for each of its heads.
    maxima = found.maxima.clone()
    lines = maxima[[MAXIMUM_COLUMNS.index(name) for name in PRODUCT_COLUMNS]]
    maxima[[MAXIMUM_COLUMNS.index(name) for name in PRODUCT_COLUMNS]] = lines.amax(-1, keepdim=True).expand_as(lines)
    return replace(found, maxima=maxima)


def _merged(sums: Sequence[HeadSums]) -> HeadSums:
    """Take the sums of the merged rows, which come first, and the key gradients of all ranks.

    A rank knows only a part of the gradient of a row's q, so query gradients are left out.
    """
    # Sums can't be merged along the keys: each rank has its own maximum and normaliser of the same row.
    rows, *ranks = sums
    return rows.with_gradients(None, join_rows(ranks).ordered.get("key_grad"))


def _weighed(call: WatchedCall, share: float) -> WatchedCall:
    """Scale the gradients to those of the mean loss, over the ranks whose gradients are averaged."""
    if call.sums is None:
        return call
    ordered = {name: one * share if name.endswith("_grad") else one for name, one in call.sums.ordered.items()}
    return replace(call, sums=replace(call.sums, ordered=ordered))


def _without(call: WatchedCall, reason: str) -> WatchedCall:
    return replace(call, sums=None, reason=reason, rows=())


def _missed(steps: Sequence[WatchedStep]) -> tuple[str, ...]:
    """Return what was not measured, with the rank's number unless every rank missed it."""
    everywhere = set(steps[0].missed).intersection(*(step.missed for step in steps))
    texts = [
        text if text in everywhere else with_place(Message("alarms.unmeasured.rank", rank=number), text)
        for number, step in enumerate(steps)
        for text in step.missed
    ]
    return tuple(dict.fromkeys(texts))


def _absent(calls: Calls, id: str) -> str:
    return Message(id, number=sum(call is None for call in calls), all=len(calls))
