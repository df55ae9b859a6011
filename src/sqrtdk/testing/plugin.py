"""The pytest plugin: `--sqrtdk` audits every attention that runs inside a test with the marker `attention`.

`sqrtdk.testing.plugin_laws` handles the marker `laws`. Pytest imports this file in every run, so it imports neither
torch nor anything that needs it, and without the option it only declares the markers. Records travel inside the test
reports, which pytest-xdist sends from its workers to the main process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from sqrtdk.testing.marker import Asked, Marked, by_place, place_in_file
from sqrtdk.testing.plugin_laws import LAWS_MARKER_TEXT, Laws

if TYPE_CHECKING:
    from sqrtdk.audit.records import Finding
    from sqrtdk.testing.observe import AuditedTest

ATTENTION_MARKER = "attention"
# copied from sqrtdk.audit.records, so that nothing is imported; severities are worst first
WORST_FIRST = ("critical", "fail", "warn", "note")
FAIL_ON_CHOICES = ("note", "warn", "unmeasured", "fail", "critical", "never")
_ATTENTION_MARKER_TEXT = (
    f"{ATTENTION_MARKER}(allow=(), fail_on=None): with --sqrtdk the attentions that run inside the test are audited; "
    "allow names sites, mistakes or rules that may stand, fail_on is this test's own --sqrtdk-fail-on"
)
_AUDIT_RECORD = "sqrtdk"  # attribute of a test report
_MOST_SUMMARY_LINES = 40  # lines for each title in the summary


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the plugin's command-line options; pytest calls this."""
    group = parser.getgroup("sqrtdk", "audit of attention")
    group.addoption(
        "--sqrtdk",
        action="store_true",
        help=f"Audit every attention that runs inside tests marked {ATTENTION_MARKER}, "
        "and ask laws in those marked laws.",
    )
    group.addoption(
        "--sqrtdk-fail-on",
        choices=FAIL_ON_CHOICES,
        default="fail",
        help="Least severity of a finding that fails such a test (default: fail); unmeasured: fail, and every "
        "attention that could not be judged.",
    )
    group.addoption(
        "--sqrtdk-weak",
        action="store_true",
        help="Name each test that could not have failed, and say why.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the plugin's markers, and register its hooks if `--sqrtdk` is given; pytest calls this."""
    config.addinivalue_line("markers", _ATTENTION_MARKER_TEXT)
    config.addinivalue_line("markers", LAWS_MARKER_TEXT)
    if config.getoption("--sqrtdk"):
        fail_on = config.getoption("--sqrtdk-fail-on")
        config.pluginmanager.register(Audit(fail_on), "sqrtdk-audit")
        # registered last, so its hooks wrap the audit's and the audit does not see the runs of laws
        config.pluginmanager.register(Laws(fail_on, FAIL_ON_CHOICES), "sqrtdk-laws")


class Audit(Marked):
    """The hooks of a run with `--sqrtdk` that audit the tests marked `attention`."""

    def __init__(self, fail_on: str) -> None:
        super().__init__(ATTENTION_MARKER, fail_on, FAIL_ON_CHOICES, ("allow", "fail_on"))
        self.records: dict[str, dict[str, Any]] = {}  # node id of a test -> its record
        self._audits = pytest.StashKey[tuple[dict[str, Any], str]]()  # record of a test, and the text of its failure

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run a marked test under observation, and fail it if the audit has findings."""
        marker = item.get_closest_marker(ATTENTION_MARKER)
        if marker is None:
            return (yield)
        from sqrtdk.testing.observe import Observation
        from sqrtdk.testing.standing import OUTSIDE, failing, findings_lines

        asked = self.asked(marker)
        observation = Observation()
        try:
            with observation:
                result = yield
        finally:
            audit = observation.audit()  # also of a test that raised, so that its report shows both
            bad = failing(audit.findings, audit.calls, asked.fail_on, asked.allow)
            lines = findings_lines(bad, audit.calls, OUTSIDE)
            text = "\n".join([f"attention in {item.name} (fail_on: {asked.fail_on})", *lines])
            item.stash[self._audits] = _record(audit, bad, asked), text if bad else ""
        if bad:
            pytest.fail(text, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the findings of a marked test to its report, with which they reach the main process under xdist."""
        report = yield
        if item.get_closest_marker(ATTENTION_MARKER) is None:
            return report
        audited = item.stash.get(self._audits, None)
        if report.when == "call" and audited is not None:
            record, text = audited
            if not report.passed:
                record["weak"] = []  # it can fail
            # skipped before any attention ran; an xfail is reported as skipped too, but ran
            unrun = report.skipped and not record["attentions"] and not hasattr(report, "wasxfail")
            setattr(report, _AUDIT_RECORD, {"ran": False} if unrun else record)
            # the test failed by itself: show the audit's findings below its own failure
            if text and report.failed and text not in report.longreprtext:
                report.sections.append(("sqrtdk", text))
            del item.stash[self._audits]
        # failed or skipped in its set-up, so nothing ran that could be audited
        elif (report.when == "setup" and not report.passed) or report.when == "call":
            setattr(report, _AUDIT_RECORD, {"ran": False})
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the findings from the reports; under xdist this runs in the main process."""
        record = getattr(report, _AUDIT_RECORD, None)
        if record is not None:
            # by node id, so a test that is rerun counts once
            self.records[report.nodeid] = record | {"place": place_in_file(report)}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write a line on all marked tests, then findings that failed no test, what was not judged, and weak tests.

        A weak test could not fail whatever the scale, for example because its inputs are zeros.
        """
        terminalreporter.section("sqrtdk", sep="-")
        records = by_place(self.records)
        terminalreporter.line(audit_summary_line(list(records.values())))
        below = [(node, entry) for node, record in records.items() for entry in record.get("below", ())]
        if below:
            from sqrtdk.testing.below import below_lines

            terminalreporter.write("".join(f"{line}\n" for line in below_lines(below)))
        weak = sum(bool(record.get("weak")) for record in records.values())
        names_weak = terminalreporter.config.getoption("--sqrtdk-weak")
        if weak and not names_weak:
            terminalreporter.line(f"could not have failed: {_counted(weak, 'test')}; --sqrtdk-weak says which, and why")
        shown = (("not judged", "unjudged"), *([("could not have failed", "weak")] if names_weak else []))
        for title, key in shown:
            named = [(node, text) for node, record in records.items() for text in record.get(key, ())]
            for node, text in named[:_MOST_SUMMARY_LINES]:
                terminalreporter.line(f"{title}: {node}: {text}")
            if len(named) > _MOST_SUMMARY_LINES:
                terminalreporter.line(f"{title}: ... and {len(named) - _MOST_SUMMARY_LINES} more")


def _record(audit: AuditedTest, bad: Sequence[Finding], asked: Asked) -> dict[str, Any]:
    """Return the record of a test in plain types that xdist can send."""
    from sqrtdk.audit.records import UNMEASURED
    from sqrtdk.testing.below import below_bar, failed_by
    from sqrtdk.testing.standing import OUTSIDE, is_allowed, printable

    lost, option = [], f" (fails with {failed_by(UNMEASURED, asked.own_bar)})"
    for found in audit.findings:
        if found.rule == UNMEASURED:
            stands = found in bad or is_allowed(found, audit.calls, asked.allow)
            lost.append(printable(f"{found.site or OUTSIDE}: {found.message}") + ("" if stands else option))
    return {
        "ran": True,
        "attentions": len(audit.calls),
        "findings": dict(Counter(found.severity for found in audit.findings if found.rule != UNMEASURED)),
        "below": below_bar(audit.findings, audit.calls, bad, asked.allow, asked.own_bar),
        "unjudged": lost,
        "weak": list(audit.weak),
    }


def audit_summary_line(records: list[dict[str, Any]]) -> str:
    """Return one line on all tests with the marker.

    Example:
        >>> seen = {"ran": True, "attentions": 3, "findings": {"fail": 1}, "unjudged": [], "weak": ["one key only"]}
        >>> audit_summary_line([seen])
        'sqrtdk: 1 test, 3 attentions, 1 finding (1 fail), 0 not judged, 1 test that could not have failed'
        >>> audit_summary_line([])
        'sqrtdk: no test with the marker attention ran'
    """
    if not records:
        return f"sqrtdk: no test with the marker {ATTENTION_MARKER} ran"
    ran = [record for record in records if record["ran"]]
    findings: Counter[str] = Counter()
    for record in ran:
        findings.update(record["findings"])
    kinds = ", ".join(f"{findings[name]} {name}" for name in WORST_FIRST if findings[name])
    parts = [
        _counted(len(records), "test"),
        _counted(sum(record["attentions"] for record in ran), "attention"),
        _counted(findings.total(), "finding") + (f" ({kinds})" if kinds else ""),
        f"{sum(len(record['unjudged']) for record in ran)} not judged",
        f"{_counted(sum(bool(record['weak']) for record in ran), 'test')} that could not have failed",
    ]
    idle = len(records) - len(ran)
    return f"sqrtdk: {', '.join([*parts, *([f'{idle} did not run'] if idle else [])])}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
