"""Says what to do about an alarm of a run: a call, a command, or a page.

One fact has one cure: alarms of what large logits lead to have that of the logits, and all NaN that of the first.
A lower learning rate, or clipped gradients, cure NaN that training led to: where a weight is read to hold it. Neither
helps at step 1, nor where a mask, a product or the loss makes NaN of finite numbers, and where that was not read, the
batch is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sqrtdk.messages import Message, joined, mentions, named
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report.figures import format_number
from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.summary import Summary, rank

NONFINITE = "nonfinite"
UPDATE = "update"
# That these rows are NaN is inferred: code may set them to 0. So the batch is checked as well.
_FIX_BLIND = "rules.nonfinite.fix_blind"
UNLIKE_LAYER = "layer_logits"
OF_SCALES = ("scale_ledger", "declared_vs_actual")  # of a scale that is wrong from the first sample on
_MADE_UNLIKE = "alarms.layer_logits.unlike"  # from the first sample on
_BETWEEN = "alarms.update.between"  # an update of a step that was not sampled
_SUSTAINED = ("alarms.update.sustained", "alarms.update.sustained_at_rate")  # steps of several samples
_BAD_BATCH = "alarms.nonfinite.first.inputs"
RATIO_TOLERANCE = 0.01  # that of the ledger, whose module would import torch
LOGITS = ("max_logit", "growth")  # told in one sentence
# alarms that a scale which is too large, or large q and k, lead to: told after any other alarm of the same severity
OF_LARGE_LOGITS = (*LOGITS, "fp16_range", "saturation", "entropy", "entropy_trend", "collapsed")
USUAL_RELATIVE_STEP = 0.01  # Adam at a rate of 3e-4 moves weights of 0.02 by 1.5% of their size at first
USUAL_SUSTAINED_STEP = 0.001  # after the first steps, the usual rule of thumb
_FIXES: Mapping[str, str] = {  # name of an alarm -> id of what to do
    "max_logit": "runs.fix.clip",
    "growth": "runs.fix.clip",
    "entropy": "runs.fix.spread",
    "entropy_trend": "runs.fix.spread",
    "saturation": "runs.fix.spread",
    "collapsed": "runs.fix.spread",
    "equal_logits": "runs.fix.equal",
    "fp16_range": "runs.fix.fp16",
    "bf16_offset": "runs.fix.bf16",
    "ledger": "runs.fix.ledger",
    "lost": "runs.fix.lost",
    "gradient": "runs.fix.gradient",
    UNLIKE_LAYER: "runs.fix.layer_logits",
    "idle": "runs.fix.idle",
    "records": "runs.fix.records",
    "sink": "runs.fix.sink",
    "schedule": "runs.fix.schedule",
    "checkpoint": "runs.fix.checkpoint",
    "unmeasured": "runs.fix.lost",
}
_FIXES_NONFINITE: Mapping[str, str] = {  # id within the sentence of an alarm -> what to do, the first that is there
    _BAD_BATCH: "runs.fix.inputs",
    "alarms.nonfinite.first.blind": _FIX_BLIND,
    "alarms.nonfinite.blame.product_float16": "runs.fix.product_float16",
    "alarms.nonfinite.blame.product": "runs.fix.check_batch",
    "alarms.nonfinite.where.modules_and_attentions": "runs.fix.loss",
    "alarms.nonfinite.where.modules": "runs.fix.loss",
    "alarms.nonfinite.where.returned_minus": "runs.fix.returned_minus",
    "alarms.nonfinite.gradient.forward": "runs.fix.backward",
    "alarms.nonfinite.gradient.forward_and_loss": "runs.fix.backward",
}
# Numbers that training changes: by the first of these that is not finite, an update went wrong before.
_OF_TRAINING = ("alarms.nonfinite.first.weight", "alarms.nonfinite.first.weight_around")
_FIXES_BY_ID: Mapping[str, str] = {  # id of an alarm's sentence -> the same, where it is not that of the name
    "alarms.collapsed.flat": "runs.fix.flat",
    "alarms.fp16_range.would_be": "runs.fix.clip",
    "alarms.bf16_offset.not_stored": "runs.fix.bf16_unused",
}


def alarm_fix(run: Summary, alarm: Alarm) -> str:
    """Return what to do about an alarm, in a few words: a call or a command of sqrtdk, or a page of the documentation.

    Args:
        run: The run; its other alarms may tell a cause that comes first, such as a wrong scale or a large update.
        alarm: An alarm of the run.
    """
    if alarm.name == NONFINITE:
        first = first_nonfinite(run)
        return _fix_nonfinite(run, alarm if first is None or alarm.severity == "note" else first)
    update = alarm if alarm.name == UPDATE else update_before(run, alarm)
    # a clip would hide a wrong scale, which costs one line to mend
    if alarm.name in OF_LARGE_LOGITS and scales_too_large(run):
        return joined([Message("runs.fix.scale"), *([_slower(update)] if update is not None else [])])
    if alarm.name == UNLIKE_LAYER and _scale_of(run, alarm) > 1 + RATIO_TOLERANCE:
        return Message("runs.fix.scale")
    if alarm.name in OF_SCALES and not run.of_checkpoints:
        return Message("runs.fix.scale")
    became = alarm.name == UNLIKE_LAYER and not mentions(alarm.text, _MADE_UNLIKE)
    if update is not None and (became or alarm.name in (UPDATE, *OF_LARGE_LOGITS)):
        return _slower(update)
    if became:
        return Message("runs.fix.layer_became", clip=Message("runs.fix.clip"))
    # a clip would hide a layer that was made wrong
    if alarm.name in OF_LARGE_LOGITS and any(
        mentions(one.text, _MADE_UNLIKE) and (one.site, one.index) == (alarm.site, alarm.index) for one in run.alarms
    ):
        return Message(_FIXES[UNLIKE_LAYER])
    for id, fix in _FIXES_BY_ID.items():
        if mentions(alarm.text, id):
            return Message(fix)
    if alarm.name in _FIXES:
        return Message(_FIXES[alarm.name])
    # a finding of the audit, which checkpoints have as alarms
    known = isinstance(named("watch.alarm", alarm.name), Message)
    return Message("runs.fix.audit" if known else "runs.fix.page")


def first_nonfinite(run: Summary) -> Alarm | None:
    """Return the first alarm of NaN or infinite numbers that is more than a note; None if there is none."""
    return next((one for one in run.alarms if one.name == NONFINITE and one.severity != "note"), None)


def root_alarms(run: Summary) -> tuple[Alarm, ...]:
    """Return the alarms from which others follow, to be shown first, in the order of their causes; () if none is known.

    These are those of wrong scales, of layers unlike their neighbours, and of an update, which came before the first
    NaN or else the worst alarm. Otherwise it is the first NaN, of which no scale is known to be the cause. Of one step
    an update comes last, as what attentions do is measured before it.
    """
    if not run.alarms:
        return ()
    nan = first_nonfinite(run)
    others = [one for one in run.alarms if one.name not in OF_SCALES] or run.alarms
    worst = nan or min(others, key=lambda one: (-rank(one.severity), one.step))
    if nan is not None and mentions(nan.text, _BAD_BATCH):
        return (nan,)
    names = (UNLIKE_LAYER,) if nan is not None else (*OF_SCALES, UNLIKE_LAYER)
    sites = [one for one in run.alarms if one.name in names and one.step <= worst.step]
    update = worst if worst.name == UPDATE else update_before(run, worst)
    roots = sorted([*sites, *([update] if update else [])], key=lambda one: (one.step, one.name == UPDATE))
    return tuple(roots) if roots else (nan,) if nan else ()


def update_before(run: Summary, alarm: Alarm) -> Alarm | None:
    """Return the alarm of an update that was too large, if one came before another alarm; None if none did.

    Statistics of a step are measured before its update, so that an update explains alarms of later steps only, but for
    one that was before the sampled step.
    """
    updates = [one for one in run.alarms if one.name == UPDATE and one is not alarm]
    return next((one for one in updates if _began(one) < alarm.step), None)


def _began(update: Alarm) -> int:
    """Return the step from which on an update has effects: of steps that go on, the one that logits grew from."""
    if isinstance(update.text, Message) and _is_sustained(update):
        start = update.text.values.get("start")
        return start if isinstance(start, int) else update.step
    return update.step - mentions(update.text, _BETWEEN)


def _is_sustained(update: Alarm) -> bool:
    return any(mentions(update.text, id) for id in _SUSTAINED)


def rate_of(update: Alarm) -> str | float | None:
    """Return the learning rate in the text of an alarm about an update of the weights; None if it has none."""
    return update.text.values.get("rate") if isinstance(update.text, Message) else None


def _slower(update: Alarm) -> str:
    """Say to lower the learning rate: a step moves weights in proportion to it."""
    if isinstance(update.text, Message) and mentions(update.text, _BETWEEN):
        return Message("runs.fix.between", before=update.text.values["before"], step=update.step)
    clip, rate = Message("runs.fix.clip"), rate_of(update)
    times = (update.value or 1.0) / (USUAL_SUSTAINED_STEP if _is_sustained(update) else USUAL_RELATIVE_STEP)
    try:
        lower = format_number(float(rate) / times, 1) if rate is not None else None
    except ValueError:  # an untrusted record
        lower = None
    if rate is None or lower is None:
        return Message("runs.fix.slower_by", times=format_number(float(f"{times:.0e}")), clip=clip)
    return Message("runs.fix.slower", rate=rate, lower=lower, clip=clip)


def _fix_nonfinite(run: Summary, alarm: Alarm) -> str:
    """Return what to do about NaN or infinite numbers, by where they began."""
    # a note: the loss scaler of float16 met infinite gradients, which is its work
    if alarm.severity == "note":
        return Message("runs.fix.scaler")
    if update_before(run, alarm) is not None and not mentions(alarm.text, _BAD_BATCH):
        return go_back(run, alarm.step)
    for id, fix in _FIXES_NONFINITE.items():
        if mentions(alarm.text, id):
            if fix != _FIX_BLIND:
                return Message(fix, step=alarm.step)
            return joined([Message(fix), Message("runs.fix.check_batch", step=alarm.step)])
    if mentions(alarm.text, "alarms.nonfinite.where.unsampled"):
        return go_back(run, alarm.step, "runs.fix.look_closer")
    if any(mentions(alarm.text, id) for id in _OF_TRAINING):
        return go_back(run, alarm.step)
    return Message("runs.fix.check_batch", step=alarm.step)


def go_back(run: Summary, step: int, fix: str = "runs.fix.go_back") -> str:
    """Return the advice to go on from a sound checkpoint, and what to change.

    Nothing was trained before step 1; there, only the model and its batch can be at fault.

    Args:
        run: The run.
        step: Step at which the trouble began.
        fix: Id of the sentence.
    """
    if step <= 1 and fix != "runs.fix.look_closer":
        return Message("runs.fix.check_batch", step=step)
    last = _last_fine(run, step)
    from_checkpoint = Message("runs.fix.from_checkpoint", step=last)
    # a checkpoint before step 2 has one update, and before step 1 none
    return Message(fix, start=from_checkpoint if last > 2 else Message("runs.fix.from_start"))


def _last_fine(run: Summary, step: int) -> int:
    """Return the last step before `step` whose forward pass is known to be finite, or `step` itself if none is.

    A checkpoint from before that step is sound. Its own update may have made the weights NaN.
    """
    fine = [run.samples, run.loss_steps[np.isfinite(run.losses)]]
    return max((int(steps[steps < step].max()) for steps in fine if (steps < step).any()), default=step)


def scale_ratios(run: Summary) -> list[float]:
    """Return the newest known scale ratio of each attention; of several heads, the one farthest from 1.

    A scale ratio is the effective scale times sqrt(d_k), 1 for the textbook scale.
    """
    return [ratio for site in run.sites if not math.isnan(ratio := _newest_ratio(site))]


def _newest_ratio(site: Site) -> float:
    values = site.worst("scale_ratio")[0]
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else math.nan


def _scale_of(run: Summary, alarm: Alarm) -> float:
    """Return the scale ratio of the attention that an alarm is about; NaN if none is known."""
    about = (alarm.site, alarm.index or 0)
    return next((_newest_ratio(site) for site in run.sites if (site.site, site.index) == about), math.nan)


def scales_too_large(run: Summary) -> list[float]:
    """Return the scale ratios of `scale_ratios` that are above 1 by more than the tolerance of the audit."""
    return [ratio for ratio in scale_ratios(run) if ratio > 1 + RATIO_TOLERANCE]
