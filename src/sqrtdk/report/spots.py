"""Where in the files a finding is shown: the code, the config's line, or what was audited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqrtdk.audit.records import CheckReport, Finding, JudgedCall, Source, at_site
from sqrtdk.audit.sources import each

_OF_SCALE = ("scale_ledger", "declared_vs_actual", "unmeasured")  # what a declaration has to do with


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a file, and what stands there in a few words."""

    source: Source
    line: int  # 1-based
    what: str


def calls_at(report: CheckReport, site: str) -> tuple[JudgedCall, ...]:
    """The calls that a finding at a site is about: those of the module there, else those of the one around it."""
    here = tuple(judged for judged in report.calls if judged.call.site == site)
    return here or tuple(judged for judged in report.calls if judged.call.site and _inside(site, judged.call.site))


def about(report: CheckReport, judged: JudgedCall) -> tuple[Finding, ...]:
    """The findings on a call, as its health counts them."""
    return at_site(judged.call.site, report.findings)


def _inside(site: str, module: str) -> bool:
    return site.startswith(f"{module}.")


def spots(report: CheckReport, finding: Finding) -> tuple[Spot, ...]:
    """The lines that a finding is about, the one to show it at first: of the repository's own where there is one.

    They are those of the finding, else of the call that was made at its site, then those of the config that declares
    the scale; where none of these is in the repository, also that of what was audited.
    """
    calls = calls_at(report, finding.site)
    by_call = [at for judged in calls for at in (judged.call.product_at, judged.call.softmax_at)]
    code = [finding.at] if each(finding.at) else by_call
    declared = [judged.declared_at for judged in calls] if finding.rule in _OF_SCALE else []
    audited: tuple[list[str | None], str] = ([report.model.at], "audited here")
    groups: list[tuple[list[str | None], str]] = [(code, "written here"), (declared, "declared here")]
    found = at_lines(report, groups)
    return found if found and found[0].source.base == "root" else at_lines(report, [*groups, audited])


def at_lines(report: CheckReport, groups: Iterable[tuple[Iterable[str | None], str]]) -> tuple[Spot, ...]:
    """Texts like "a.py:3, b.py:4" as lines of files that are known, each once; those of the repository first."""
    known = {source.file: source for source in report.sources}
    found: dict[tuple[Source, int], Spot] = {}
    for texts, what in groups:
        for text in texts:
            for file, line in each(text):
                if file in known and line:
                    found.setdefault((known[file], line), Spot(known[file], line, what))
    return tuple(sorted(found.values(), key=lambda spot: spot.source.base != "root"))
