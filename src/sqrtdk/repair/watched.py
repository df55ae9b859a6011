"""QK-clip by the maxima that a watch has of the step which has just ended: nothing is traced for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.repair.plan import grouped, plans_from
from sqrtdk.repair.ranks import Ranks
from sqrtdk.repair.rows import CallPlan
from sqrtdk.tracing import CallTensors

Place = tuple[str, int]
NOT_YET = "which rows are a head's is found out at the next sampled step"
OTHER_HEADS = "the watch has the maxima of {} heads for the {} that this process has"
_BROKEN = ("nan_rows", "query_nonfinite", "key_nonfinite")
_SAME_WEIGHTS = ("rows", "keys", "same")  # what ranks may share that have all of the heads


@runtime_checkable
class StepWatch(Protocol):
    """What a clip reads of a run that is watched, as `sqrtdk.watch` gives it; see `monitor.watch.Watch`.

    Attributes:
        model: that is watched.
        rows: the most rows of a sequence that are measured; None: all.
        shards: what the ranks share whose statistics are joined; none: each has its own.
    """

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def rows(self) -> int | None: ...  # noqa: D102

    @property
    def shards(self) -> tuple[str, ...]: ...  # noqa: D102

    def last_sample(self) -> Any:
        """The `StepSample` of the step that ended last; None if it was not sampled."""

    def sketches(self) -> Mapping[Place, CallTensors]:
        """Where q and k come from, of the attentions that the last sampled step looked at."""

    def look_again(self) -> None:
        """Have the next sampled step look at all of its attentions."""

    def told(self, own: Any) -> Sequence[Any]:
        """What each rank tells the others."""


@dataclass(slots=True)
class Clips:
    """What is known of a watched run from one clip to the next.

    Attributes:
        plans: by site and index; the same on every rank.
        step: whose maxima are in `maxima`.
        maxima: (Hq,) of each attention, as the last clip has left them.
    """

    plans: dict[Place, CallPlan] = field(default_factory=dict)
    step: int = 0
    maxima: dict[Place, Tensor] = field(default_factory=dict)

    def left(self, places: Sequence[Place], predicted: Sequence[Tensor]) -> None:
        """Note what a clip has made of the maxima: a second one after the same step begins there."""
        self.maxima = dict(zip(places, predicted, strict=True))


_clips: WeakKeyDictionary[Any, Clips] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Measured:
    """What there is to clip by after a step.

    Attributes:
        clips: of the run.
        places: of the attentions.
        plans: of each.
        maxima: (Hq,) of each; None if it did not run.
        partial: of each, the numbers of the heads of which only some rows were measured.
    """

    clips: Clips
    places: tuple[Place, ...]
    plans: tuple[CallPlan, ...]
    maxima: tuple[Tensor | None, ...]
    partial: tuple[tuple[int, ...], ...]


def measured(model: nn.Module, watch: StepWatch, group: Ranks = None) -> Measured | None:
    """The maxima of the step that ended last, with plans; None if it was not sampled.

    Args:
        model: that is clipped: the watched one, whatever it is wrapped in.
        watch: inside its block.
        group: "merged" where each of several processes watches alone, and is clipped alone.

    Raises:
        InvalidTypeError: `model` is no module.
        InvalidValueError: outside the block, a model with other parameters, or a group that can't be.
        UnsupportedError: ranks of the watch have other heads or layers.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is an nn.Module; got {type(model).__name__}", hint="Pass the model itself.")
    _check_ranks(watch, group)
    sample = watch.last_sample()
    if sample is None:
        return None
    _check_model(model, watch.model)
    clips = _clips.setdefault(watch, Clips())
    places = [call.place for call in sample.calls]
    if not clips.plans.keys() >= set(places):
        broken = any(count > 0 for call in sample.calls for name in _BROKEN for count in call.columns.get(name, ()))
        clips.plans = _agreed(clips.plans, watch, broken)
    if clips.step != sample.step:
        clips.step = sample.step
        clips.maxima = {call.place: _maxima(call) for call in sample.calls}
    plans = dict(clips.plans)
    for call in sample.calls:
        plan = plans.setdefault(call.place, _refused(call, NOT_YET))
        if plan.heads != call.heads:
            plans[call.place] = _refused(call, OTHER_HEADS.format(call.heads, plan.heads))
    if any(plan.refused == NOT_YET for plan in plans.values()):
        watch.look_again()
    every = tuple(plans.values()) if plans == clips.plans else grouped(list(plans.values()))
    by_place = {call.place: call for call in sample.calls}
    return Measured(
        clips,
        tuple(plans),
        every,
        tuple(clips.maxima.get(place) for place in plans),
        tuple(_partial(by_place.get(place), watch.rows) for place in plans),
    )


def _agreed(known: Mapping[Place, CallPlan], watch: StepWatch, broken: bool) -> dict[Place, CallPlan]:
    """The plans with those of attentions that are new: such as every rank could make, refused where one had to.

    Of a step with `broken` numbers a refusal may be due to these: it is left out, and asked for at the next one.
    """
    sketches = watch.sketches()
    fresh: dict[Place, CallPlan] = {}
    if not sketches.keys() <= known.keys():
        made = zip(sketches, plans_from(watch.model, tuple(sketches.values())), strict=True)
        new = ((place, plan) for place, plan in made if place not in known and not (broken and plan.refused))
        fresh = {place: replace(plan, site=place[0]) for place, plan in new}
    told = watch.told({place: plan.refused for place, plan in fresh.items()})
    found = dict(known)
    for place, plan in fresh.items():
        if all(place in others for others in told):
            refused = next((others[place] for others in told if others[place] is not None), None)
            found[place] = plan if refused is None else replace(plan, rows=(), shared=(), refused=refused)
    return dict(zip(found, grouped(list(found.values())), strict=True))


def _refused(call: Any, reason: str) -> CallPlan:
    return CallPlan(call.site, call.index, call.heads, (), torch.zeros(0), refused=reason)


def _maxima(call: Any) -> Tensor:
    """(Hq,), NaN where nothing was measured."""
    return torch.tensor(call.columns.get("max_logit", [math.nan] * call.heads), dtype=torch.float64)


def _partial(call: Any, rows: int | None) -> tuple[int, ...]:
    """Heads of which there are rows without a finite maximum, or rows that were not looked at."""
    if call is None or not call.columns:
        return ()
    if rows is not None:
        return tuple(range(call.heads))
    return tuple(head for head, broken in enumerate(call.columns["nan_rows"]) if broken)


def _check_model(model: nn.Module, watched: nn.Module) -> None:
    if model is watched:
        return
    own, others = ({id(parameter) for parameter in each.parameters()} for each in (model, watched))
    if own != others:
        raise InvalidValueError(
            f"the watch is of the {type(model).__name__} that is changed; it is of another {type(watched).__name__}, "
            f"which has {len(own & others)} of its {len(own)} parameters",
            hint="Pass the model that is watched; what it is wrapped in makes no difference.",
        )


def _check_ranks(watch: StepWatch, group: Ranks) -> None:
    """Refuse maxima that are not those of all ranks with these weights, or not of these heads."""
    if group is not None and group != "merged":
        raise InvalidValueError(
            "a group merges the maxima of a trace; a watch has merged its own", hint="Pass it to sqrtdk.watch."
        )
    other = [word for word in watch.shards if word not in _SAME_WEIGHTS]
    if other:
        raise UnsupportedError(
            f"ranks that clip by a watch have all heads and layers; these share {', '.join(sorted(set(other)))}",
            hint="Make the plans before the model is parallelised, and apply them with sqrtdk.repair.clip_.",
        )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not watch.shards and group is None:
        raise InvalidValueError(
            f"each of {dist.get_world_size()} processes watches alone: weights clipped by their maxima would part",
            hint="Leave shards='alone' out, or pass group='merged' where each one trains a model of its own.",
        )
