"""A saved check: what is wrong in words, the findings with what they lead to, the ledger, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from sqrtdk._sites import ROOT, fold
from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.app.pieces import Cell, command, headline, lead, left, recorded, shown, table
from sqrtdk.app.rebuilt import check_report
from sqrtdk.audit.records import FAILING, HEALTH, SEVERITIES, UNMEASURED, VERDICTS, CheckReport
from sqrtdk.report import headline as told
from sqrtdk.report import laws
from sqrtdk.report.figures import number, percent, ratio, worst_head
from sqrtdk.report.fold import Fold, FoldedFinding, expected, fold_calls, values
from sqrtdk.report.places import at_text
from sqrtdk.report.terminal_words import bracketed, counted, word
from sqrtdk.tracing.records import NotMeasured

_MOST_FINDINGS = 2000  # the worst of them are set in order, which takes a time that grows with their square
_TONES = {"critical": "bad", "fail": "bad", "warn": "doubtful"}
_COLUMNS = ("site", "ratio", "verdict", "health", "max_logit", "entropy", "peak", "saturated", "formula")


def check_html(document: Mapping[str, Any], words: Words) -> Markup:
    """Draw the document of `sqrtdk check --output`."""
    report = check_report(document)
    beyond = max(0, len(report.findings) - _MOST_FINDINGS)
    report = replace(report, findings=report.findings[:_MOST_FINDINGS])
    severities = Counter(fields.of(one.severity, SEVERITIES) for one in report.findings)
    verdicts = Counter(fields.of(one.verdict, VERDICTS) for one in report.calls)
    result, tone = _result(severities, verdicts, report)
    counts = word("comma", words.language).join(
        words("check.verdict", count=count, verdict=words.get("verdict", name)) for name, count in verdicts.items()
    )
    wrong = words.of(told.headline(report)) + word("stop", words.language).rstrip()
    calls, findings = fold_calls(report.calls), told.consequences(report.findings)
    parts = [
        headline(words(f"result.{result}"), tone, f"{report.model.id} ({report.model.cls})"),
        Markup('<p class="wrong">{}</p>').format(shown(wrong)),
        lead(
            words(
                "check.counts", calls=len(report.calls), verdicts=counts or "-", findings=len(report.findings) + beyond
            )
        ),
        command(document, words),
        _findings(findings[: fields.MOST_ROWS], words) if findings else lead(words("check.no_findings")),
        left(len(findings) + beyond, words),
        table(words("check.sites"), _head(words, _COLUMNS), [_call(one, words) for one in calls[: fields.MOST_ROWS]]),
        left(len(calls), words),
    ]
    if report.laws:
        rows = [_law(row, words) for row in laws.rows_of(report.laws)]
        head = [words.of(laws.WORDS[name]) for name in ("law", "answer", "what")]
        parts += [table(words.of(laws.WORDS["laws"]), head, rows[: fields.MOST_ROWS]), left(len(rows), words)]
    if report.not_measured:
        entries = fold(report.not_measured, lambda one: one.site, lambda one: one.reason)
        rows = [_unmeasured(site, group, words) for site, group in entries[: fields.MOST_ROWS]]
        parts += [table(words("check.unmeasured"), _head(words, ("site", "reason")), rows), left(len(entries), words)]
    return Markup("").join(parts)


def _result(severities: Counter[str], verdicts: Counter[str], report: CheckReport) -> tuple[str, str]:
    """The word for the whole and its tone; what could not be judged is never fine."""
    if any(severities[name] for name in FAILING):
        return "failed", "bad"
    if not verdicts or verdicts[UNMEASURED] or report.not_measured:
        return "incomplete", "doubtful"
    if severities["warn"]:
        return "warnings", "doubtful"
    return ("passed", "good") if any(one.call.stats for one in report.calls) else ("scales", "doubtful")


def _head(words: Words, names: tuple[str, ...]) -> list[Cell]:
    return [words(f"column.{name}") for name in names]


def _call(folded: Fold, words: Words) -> tuple[Cell, ...]:
    """Calls that are one but for a number in their site; figures of the worst head among them."""
    judged, worst = folded.first, worst_head(folded.calls)
    verdict = words.get("verdict", judged.verdict)
    if judged.mistake is not None:
        verdict += word("colon", words.language) + words.get("mistake", judged.mistake)
    return (
        folded.site + _many(len(folded.calls), words),
        ratio(judged.call.scale.ratio),
        verdict,
        words.get("health", fields.of(judged.health, HEALTH)),
        number(worst.max_logit),
        percent(worst.entropy_fraction),
        number(worst.peak),
        percent(worst.saturated),
        Markup("<code>{}</code>").format(shown(judged.call.formula)),
    )


def _many(sites: int, words: Words) -> str:
    many = counted("site_count", "site_counts", sites, words.language)
    return bracketed(many, words.language) if sites > 1 else ""


def _findings(caused: Sequence[told.Caused], words: Words) -> Markup:
    """Each finding, and below it those that it leads to: of these it is the cause that is to be mended."""
    items = []
    for one in caused:
        under = Markup("").join(Markup("<li>{}</li>").format(_finding(each, words)) for each in one.consequences)
        if under:
            under = Markup("<div>{}</div><ul>{}</ul>").format(word("leads to", words.language), under)
        fix = Markup(word("fix", words.language, fix="{}")).format(recorded(one.cause.first.fix, words))
        mend = Markup("<div>{}</div>").format(fix)
        items.append(Markup("<li>{}{}{}</li>").format(_finding(one.cause, words), mend, under))
    title = Markup("<h4>{}</h4>").format(words("check.findings"))
    return Markup('<div class="findings">{}<ul>{}</ul></div>').format(title, Markup("").join(items))


def _finding(folded: FoldedFinding, words: Words) -> Markup:
    """What is wrong, where, and by how much."""
    first, language = folded.first, words.language
    figures = []
    if first.value is not None:
        figures.append(word("found", language, value=words.of(values(folded))))
    if first.threshold is not None:
        bar = words.of(expected(folded))
        figures.append(word("expected" if bar.isascii() else "expected bound", language, value=bar))
    where = Markup("<b>{}</b>{}").format(shown(folded.site or ROOT), _many(len(folded.findings), words))
    said = [
        where,
        *(shown(one) for one in (at_text(first.at or "", language), word("comma", language).join(figures)) if one),
    ]
    tag = Markup('<b class="tag {}">{}</b>').format(_TONES.get(first.severity, ""), words.get("health", first.severity))
    message = Markup("<span>{}</span>").format(recorded(first.message, words))
    return Markup('<div>{} {}</div><div class="where">{}</div>').format(tag, message, Markup(" · ").join(said))


def _law(row: laws.Row, words: Words) -> tuple[Cell, ...]:
    names = word("list comma", words.language).join(words.of(laws.named_law(law)) for law in row.laws)
    return names, words.of(laws.answer_of(row)), words.of(laws.what_of(row))


def _unmeasured(site: str, group: Sequence[NotMeasured], words: Words) -> tuple[Cell, ...]:
    return (site or ROOT) + _many(len(group), words), recorded(group[0].reason, words)
