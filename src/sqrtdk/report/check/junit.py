"""Writes the report as JUnit XML: one test case for each attention and one for each answer of a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from sqrtdk._sites import fold_sites, site_name
from sqrtdk.audit.records import BROKEN, NOT_ASKED, UNMEASURED, CheckReport, Finding, JudgedCall, about_call
from sqrtdk.messages import Message
from sqrtdk.report.check.consequences import NOT_FINITE
from sqrtdk.report.check.places import at_lines, calls_of_finding
from sqrtdk.report.figures import format_ratio
from sqrtdk.report.plain import plain
from sqrtdk.tracing.records import NotMeasured

Element = ElementTree.Element


@dataclass(frozen=True, slots=True)
class _Case:
    """One test case: its name, its findings, and the reason if it was not judged."""

    name: str
    findings: tuple[Finding, ...]
    unjudged: str | None = None
    call: JudgedCall | None = None
    skipped: str = "not judged"


def to_junit(*reports: CheckReport, not_checked: Mapping[str, str] | None = None) -> str:
    """Draw reports as JUnit XML, a suite each, with one case for each attention and one for each answer of a law.

    A finding at `fail_on` or above is a failure of each call at its site. An attention that could not be judged is
    skipped, with the reason; with `fail_on` "unmeasured" it fails. A law that was not asked is skipped. Findings that
    belong to no call get cases of their own, so that the suite fails if and only if the exit code is 1.

    Args:
        reports: what `sqrtdk.check` returned, for one model or several.
        not_checked: names of models without a report -> why; each has a suite with one case, which is an error.

    Returns:
        An XML document that ends with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> print(to_junit(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ())).split("\\n")[1])
        <testsuites name="sqrtdk" tests="0" failures="0" errors="0" skipped="0" time="0">
    """
    suites = [*map(_suite, reports), *(_error(name, why) for name, why in (not_checked or {}).items())]
    cases = [case for suite in suites for case in suite.iter("testcase")]
    every = Element("testsuites", {"name": "sqrtdk", **_counts(cases)})
    every.extend(suites)
    ElementTree.indent(every)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(every, encoding="unicode") + "\n"


def _counts(cases: Sequence[Element]) -> dict[str, str]:
    """Return the attributes of a suite that count its cases."""
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    with_child = {name: str(sum(case.find(child) is not None for case in cases)) for name, child in kinds.items()}
    return {"tests": str(len(cases)), **with_child, "time": "0"}


def _suite(report: CheckReport) -> Element:
    """Return the suite of one model."""
    cases = [_case(report, case) for case in (*_of_calls(report), *_of_laws(report), *_of_the_rest(report))]
    suite = Element("testsuite", {"name": plain(report.model.id), **_counts(cases)})
    properties = ElementTree.SubElement(suite, "properties")
    notes = "; ".join(str(note) for note in report.environment.get("notes") or ())
    about_run = {"class": report.model.cls, "mode": report.mode, "seed": str(report.seed), "fail_on": report.fail_on}
    for name, value in (about_run | ({"notes": notes} if notes else {})).items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": plain(value)})
    suite.extend(cases)
    return suite


def _error(name: str, why: str) -> Element:
    """Return the suite of a model that was not checked."""
    case = Element("testcase", {"classname": plain(name), "name": "not checked", "time": "0"})
    ElementTree.SubElement(case, "error", {"message": plain(why)})
    suite = Element("testsuite", {"name": plain(name), **_counts([case])})
    suite.append(case)
    return suite


def _of_calls(report: CheckReport) -> Iterable[_Case]:
    # with a self- and a cross-attention at one site, the name alone would be twice in the suite
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    for judged in report.calls:
        call = judged.call
        findings = about_call(call, report.findings)
        lost = [finding.message for finding in findings if finding.rule == UNMEASURED]
        if judged.verdict == UNMEASURED and not lost:
            lost = [judged.reason or call.scale.reason or Message("rules.joined.no_reason")]
        name = site_name(call.site, call.index)
        yield _Case(f"{name} ({call.kind})" if several_kinds else name, findings, "; ".join(lost) or None, judged)


def _of_laws(report: CheckReport) -> Iterable[_Case]:
    """Yield a case for each answer of a law. A broken law `finite` carries the findings that say where NaN begins."""
    times = Counter((answer.law, answer.about) for answer in report.laws)
    for answer in report.laws:
        about = answer.about or (answer.site if times[answer.law, answer.about] > 1 else "")
        name = f"law {answer.law}" + (f" ({about})" if about else "")
        findings = tuple(filter(None, [answer.finding]))
        if answer.state == BROKEN and answer.finding is None:
            findings = tuple(finding for finding in report.findings if finding.rule == NOT_FINITE)
        yield _Case(name, findings, answer.reason if answer.state == NOT_ASKED else None, skipped=NOT_ASKED)


def _of_the_rest(report: CheckReport) -> Iterable[_Case]:
    """Yield the cases without a call: attentions that did not run, findings on the whole model, checks not made."""
    # by identity: equal findings of two layers are two
    in_cases = {id(finding) for judged in report.calls for finding in about_call(judged.call, report.findings)}
    in_cases |= {id(answer.finding) for answer in report.laws}
    by_site: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if id(finding) not in in_cases:
            by_site.setdefault(finding.site, []).append(finding)
    for site, findings in by_site.items():
        lost = [finding.message for finding in findings if finding.rule == UNMEASURED]
        yield _Case(site_name(site), tuple(findings), "; ".join(lost) or None)
    # one case a reason: a graph may have thousands of sites that no rule could look at
    by_reason: dict[str, list[NotMeasured]] = {}
    for entry in report.not_measured:
        if not report.repeated(entry):
            by_reason.setdefault(entry.reason, []).append(entry)
    for reason, entries in by_reason.items():
        sites = ", ".join(filter(None, fold_sites(entry.site for entry in entries)))
        yield _Case(f"{site_name(sites)}: not measured", (), reason)


def _case(report: CheckReport, case: _Case) -> Element:
    """Return the element `testcase` of a case, with its failing findings as the failure."""
    attributes = {"classname": plain(report.model.id), "name": plain(case.name), "time": "0"}
    calls = (case.call,) if case.call else calls_of_finding(report, case.findings[0]) if case.findings else ()
    at = (place for judged in calls for place in (judged.call.product_at, judged.call.softmax_at))
    # only a file of the repository: a CI system links it, and has no others
    if own := [spot for spot in at_lines(report, [(at, "")]) if spot.source.base == "root"]:
        attributes |= {"file": plain(own[0].source.path), "line": str(own[0].line)}
    element = Element("testcase", attributes)
    failing = [finding for finding in case.findings if report.fails(finding)]
    if failing:
        first = failing[0]
        failure = {"type": plain(first.rule), "message": plain(f"{first.severity}: {first.message}")}
        ElementTree.SubElement(element, "failure", failure).text = _text(failing)
    elif case.unjudged is not None:
        ElementTree.SubElement(element, "skipped", {"message": plain(f"{case.skipped}: {case.unjudged}")})
    others = [finding for finding in case.findings if finding not in failing]
    # a passed case has its formula too, so that a later change can be looked up
    lines = [_ledger(case.call)] if case.call else []
    if others:
        lines.append(_text(others))
    if lines:
        ElementTree.SubElement(element, "system-out").text = "\n".join(lines)
    return element


def _ledger(judged: JudgedCall) -> str:
    verdict = f"{judged.verdict}: {judged.mistake}" if judged.mistake else judged.verdict
    return plain(f"{judged.call.formula}  ratio {format_ratio(judged.call.scale.ratio)}  {verdict}")


def _text(findings: Sequence[Finding]) -> str:
    """Return the findings as text: severity, rule and site on one line, then message and fix."""
    lines = []
    for finding in findings:
        where = f" at {finding.at}" if finding.at else ""
        lines.append(plain(f"{finding.severity} {finding.rule} in {site_name(finding.site)}{where}"))
        lines.append(plain(f"  {finding.message}"))
        lines.append(plain(f"  fix: {finding.fix}"))
    return "\n".join(lines)
