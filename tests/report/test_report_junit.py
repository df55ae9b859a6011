import dataclasses
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from sqrtdk.audit.records import FAIL_ON, CheckReport, Finding, SourceFile
from sqrtdk.report.check.junit import to_junit
from tests.report.sample_report import healthy, hostile, lawless, leaking, sick, static, unjudged

REPORTS = (healthy, static, sick, hostile, lawless, leaking, unjudged)


def suite(report: CheckReport) -> ElementTree.Element:
    """The one suite; its counts are those of its cases."""
    text = to_junit(report)
    assert text.startswith('<?xml version="1.0" encoding="utf-8"?>\n')
    (found,) = ElementTree.fromstring(text.encode())
    cases = found.findall("testcase")
    assert found.get("tests") == str(len(cases))
    assert found.get("failures") == str(sum(case.find("failure") is not None for case in cases))
    assert found.get("skipped") == str(sum(case.find("skipped") is not None for case in cases))
    assert all(len(case.findall("failure")) + len(case.findall("skipped")) <= 1 for case in cases)
    return found


def outcome(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "skipped") if case.find(kind) is not None), "passed")


@pytest.mark.parametrize("make", REPORTS)
def test_there_is_a_failure_exactly_where_the_exit_code_is_1(make: Callable[[], CheckReport]) -> None:
    for fail_on in FAIL_ON:
        report = dataclasses.replace(make(), fail_on=fail_on)
        found = suite(report)
        assert (found.get("failures") != "0") == bool(report.exit_code), fail_on
        assert len(found.findall("testcase")) >= len(report.calls)


def test_one_case_an_attention_and_one_for_what_no_call_is_about() -> None:
    cases = {case.get("name"): outcome(case) for case in suite(sick()).findall("testcase")}
    assert len(cases) == len(sick().calls) + 2
    assert cases["decoder.h.1.attn (sdpa)"] == "passed"
    assert cases["decoder.h.3.attn (eager)"] == cases["(root) (sdpa)"] == "failure"
    assert cases["audio: not measured"] == "skipped"


def test_what_was_not_judged_is_skipped_with_its_reason_or_fails_on_request() -> None:
    cases = {case.get("name"): case for case in suite(unjudged()).findall("testcase")}
    assert [outcome(case) for case in cases.values()] == ["passed", "skipped", "skipped"]
    skipped = cases["h.1.attn"].find("skipped")
    assert skipped is not None
    assert "the two readings disagree" in str(skipped.get("message"))
    strict = dataclasses.replace(unjudged(), fail_on="unmeasured")
    assert [outcome(case) for case in suite(strict).findall("testcase")] == ["passed", "failure", "failure"]


def test_an_unmeasured_call_without_a_finding_does_not_pass() -> None:
    report = dataclasses.replace(unjudged(), findings=())
    assert [outcome(case) for case in suite(report).findall("testcase")] == ["passed", "skipped", "skipped"]


def test_a_failure_says_where_why_and_what_to_do() -> None:
    site = healthy(1).calls[0].call.site
    finding = Finding("scale_ledger", "fail", site, 8.0, 1.0, "wrong & <big>", "mend it", "s", "mine.py:3")
    note = dataclasses.replace(finding, severity="note", rule="entropy", message="low")
    call = dataclasses.replace(healthy(1).calls[0].call, product_at="mine.py:3")
    calls = (dataclasses.replace(healthy(1).calls[0], call=call),)
    sources = (SourceFile("mine.py", "src/mine.py", "root"),)
    report = dataclasses.replace(healthy(1), calls=calls, findings=(finding, note), sources=sources)
    case = suite(report).find("testcase")
    assert case is not None
    assert (case.get("file"), case.get("line")) == ("src/mine.py", "3")
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("message") == "fail: wrong & <big>"
    assert "at mine.py:3" in str(failure.text)
    assert "fix: mend it" in str(failure.text)
    assert "low" in str(case.findtext("system-out"))
