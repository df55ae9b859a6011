"""Tells masks that the data picks from masks that differ by themselves.

An indexer (DeepSeek-V4, GLM) picks the keys of each row by scores of the input. If an earlier cause changes the input,
it picks other keys, and the masks differ although both models pick alike. The proof is a run of A in which the module
of the attention gets B's input: if the attention is then B's, its mask follows from the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.infer.evidence import SEARCH_NUMBERS, SearchWork
from sqrtdk.compare.inside.pair import JudgedPair, judge_pair
from sqrtdk.compare.outside.modules import Patch
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.rounding.tensors import Entering, exact_of
from sqrtdk.compare.sides import ModelSide
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.messages import Message
from sqrtdk.modules.calls import CallPlace
from sqrtdk.tracing.tensors import CallTensors

_MASK = "mask"  # the stage


def with_picked_masks(
    a: ModelSide,
    b: ModelSide,
    calls: Sequence[tuple[CallTensors, CallTensors]],
    judged: Sequence[JudgedPair],
    entering: Sequence[Entering],
    kv_scale: float | None,
) -> list[JudgedPair]:
    """Return the judgements, with those corrected whose masks differ only because the inputs do.

    A pair is tried if its inputs differ and all its causes are masks: A runs again with B's inputs of that module. If
    the attentions then agree, the pair counts as the same, and its mask names the input as the reason.

    Args:
        a: side A; it may run again in float64.
        b: side B; it may run again in float64.
        calls: the pairs of calls.
        judged: judgement of each pair.
        entering: comparison of the inputs of each pair.
        kv_scale: fixed scale of a quantised cache; None if the user gave none.
    """
    both = enumerate(zip(judged, entering, strict=True))
    doubtful = [place for place, (own, comes) in both if comes.stage.same is False and _by_mask_alone(own)]
    if not doubtful or a.again is None or b.again is None:
        return list(judged)
    again = _with_inputs_of(a, b, [calls[place] for place in doubtful])
    work, found = SearchWork(SEARCH_NUMBERS), list(judged)
    for place in doubtful:
        call = again.get((calls[place][0].site, calls[place][0].index))
        if call is not None and judge_pair(call, calls[place][1], CAUSES, None, ("", ""), kv_scale, work).same is True:
            found[place] = _following(judged[place])
    return found


def _by_mask_alone(own: JudgedPair) -> bool:
    """Return whether a pair differs, and all its causes are masks."""
    causes = [cause for _, explained in own.parts for cause in explained.causes]
    return own.same is False and bool(causes) and all(cause.stage == _MASK for cause in causes)


def _with_inputs_of(
    a: ModelSide, b: ModelSide, calls: Sequence[tuple[CallTensors, CallTensors]]
) -> dict[CallPlace, CallTensors]:
    """Return the attentions of A, by place, when their modules get the inputs that B's get.

    Only the first floating input is B's. A mask that A's module gets stays A's, since it may be the difference.
    """
    exact = exact_of(b, listen=True)
    steps = {} if exact is None else {step.place: step for step in exact.steps}
    taken: dict[CallPlace, tuple[Tensor, ...]] = {}
    for one, other in calls:
        step = steps.get((other.site, other.index))
        kept = next((kept for kept in step.takes if kept.values.is_floating_point()), None) if step else None
        if kept is not None and kept.stride == 1:
            taken[one.site, one.index] = (kept.values.view(kept.shape),)
    if not taken or a.again is None:
        return {}
    a.forwards += 1
    try:
        run = a.again(True, Patch(taken=taken, reads=True))
    except MODEL_ERRORS:
        return {}
    return {(call.site, call.index): call for call in run.calls if (call.site, call.index) in run.replaced}


def _following(judged: JudgedPair) -> JudgedPair:
    """Return the judgement without causes; its mask differs, and names the input as the reason."""

    def shown(stage: StageDiff) -> StageDiff:
        return replace(stage, reason=Message("compare.stage.picked")) if stage.stage == _MASK else stage

    stages = tuple(shown(stage) for stage in judged.stages if stage.stage != "output")
    parts = tuple((segment, replace(explained, causes=())) for segment, explained in judged.parts)
    return replace(judged, same=True, parts=parts, stages=stages, before=judged.after)
