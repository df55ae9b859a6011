"""The plugin's part on laws: `--sqrtdk` asks the laws of every model that a test with the marker `laws` calls.

They are asked after the test, with the inputs of each model's first call, and change nothing that a later test sees.
Like `sqrtdk.testing.plugin`, this file imports no torch until a marked test runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from sqrtdk.testing.marker import Marked, by_place, place_in_file

LAWS_MARKER = "laws"
LAWS_MARKER_TEXT = (
    f"{LAWS_MARKER}(names='all', allow=(), fail_on=None): with --sqrtdk laws are asked of every model that the test "
    "calls, with its inputs; allow names sites or rules that may stand, fail_on is this test's own --sqrtdk-fail-on"
)
_LAWS_RECORD = "sqrtdk_laws"  # attribute of a test report
_LAW_STATES = ("kept", "broken", "not asked")  # copied from sqrtdk.audit.records, so that nothing is imported
_MOST_SUMMARY_LINES = 40  # lines of the summary


class Laws(Marked):
    """The hooks of a run with `--sqrtdk` that ask laws in the tests marked `laws`."""

    def __init__(self, fail_on: str, choices: tuple[str, ...]) -> None:
        super().__init__(LAWS_MARKER, fail_on, choices, ("names", "allow", "fail_on"))
        self.records: dict[str, dict[str, Any]] = {}  # node id of a test -> its record
        self._record = pytest.StashKey[dict[str, Any]]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the test, then ask the laws of the models that it called, and fail it on broken ones.

        If the test fails by itself, no law is asked.
        """
        marker = item.get_closest_marker(LAWS_MARKER)
        if marker is None:
            return (yield)
        from sqrtdk.testing.below import below_bar
        from sqrtdk.testing.laws import CalledModels, broken_lines
        from sqrtdk.testing.standing import failing

        asked = self.asked(marker)
        with CalledModels() as called:
            result = yield
        states: Counter[str] = Counter()
        lines, silent, below = [], [], []
        for cls, answers in called.reports(asked.laws):
            if isinstance(answers, str):
                silent.append(f"{cls}: {answers}")
                continue
            states.update(answer.state for answer in answers.answers)
            bad = failing(answers.findings, (), asked.fail_on, asked.allow)
            below += below_bar(answers.findings, (), bad, asked.allow, asked.own_bar)
            if bad:
                lines += [f"laws of {cls} in {item.name} (fail_on: {asked.fail_on})", *broken_lines(bad, ())]
        unasked = not called.calls or len(silent) == len(called.calls)
        item.stash[self._record] = {
            "states": {state: states[state] for state in _LAW_STATES},
            "below": below,
            "silent": (silent or ["no module was called in it"]) if unasked else [],
        }
        if lines:
            pytest.fail("\n".join(lines), pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the answers to the report of a marked test, with which they reach the main process under xdist."""
        report = yield
        record = item.stash.get(self._record, None)
        if report.when == "call" and record is not None:
            setattr(report, _LAWS_RECORD, record)
            del item.stash[self._record]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the answers from the reports; under xdist this runs in the main process."""
        record = getattr(report, _LAWS_RECORD, None)
        if record is not None:
            self.records[report.nodeid] = record | {"place": place_in_file(report)}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write a line on all marked tests, then findings that failed no test, and tests in which no law was asked."""
        if not self.records:
            return
        terminalreporter.section("sqrtdk laws", sep="-")
        records = by_place(self.records)
        terminalreporter.line(laws_summary_line(list(records.values())))
        below = [(node, entry) for node, record in records.items() for entry in record["below"]]
        if below:
            from sqrtdk.testing.below import below_lines

            terminalreporter.write("".join(f"{line}\n" for line in below_lines(below)))
        named = [(node, text) for node, record in records.items() for text in record["silent"]]
        for node, text in named[:_MOST_SUMMARY_LINES]:
            terminalreporter.line(f"no law asked: {node}: {text}")
        if len(named) > _MOST_SUMMARY_LINES:
            terminalreporter.line(f"no law asked: ... and {len(named) - _MOST_SUMMARY_LINES} more")


def laws_summary_line(records: list[dict[str, Any]]) -> str:
    """Return one line on all tests with the marker.

    Example:
        >>> laws_summary_line([{"states": {"kept": 3, "broken": 1, "not asked": 1}, "silent": []}])
        'sqrtdk laws: 1 test, 3 answers kept, 1 broken, 1 not asked'
    """
    states: Counter[str] = Counter()
    for record in records:
        states.update(record["states"])
    tests = f"{len(records)} test{'' if len(records) == 1 else 's'}"
    held, broken, not_asked = (states[state] for state in _LAW_STATES)
    return f"sqrtdk laws: {tests}, {held} answers kept, {broken} broken, {not_asked} not asked"
