"""QK-clip by the maxima that a watch measured in the step that has just ended; nothing is traced for it."""

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

StatisticsKey = tuple[str, int]
NOT_YET = "which rows are a head's is found out at the next sampled step"
OTHER_HEADS = "the watch has the maxima of {} heads for the {} that this process has"
_NONFINITE_COUNTS = ("nan_rows", "query_nonfinite", "key_nonfinite")
_SAME_WEIGHTS = ("rows", "keys", "same")  # splits of the work in which every rank has all heads


@runtime_checkable
class StepWatch(Protocol):
    """The part of `monitor.watch.Watch` that a clip needs.

    Attributes:
        model: the watched model.
        rows: the most rows of a sequence that are measured; None: all.
        shards: how the ranks whose statistics are joined split the work; empty for a single process.
    """

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def rows(self) -> int | None: ...  # noqa: D102

    @property
    def shards(self) -> tuple[str, ...]: ...  # noqa: D102

    def last_sample(self) -> Any:
        """The `StepSample` of the last step; None if the step was not sampled."""

    def sketches(self) -> Mapping[StatisticsKey, CallTensors]:
        """The shapes and projections of q and k, for the attentions that were examined in the last sampled step."""

    def look_again(self) -> None:
        """Ask the next sampled step to examine all attentions anew."""

    def gather(self, own: Any) -> Sequence[Any]:
        """Return the values of all ranks, in the order of the ranks."""


@dataclass(slots=True)
class Clips:
    """The state of a watched run between clips.

    Attributes:
        plans: by site and index; the same on every rank.
        step: the step of `maxima`.
        maxima: (Hq,) of each attention, as left by the last clip.
    """

    plans: dict[StatisticsKey, CallPlan] = field(default_factory=dict)
    step: int = 0
    maxima: dict[StatisticsKey, Tensor] = field(default_factory=dict)

    def left(self, places: Sequence[StatisticsKey], predicted: Sequence[Tensor]) -> None:
        """Store the largest logits that a clip leaves, from which a second clip after the same step starts.

        Args:
            places: The attentions.
            predicted: For each, the largest logit of each head after the clip, (Hq,).
        """
        self.maxima = dict(zip(places, predicted, strict=True))


_clips: WeakKeyDictionary[Any, Clips] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class StepMaxima:
    """The measurements for a clip after a step.

    Attributes:
        clips: state of the run.
        places: of the attentions.
        plans: of each.
        maxima: (Hq,) of each; None if it did not run.
        partial: for each, the numbers of the heads with unmeasured rows.
    """

    clips: Clips
    places: tuple[StatisticsKey, ...]
    plans: tuple[CallPlan, ...]
    maxima: tuple[Tensor | None, ...]
    partial: tuple[tuple[int, ...], ...]


def step_maxima(model: nn.Module, watch: StepWatch, group: Ranks = None) -> StepMaxima | None:
    """Return the maxima of the last step, with plans; None if it was not sampled.

    Args:
        model: the model to clip: the watched one, in any wrapper.
        watch: inside its block.
        group: "merged" if each of several processes watches alone, and is clipped alone.

    Raises:
        InvalidTypeError: `model` is not a module.
        InvalidValueError: The watch is outside its block, the model has other parameters, or the group is not allowed.
        UnsupportedError: Ranks of the watch have other heads or layers.
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
        broken = any(
            count > 0 for call in sample.calls for name in _NONFINITE_COUNTS for count in call.columns.get(name, ())
        )
        # This gathers from all ranks, so every rank must come here in the same step; the samples of all ranks list the
        # same calls.
        clips.plans = _agreed(clips.plans, watch, broken)
    # A second clip after the same step starts from what the first one left, see `Clips.left`.
    if clips.step != sample.step:
        clips.step = sample.step
        clips.maxima = {call.place: _maxima(call) for call in sample.calls}
    plans = dict(clips.plans)
    for call in sample.calls:
        plan = plans.setdefault(call.place, _refused(call, NOT_YET))
        # A tensor-parallel watch has the maxima of all heads, but this process the weights of some.
        if plan.heads != call.heads:
            plans[call.place] = _refused(call, OTHER_HEADS.format(call.heads, plan.heads))
    if any(plan.refused == NOT_YET for plan in plans.values()):
        watch.look_again()
    every = tuple(plans.values()) if plans == clips.plans else grouped(list(plans.values()))
    by_place = {call.place: call for call in sample.calls}
    return StepMaxima(
        clips,
        tuple(plans),
        every,
        tuple(clips.maxima.get(place) for place in plans),
        tuple(_partial(by_place.get(place), watch.rows) for place in plans),
    )


def _agreed(known: Mapping[StatisticsKey, CallPlan], watch: StepWatch, broken: bool) -> dict[StatisticsKey, CallPlan]:
    """Add plans of new attentions: those that every rank could make, refused if any rank had to refuse.

    In a step with `broken` numbers, these may be the cause of a refusal: it is left out, and asked for at the next
    step.
    """
    sketches = watch.sketches()
    fresh: dict[StatisticsKey, CallPlan] = {}
    if not sketches.keys() <= known.keys():
        made = zip(sketches, plans_from(watch.model, tuple(sketches.values())), strict=True)
        new = ((place, plan) for place, plan in made if place not in known and not (broken and plan.refused))
        fresh = {place: replace(plan, site=place[0]) for place, plan in new}
    of_ranks = watch.gather({place: plan.refused for place, plan in fresh.items()})
    found = dict(known)
    for place, plan in fresh.items():
        # A rank that could not make the plan yet has not answered; scaling on some ranks alone would make weights part.
        if all(place in others for others in of_ranks):
            refused = next((others[place] for others in of_ranks if others[place] is not None), None)
            found[place] = plan if refused is None else replace(plan, rows=(), shared=(), refused=refused)
    return dict(zip(found, grouped(list(found.values())), strict=True))


def _refused(call: Any, reason: str) -> CallPlan:
    return CallPlan(call.site, call.index, call.heads, (), torch.zeros(0), refused=reason)


def _maxima(call: Any) -> Tensor:
    """Return the maxima, (Hq,); NaN if nothing was measured."""
    return torch.tensor(call.columns.get("max_logit", [math.nan] * call.heads), dtype=torch.float64)


def _partial(call: Any, rows: int | None) -> tuple[int, ...]:
    """Return the heads with rows that have no finite maximum, or were not measured."""
    if call is None or not call.columns:
        return ()
    # A watch of some rows may have missed the largest logit of any head.
    if rows is not None:
        return tuple(range(call.heads))
    return tuple(head for head, broken in enumerate(call.columns["nan_rows"]) if broken)


def _check_model(model: nn.Module, watched: nn.Module) -> None:
    if model is watched:
        return
    # The watch holds the module inside a wrapper: another object with the same parameters is the same model.
    own, others = ({id(parameter) for parameter in each.parameters()} for each in (model, watched))
    if own != others:
        raise InvalidValueError(
            f"the watch is of the {type(model).__name__} that is changed; it is of another {type(watched).__name__}, "
            f"which has {len(own & others)} of its {len(own)} parameters",
            hint="Pass the model that is watched; what it is wrapped in makes no difference.",
        )


def _check_ranks(watch: StepWatch, group: Ranks) -> None:
    """Refuse maxima that do not cover all ranks with these weights, or other heads."""
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
