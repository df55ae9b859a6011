"""Finds the lines of files at which a finding is shown: code, the config's declaration, or the audited file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqrtdk.audit.records import CheckReport, Finding, JudgedCall, Source, at_site
from sqrtdk.audit.sources import each

_RULES_AT_THE_SCALE = (
    "scale_ledger",
    "declared_vs_actual",
    "unmeasured",
)  # their findings also show the scale's declaration


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a file, and a few words on what stands there."""

    source: Source
    line: int  # 1-based
    what: str


def calls_of_finding(report: CheckReport, site: str) -> tuple[JudgedCall, ...]:
    """Return the calls that a finding at a site is about: those of its module, else those of a module around it."""
    here = tuple(judged for judged in report.calls if judged.call.site == site)
    return here or tuple(judged for judged in report.calls if judged.call.site and _inside(site, judged.call.site))


def about(report: CheckReport, judged: JudgedCall) -> tuple[Finding, ...]:
    """Return the findings on a call, the same that its health counts."""
    return at_site(judged.call.site, report.findings)


def _inside(site: str, module: str) -> bool:
    return site.startswith(f"{module}.")


def spots(report: CheckReport, finding: Finding) -> tuple[Spot, ...]:
    """Return the lines that a finding is about, lines of the repository first.

    They are the finding's own lines, or else those of the call at its site, followed by the lines that declare the
    scale. If none of them is in the repository, the line that was audited is added.
    """
    calls = calls_of_finding(report, finding.site)
    by_call = [at for judged in calls for at in (judged.call.product_at, judged.call.softmax_at)]
    code = [finding.at] if each(finding.at) else by_call
    declared = [judged.declared_at for judged in calls] if finding.rule in _RULES_AT_THE_SCALE else []
    audited: tuple[list[str | None], str] = ([report.model.at], "audited here")
    groups: list[tuple[list[str | None], str]] = [(code, "written here"), (declared, "declared here")]
    found = at_lines(report, groups)
    # no line of the repository so far: add the one that was audited
    return found if found and found[0].source.base == "root" else at_lines(report, [*groups, audited])


def at_lines(report: CheckReport, groups: Iterable[tuple[Iterable[str | None], str]]) -> tuple[Spot, ...]:
    """Return texts like "a.py:3, b.py:4" as lines of known files without repetition, the repository's first."""
    known = {source.file: source for source in report.sources}
    found: dict[tuple[Source, int], Spot] = {}
    for texts, what in groups:
        for text in texts:
            for file, line in each(text):
                if file in known and line:
                    found.setdefault((known[file], line), Spot(known[file], line, what))
    return tuple(sorted(found.values(), key=lambda spot: spot.source.base != "root"))
