"""A saved check: what it found, the ledger, the findings, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from sqrtdk._sites import ROOT
from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.app.pieces import Cell, command, headline, lead, left, recorded, table
from sqrtdk.audit.records import FAILING, HEALTH, SEVERITIES, UNMEASURED, VERDICTS
from sqrtdk.report.figures import number, percent, ratio
from sqrtdk.report.places import at_text
from sqrtdk.report.terminal_words import word


def check_html(document: Mapping[str, Any], words: Words) -> Markup:
    """Draw the document of `sqrtdk check --output`."""
    calls = [fields.mapping(one) for one in fields.listed(document["calls"])]
    findings = [fields.mapping(one) for one in fields.listed(document["findings"])]
    unmeasured = [fields.mapping(one) for one in fields.listed(document["not_measured"])]
    model = fields.mapping(document["model"])
    severities = Counter(fields.of(one["severity"], SEVERITIES) for one in findings)
    verdicts = Counter(fields.of(one["verdict"], VERDICTS) for one in calls)
    figures = any(one["stats"] is not None for one in calls)
    result, tone = _result(severities, verdicts, len(unmeasured), figures)
    counted = word("comma", words.language).join(
        words("check.verdict", count=count, verdict=words.get("verdict", name)) for name, count in verdicts.items()
    )
    parts = [
        headline(words(f"result.{result}"), tone, f"{fields.text(model['id'])} ({fields.text(model['class'])})"),
        lead(words("check.counts", calls=len(calls), verdicts=counted or "-", findings=len(findings))),
        command(document, words),
        table(words("check.sites"), _head(words, _COLUMNS), [_call(one, words) for one in calls[: fields.MOST_ROWS]]),
        left(len(calls), words),
        table(words("check.findings"), _head(words, _FOUND), [_finding(one, words) for one in _sorted(findings)])
        if findings
        else lead(words("check.no_findings")),
        left(len(findings), words),
    ]
    if unmeasured:
        rows = [_unmeasured(one, words) for one in unmeasured[: fields.MOST_ROWS]]
        parts.append(table(words("check.unmeasured"), _head(words, ("site", "reason")), rows))
    return Markup("").join(parts)


_COLUMNS = ("site", "formula", "ratio", "verdict", "health", "max_logit", "entropy", "peak", "saturated")
_FOUND = ("severity", "site", "message", "fix", "at")


def _result(severities: Counter[str], verdicts: Counter[str], unmeasured: int, figures: bool) -> tuple[str, str]:
    """The word for the whole and its tone; what could not be judged is never fine."""
    if any(severities[name] for name in FAILING):
        return "failed", "bad"
    if not verdicts or verdicts[UNMEASURED] or unmeasured:
        return "incomplete", "doubtful"
    if severities["warn"]:
        return "warnings", "doubtful"
    return ("passed", "good") if figures else ("scales", "doubtful")


def _head(words: Words, names: tuple[str, ...]) -> list[Cell]:
    return [words(f"column.{name}") for name in names]


def _call(call: Mapping[str, Any], words: Words) -> tuple[Cell, ...]:
    scale, stats = fields.mapping(call["scale"]), call["stats"]
    verdict = words.get("verdict", fields.text(call["verdict"]))
    if call["mistake"] is not None:
        verdict += word("colon", words.language) + words.get("mistake", fields.text(call["mistake"]))
    figures: tuple[Cell, ...] = ("-",) * 4
    if stats is not None:
        of_heads = fields.mapping(stats)
        figures = (
            number(fields.extreme(of_heads["max_logit"], True)),
            percent(fields.extreme(of_heads["entropy_fraction"], False)),
            number(fields.extreme(of_heads["peak"], True)),
            percent(fields.extreme(of_heads["saturated"], True)),
        )
    return (
        fields.text(call["site"]) or ROOT,
        fields.text(call["formula"]),
        ratio(fields.maybe(scale["ratio"])),
        verdict,
        words.get("health", fields.of(call["health"], HEALTH)) if call["health"] is not None else "-",
        *figures,
    )


def _sorted(findings: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The worst first."""
    return sorted(findings, key=lambda one: -SEVERITIES.index(one["severity"]))[: fields.MOST_ROWS]


def _finding(finding: Mapping[str, Any], words: Words) -> tuple[Cell, ...]:
    texts = (recorded(fields.maybe_text(finding[name]), words) for name in ("message", "fix"))
    site, at = fields.maybe_text(finding["site"]), fields.maybe_text(finding["at"])
    return (words.get("health", finding["severity"]), site or ROOT, *texts, at_text(at, words.language))


def _unmeasured(entry: Mapping[str, Any], words: Words) -> tuple[Cell, ...]:
    return fields.text(entry["site"]) or ROOT, recorded(fields.maybe_text(entry["reason"]), words)
