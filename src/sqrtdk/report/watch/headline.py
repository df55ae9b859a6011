"""Makes the headline of a run.

A headline says what is wrong, since which step, why, and what to do. Numbers that are not finite come first, then the
worst alarm. If logits are large, the records say why: the scale is too large, an update was, or q and
k are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sqrtdk.messages import Message, Text, capitalised, id_of, joined, mentions, named
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.watch.compare import NOTABLE_DIFFERENCE, RunComparison
from sqrtdk.report.watch.fix import (
    LOGITS,
    OF_LARGE_LOGITS,
    OF_SCALES,
    RATIO_TOLERANCE,
    UNLIKE_LAYER,
    UPDATE,
    alarm_fix,
    first_nonfinite,
    go_back,
    root_alarms,
    scale_ratios,
    scales_too_large,
)
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import SEVERITY_ORDER, Summary, rank

_WARN = SEVERITY_ORDER.index("warn")
_JUMP = 3.0  # a loss this many times as large as the largest before it
_NONFINITE_IN = {  # id of a recorded alarm -> id of the headline's words
    "alarms.nonfinite.logits": "runs.headline.logits",
    "alarms.nonfinite.minus_logits": "runs.headline.logits",
    "alarms.nonfinite.queries": "runs.headline.queries",
    "alarms.nonfinite.gradients": "runs.headline.gradients",
}
_REASON_VALUES = ("blame", "where", "forward")  # values of such alarms that say why
_INHERITED = "alarms.nonfinite.blame.before"


@dataclass(frozen=True, slots=True)
class Headline:
    """What is said first of a run.

    Attributes:
        what: what is wrong and since when, a scale other than 1/sqrt(head_dim), or that nothing is wrong.
        sentence: the same and why.
        more: what else there is, in few words.
        fix: what to do; "" if nothing has to be done.
        wrong: whether something is wrong.
    """

    what: str
    sentence: str
    more: tuple[str, ...]
    fix: str
    wrong: bool

    @property
    def text(self) -> Text:
        """The headline as one sentence, without its fix and without a full stop."""
        return capitalised(joined([self.sentence, *self.more]))


def run_headline(run: Summary) -> Headline:
    """Return the headline of a run: numbers that are not finite, else the worst alarm, else that nothing alarmed."""
    return _not_finite(run) or _worst(run) or _quiet(run)


def _not_finite(run: Summary) -> Headline | None:
    """Return the headline of a run whose loss, logits, q or gradients are not finite, in the order of their steps."""
    alarm = first_nonfinite(run)
    bad = run.loss_steps[~np.isfinite(run.losses)].tolist()
    wrong: list[tuple[int, str]] = []  # step and sentence
    if bad:
        wrong.append((bad[0], _loss(run, bad)))
    if alarm is None:
        since = bool(bad) and bool((run.samples >= bad[0]).any())
        why: str | float | None = None if since else Message("runs.headline.not_sampled")
        fix: str = Message("runs.fix.check_batch", step=bad[0]) if bad else ""
        fix = fix if since or not bad else go_back(run, bad[0], "runs.fix.look_closer")
    else:
        values = alarm.text.values if isinstance(alarm.text, Message) else {}
        why = next((_begins(values[name]) for name in _REASON_VALUES if name in values), None)
        fix = alarm_fix(run, alarm)
        if what := _tensor(run, alarm):
            wrong.append((alarm.step, what))
        elif not bad:  # a recorded alarm of a later version, or of an older one
            wrong.append((alarm.step, alarm.text))
    if not wrong:
        return None
    what = joined([one for _, one in sorted(wrong, key=lambda one: one[0])], "clause")
    sentence = Message("joins.colon", first=what, second=why) if why else what
    roots = [one.text for one in _told_roots(run)] if alarm is not None else []
    scale = next((one for one in run.alarms if one.name in OF_SCALES), None)
    return Headline(what, joined([*roots, sentence]), () if scale is None else (scale.text,), fix, True)


def _told_roots(run: Summary) -> list[Alarm]:
    """Return the first alarm of each kind from which other alarms follow, if there are any."""
    roots = root_alarms(run)
    firsts = [next((one for one in roots if one.name == name), None) for name in (*OF_SCALES, UNLIKE_LAYER, UPDATE)]
    return sorted((one for one in firsts if one is not None), key=roots.index)


def _begins(why: str | float) -> str | float:
    """Return only where it begins, if that is known: an attention merely inherits what its inputs hold."""
    if isinstance(why, Message) and why.id == "joins.semicolon" and mentions(why.values["first"], _INHERITED):
        return why.values["second"]
    return why


def _loss(run: Summary, bad: Sequence[int]) -> str:
    """Say where the loss is not finite, at the steps `bad`."""
    first = run.losses[run.loss_steps == bad[0]][0]
    loss = "NaN" if math.isnan(first) else format_number(float(first))
    after = int((run.loss_steps >= bad[0]).sum())
    if len(bad) == after and after > 1:
        return Message("runs.headline.loss_from", loss=loss, step=bad[0])
    if len(bad) == 1:
        return Message("runs.headline.loss_at", loss=loss, step=bad[0])
    return Message("runs.headline.loss_several", loss=loss, step=bad[0], number=len(bad))


def _tensor(run: Summary, alarm: Alarm) -> str | None:
    """Say which tensor of an attention is not finite, and when it still was. Return None if it is the loss."""
    id = _NONFINITE_IN.get(id_of(alarm.text) or "")
    if id is None or not isinstance(alarm.text, Message):
        return None
    what = Message(id, call=alarm.text.values["call"], step=alarm.step)
    before = run.samples[run.samples < alarm.step]
    return Message("runs.headline.finite_before", what=what, step=int(before[-1])) if len(before) else what


def _worst(run: Summary) -> Headline | None:
    """Return the headline of the worst alarm; None if there are only notes."""
    alarms = [one for one in run.alarms if rank(one.severity) >= _WARN]
    if not alarms:
        return None
    roots = _told_roots(run)
    # what follows from a root is told after it
    lead = min(alarms, key=lambda one: (one in roots, -rank(one.severity), _order(one.name), one.step))
    family = LOGITS if lead.name in LOGITS else (lead.name,)
    what = _above(run, [one for one in alarms if one.name in family], lead)
    large = lead.name in OF_LARGE_LOGITS
    why = _why(run, roots) if large else None
    more = _forecast(run, lead) if what is not lead.text else []
    # a loss that rises is why a reader looks at the logits at all
    if large or lead.name == UPDATE:
        if (jump := _jump(run)) is not None:
            what = joined([jump, what], "clause")
        elif not len(run.losses) and not run.of_checkpoints:
            more.append(Message("runs.headline.no_loss"))
    sentence = Message("runs.headline.because", what=what, why=why) if why else what
    causes = [sentence if one is lead else one.text for one in roots]
    sentence = joined(causes if lead in roots else [*causes, sentence])
    others = dict.fromkeys(one.name for one in alarms if one.name not in family and one not in roots)
    if others:
        names = joined([named("watch.alarm", name) for name in others], "comma")
        more.append(Message("runs.headline.also", names=names))
    fixes = dict.fromkeys(alarm_fix(run, one) for one in roots or (lead,))
    return Headline(what, sentence, tuple(more), joined(list(fixes)), True)


def _order(name: str) -> int:
    return 2 if name == UPDATE else int(name in OF_LARGE_LOGITS)


def _above(run: Summary, family: Sequence[Alarm], lead: Alarm) -> str:
    """Say what the alarms of one kind say: of logits since when, how many and how large; else the worst alarm."""
    passed = [one for one in family if one.name == "max_logit" and one.bar is not None]
    largest = max(run.sites, key=lambda site: _largest(site.worst("max_logit")[0]), default=None)
    values = np.empty(0) if largest is None else largest.worst("max_logit")[0]
    if not passed or largest is None or np.isnan(values).all():  # a damaged record may have alarms without values
        return lead.text
    at = int(np.nanargmax(values))
    return Message(
        "runs.headline.above",
        bar=format_number(min(one.bar for one in passed if one.bar is not None)),
        number=len({(one.site, one.index) for one in passed}),
        attentions=_attentions(run),
        step=passed[0].step,
        value=format_number(float(values[at])),
        at=int(largest.steps[at]),
        call=largest.label,
    )


def _forecast(run: Summary, lead: Alarm) -> list[str]:
    """Say when logits that grow pass the next bar, unless they have."""
    largest = max((_largest(site.worst("max_logit")[0]) for site in run.sites), default=-math.inf)
    if lead.name != "growth" or not isinstance(lead.text, Message) or (lead.bar or 0.0) <= largest:
        return []
    return [Message("runs.headline.grows", bar=lead.text.values["bar"], when=lead.text.values["when"])]


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(values)) if not np.isnan(values).all() else -math.inf


def _attentions(run: Summary) -> str:
    return Message("watch.terminal.attentions", count=len(run.sites))


def _too_small(run: Summary) -> list[float]:
    """Return the positive scale ratios that are below 1."""
    return [ratio for ratio in scale_ratios(run) if 0 < ratio < 1 - RATIO_TOLERANCE]


def _jump(run: Summary) -> str | None:
    """Say where the loss first rises above `_JUMP` times all before it; None if it never does."""
    finite = np.isfinite(run.losses)
    steps, losses = run.loss_steps[finite], run.losses[finite]
    before = np.maximum.accumulate(losses)[:-1]
    # against the largest loss so far: an early peak that comes again is not a jump
    jumps = np.flatnonzero((before > 0) & (losses[1:] > _JUMP * before))
    if not len(jumps):
        return None
    at = int(jumps[0])
    loss, most = format_number(float(losses[at + 1])), format_number(float(before[at]))
    return Message("runs.headline.loss_rises", loss=loss, step=int(steps[at + 1]), before=most)


def _why(run: Summary, roots: Sequence[Alarm]) -> str | None:
    """Say why logits are large, or return None if the records don't tell, or `roots` are told before."""
    if (large := scales_too_large(run)) and not any(one.name in OF_SCALES for one in roots):
        return _scale("runs.headline.scale_large", large, run)
    ratios = scale_ratios(run)
    right = ratios and len(ratios) == len(run.sites) and not _too_small(run) and min(ratios) > 0
    return Message("runs.headline.scale_right") if right and not roots else None


def _scale(id: str, ratios: Sequence[float], run: Summary) -> str:
    times = sorted(ratio if ratio > 1 else 1 / ratio for ratio in ratios)
    low, high = format_number(times[0], 3), format_number(times[-1], 3)
    shown = low if low == high else Message("rules.bound.range", low=low, high=high)
    return Message(id, times=shown, number=len(ratios), attentions=_attentions(run))


def _quiet(run: Summary) -> Headline:
    """Return the headline of a run without an alarm above a note: what was measured, and what was not."""
    if run.first_step is None:
        nothing = Message("runs.headline.nothing")
        return Headline(nothing, nothing, (), "", False)
    if not run.sites:
        none = Message("runs.headline.unmeasured", steps=f"{run.recorded:,}")
        why = next((entry.reason for entry in run.missing if entry.reason), "")
        sentence = Message("joins.colon", first=none, second=why) if why else none
        return Headline(none, sentence, (), Message("runs.fix.lost"), True)
    counts = {"steps": f"{run.recorded:,}", "samples": f"{len(run.samples):,}", "attentions": _attentions(run)}
    quiet = Message("runs.headline.quiet", **counts)
    more: list[str] = []
    if run.counts["note"]:
        more.append(Message("runs.headline.notes", count=run.counts["note"]))
    if lost := run.lost_parts:
        what = Message("runs.headline.lost", number=len(lost), first=lost[0].message)
        both = joined([what, Message("runs.headline.beside", quiet=quiet)])
        return Headline(what, both, tuple(more), Message("runs.fix.copy_again"), True)
    if run.lacks:
        more.append(Message("runs.headline.partly"))
    large, small = scales_too_large(run), _too_small(run)
    if large or small:  # no alarm, as a model may be meant to be so; a reader should know it first all the same
        which = ("runs.headline.scale_large", large) if large else ("runs.headline.scale_small", small)
        scale, silent = _scale(*which, run), Message("runs.headline.no_alarm", **counts)
        return Headline(scale, scale, (silent, *more), Message("runs.fix.scale"), False)
    return Headline(quiet, quiet, tuple(more), "", False)


def compared_headline(a: Summary, b: Summary, compared: RunComparison) -> Headline:
    """Return the headline of two runs: which of them goes wrong, and what differs between them.

    If both go wrong, one with NaN is named first.

    Args:
        a: Run A.
        b: Run B.
        compared: Result of `compare_runs(a, b)`.
    """
    runs = {"A": a, "B": b}
    heads = {letter: run_headline(run) for letter, run in runs.items()}
    # a run with NaN is worse than one with an alarm, and is named first
    finite = {letter: _not_finite(run) is None for letter, run in runs.items()}
    wrong = sorted((letter for letter in runs if heads[letter].wrong), key=finite.__getitem__)  # NaN first
    if not wrong:
        sentence = Message("runs.headline.none_wrong" if a.sites and b.sites else "runs.headline.none_known")
        return Headline(sentence, sentence, (_scales_differ(compared) or _most_apart(compared),), "", False)
    differs = _scales_differ(compared)
    # an unlike scale is why logits are large, and need not be told twice
    texts = {letter: head.what if differs and finite[letter] else head.sentence for letter, head in heads.items()}
    first = wrong[0]
    second = "B" if first == "A" else "A"
    if len(wrong) == 2:
        values = {"first": first, "told": texts[first], "second": second, "more": texts[second]}
        sentence = Message("runs.headline.both_wrong", **values)
    else:
        sentence = Message("runs.headline.one_wrong", wrong=first, other=second, told=texts[first])
    return Headline(sentence, sentence, (differs,) if differs else (), heads[first].fix, True)


def _scales_differ(compared: RunComparison) -> str | None:
    """Say how the scales differ; None if they do not, or were not measured in both runs."""
    scale = next(one for one in compared.differences if one.column == "scale_ratio")
    pair = scale.farthest
    if pair is None or not scale.count:
        return None
    attentions = Message("watch.terminal.attentions", count=scale.measured)
    ratios = {"a": format_number(pair.a), "b": format_number(pair.b)}
    return Message("runs.headline.scales_differ", number=scale.count, attentions=attentions, call=pair.label, **ratios)


def _most_apart(compared: RunComparison) -> str:
    """Say which statistic differs most."""
    if not compared.measured:
        return Message("runs.headline.no_shared")
    one = compared.differences[0]
    pair = one.farthest
    if pair is None or not one.count:
        return Message("runs.headline.alike", bar=f"{NOTABLE_DIFFERENCE:.0%}")
    statistic = STATISTIC_BY_COLUMN[one.column]
    show = format_percent if statistic.unit == "%" else format_number
    values = {"a": show(pair.a), "b": show(pair.b), "call": pair.label}
    return Message("runs.headline.most_apart", statistic=statistic.name, **values)
