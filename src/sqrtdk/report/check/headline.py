"""Makes the headline of a check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from sqrtdk.audit.mistakes import UNKNOWN_MISTAKE, told_of
from sqrtdk.audit.records import FAILING, UNMEASURED, CheckReport, JudgedCall, without_call
from sqrtdk.audit.tolerance import is_close
from sqrtdk.messages import Message, Text, capitalised, joined
from sqrtdk.report.check.consequences import NOT_FINITE, RULES_ON_SCALES, consequences
from sqrtdk.report.check.fold import FoldedFinding
from sqrtdk.report.figures import format_number

OUTCOME_TONES = {  # outcome of a report -> tone of its word
    "failed": "bad", "findings": "bad", "incomplete": "doubtful", "warnings": "doubtful",
    "scales": "", "passed": "good",
}  # fmt: skip
_DETAILS_FOLLOW = {"joins.semicolon": "first", "rules.joined.seen": "text"}  # id -> the value before the details
_MOST_FINDINGS_NAMED = 2  # findings that a headline names beside the scale


def headline(report: CheckReport) -> Text:
    """Return one sentence on what is wrong (NaN first, then the scale, then laws and masks), or that nothing is.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        The sentence in English and in Chinese, without a full stop.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> headline(CheckReport(ModelInfo("m", "M", 1), "static", (), (), (), ())).en
        'No attention was seen'
    """
    # what comes later in the sentence is read less: NaN makes all other figures void, so it comes first
    wrong = [judged for judged in report.calls if judged.verdict == "unexplained"]
    parts = _wrong(wrong, len(report.calls)) if wrong else [_right(report)]
    sentence = joined(parts + _unjudged(report))
    if nan := _not_finite(report):
        rest = (parts if wrong else []) + _unjudged(report)
        sentence = Message("headline.also", first=nan, second=joined(rest)) if rest else nan
    if others := _others(report):
        failing = any(folded.first.severity in FAILING for folded in others)
        shown = [_named(folded) for folded in others[:_MOST_FINDINGS_NAMED]]
        if len(others) > _MOST_FINDINGS_NAMED:
            shown.append(Message("headline.more", number=len(others) - _MOST_FINDINGS_NAMED))
        if not (wrong or nan) and _broken_law(report):  # a broken law must not hide behind praise for the scale
            sentence = joined([*shown, *_unjudged(report)])
        else:
            beside = "headline.also" if wrong or nan else "headline.but"
            sentence = Message(beside if failing else "headline.warned", first=sentence, second=joined(shown))
    return capitalised(sentence)


def _broken_law(report: CheckReport) -> bool:
    """Return whether a law is broken with a failing severity."""
    return any(finding.rule.startswith("law_") and finding.severity in FAILING for finding in report.findings)


def _not_finite(report: CheckReport) -> str | None:
    """Return where numbers stop being finite, why, and the consequences. Return None if all are finite."""
    caused = next((one for one in consequences(report.findings) if one.cause.first.rule == NOT_FINITE), None)
    if caused is None:
        return None
    why = _without_details(caused.cause.message)
    site = caused.cause.first.site if caused.consequences else ""
    sentence = Message("headline.not_finite", why=why)
    sentence = Message("headline.not_finite_from", site=site, why=why) if site else sentence
    return joined([sentence, *(_without_details(folded.message) for folded in caused.consequences)])


def _wrong(wrong: Sequence[JudgedCall], total: int) -> list[str]:
    """Return one phrase for each mistake, in the order of the calls."""
    groups: dict[tuple[str, bool, bool], list[JudgedCall]] = {}
    for judged in wrong:
        size = _size(judged)
        # blocks with unlike scales share no mistake, whatever one of them looks like
        mistake = UNKNOWN_MISTAKE if judged.call.unlike_blocks else judged.mistake or UNKNOWN_MISTAKE
        groups.setdefault((mistake, judged.call.unlike_blocks, size is not None and size < 1), []).append(judged)
    return [_mistake(name, calls, total) for (name, *_), calls in groups.items()]


def _mistake(name: str, calls: Sequence[JudgedCall], total: int) -> str:
    where = _which("in", len(calls), total)
    if calls[0].call.unlike_blocks:
        return Message("headline.blocks", where=where)
    happened = told_of(name, [judged.call for judged in calls]).happened
    if name == UNKNOWN_MISTAKE and any(judged.declared_by for judged in calls):
        happened = Message("headline.not_as_declared")
    size = _sizes([_size(judged) for judged in calls])
    return Message("headline.wrong", size=size, where=where, happened=happened)


def _which(phrase: str, some: int, total: int) -> str:
    """Return a phrase such as "in 3 of 12 attentions"; `phrase` is "in", "have" or "lost"."""
    # "1 of 1 attentions" would sound as if there were more
    if total == 1:
        return Message(f"headline.{phrase}.the_one")
    if some == total:
        return Message(f"headline.{phrase}.all", count=f"{total:,}")
    return Message(f"headline.{phrase}.some", number=f"{some:,}", count=f"{total:,}")


def _size(judged: JudgedCall) -> float | None:
    """Return the scale divided by the expected one. Return None if it is unknown, infinite, not positive, or right."""
    scale = judged.call.scale
    # heads with unlike scales are off by no single factor
    if scale.effective is None or not judged.expected or (scale.per_head and len(set(scale.per_head)) > 1):
        return None
    size = scale.effective / judged.expected
    return size if 0 < size < math.inf and not is_close(size, 1.0) else None


def _sizes(sizes: Sequence[float | None]) -> str:
    """Return how far off the scales are; all of them are too large, or all too small."""
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return Message("headline.size.unknown")
    large = known[0] > 1
    far = sorted(size if large else 1 / size for size in known)
    low, high = format_number(far[0], 3), format_number(far[-1], 3)
    if large:
        times = low if low == high else Message("rules.bound.range", low=low, high=high)
        return Message("headline.size.too_large", times=times)
    if low == high:
        return Message("headline.size.too_small", times=low)
    return Message("headline.size.too_small_range", low=low, high=high)


def _right(report: CheckReport) -> str:
    """Return the phrase on the scales of a report in which none is wrong."""
    total = len(report.calls)
    if not total:
        return Message("headline.no_attention")
    verdicts = Counter(judged.verdict for judged in report.calls)
    exact, declared = verdicts["exact"], verdicts["declared"]
    some = exact + declared
    if not some:
        return Message("headline.none_judged")
    who, scale = _which("have", some, total), "declared" if declared else "textbook"
    which = Message(f"headline.{scale}.the_one" if total == 1 else f"headline.{scale}.all")
    if exact and declared:
        which = Message("headline.either", exact=exact, declared=declared)
    return Message("headline.right_alone" if report.outcome == "scales" else "headline.right", who=who, which=which)


def _unjudged(report: CheckReport) -> list[str]:
    """Return phrases on attentions that could not be judged, and on attentions that did not run."""
    total = len(report.calls)
    lost = sum(judged.verdict == UNMEASURED for judged in report.calls)
    # findings at sites without a call are about attentions that did not run
    more = sum(finding.site not in {judged.call.site for judged in report.calls} for finding in report.unjudged)
    parts: list[str] = []
    if lost:
        parts.append(_which("lost", lost, total))
    if more:
        parts.append(Message("headline.not_run", count=f"{more:,}"))
    return parts


def _others(report: CheckReport) -> list[FoldedFinding]:
    """Return the causes other than wrong scales and unjudged attentions: failing ones, else warnings."""
    causes = [one.cause for one in consequences(report.findings)]
    unexplained = {judged.call.site for judged in report.calls if judged.verdict == "unexplained"}
    others = [
        folded
        for folded in causes
        if folded.first.rule not in (UNMEASURED, NOT_FINITE)
        and not (folded.first.rule in RULES_ON_SCALES and folded.first.site in unexplained)
    ]
    failing = [folded for folded in others if folded.first.severity in FAILING]
    if failing or unexplained:
        return failing
    return [folded for folded in others if folded.first.severity == "warn"]


def _named(folded: FoldedFinding) -> str:
    """Return a finding's message without its details, with the site."""
    short = _without_details(folded.message)
    return Message("joins.brackets", first=short, second=folded.site) if folded.site else short


def _without_details(message: str) -> str:
    """Return a message without the sentences that were joined to it. A plain `str` is one sentence, whatever it says.

    Example:
        >>> _without_details(joined([Message("joins.same"), "in head 3"])), _without_details("one; two")
        ('the same', 'one; two')
    """
    if not isinstance(message, Message):
        return message
    if message.id in _DETAILS_FOLLOW:
        before = message.values[_DETAILS_FOLLOW[message.id]]
        return _without_details(before) if isinstance(before, str) else message
    # "... (call 2 of 3 here)" stays behind a message that has no details
    text = without_call(message)
    short = message if text is message else _without_details(text)
    return message if short == text else short
