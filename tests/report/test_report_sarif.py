import dataclasses
import json
import re

import pytest

from sqrtdk.audit.records import SEVERITIES, CheckReport, Finding, SourceFile
from sqrtdk.audit.rules import RULES
from sqrtdk.laws import LAWS
from sqrtdk.messages import Message
from sqrtdk.report.check.sarif import FINGERPRINT, NOT_MEASURED_RULE, RULES_WITH_HELP, SARIF_LEVELS, to_sarif
from tests.report import sarif_rules
from tests.report.sample_report import EVIL, healthy, hostile, lawless, leaking, sick, static, unjudged
from tests.support.optional import jsonschema

REPORTS = {
    "healthy": healthy, "static": static, "sick": sick, "hostile": hostile,
    "lawless": lawless, "leaking": leaking, "unjudged": unjudged,
}  # fmt: skip


def placed(report: CheckReport, at: str | None, **changes: object) -> CheckReport:
    """The report of one finding, at a place, with the files that a test names."""
    finding = Finding("scale_ledger", "fail", report.calls[0].call.site, 8.0, 1.0, "wrong", "mend", "s", at)
    return dataclasses.replace(report, findings=(finding,), **changes)  # type: ignore[arg-type]


def artifacts(report: CheckReport) -> list[tuple[str, str | None, int]]:
    """URI, base and line of the one result's location and of those related to it."""
    (result,) = sarif_rules.checked(to_sarif(report))["results"]
    places = [*result["locations"], *result.get("relatedLocations", ())]
    physical = [place["physicalLocation"] for place in places if "physicalLocation" in place]
    return [
        (p["artifactLocation"]["uri"], p["artifactLocation"].get("uriBaseId"), p["region"]["startLine"])
        for p in physical
    ]


@pytest.mark.parametrize("name", REPORTS)
def test_logs_are_valid_and_say_everything_once(name: str) -> None:
    report = REPORTS[name]()
    run = sarif_rules.checked(to_sarif(report))
    missed = sum(not report.repeated(entry) for entry in report.not_measured)
    assert len(run["results"]) == len(report.findings) + missed
    assert run["invocations"][0]["exitCode"] == report.exit_code
    levels = [result["level"] for result in run["results"]]
    assert levels == [SARIF_LEVELS[finding.severity] for finding in report.findings] + ["none"] * missed
    assert [result.get("kind", "fail") for result in run["results"]].count("open") == missed


def test_the_rules_of_the_log_refuse() -> None:
    log = json.loads(to_sarif(sick()))
    for break_it in (
        lambda run: run["results"][0].update(level="fail"),
        lambda run: run["results"][0].update(kind="open"),
        lambda run: run["results"][0]["message"].update(text=""),
        lambda run: run["results"][0].update(surprise=1),
        lambda run: run["tool"]["driver"].pop("name"),
    ):
        run = json.loads(json.dumps(log["runs"][0]))
        break_it(run)
        with pytest.raises(jsonschema.ValidationError):
            sarif_rules.checked(json.dumps(log | {"runs": [run]}))


def test_every_rule_has_words_and_every_severity_a_level() -> None:
    laws = {row.rule for row in LAWS.values()} - {"law_finite"}  # whose finding is that of the rule nonfinite
    assert set(RULES_WITH_HELP) == {*RULES, *laws, "kv_cache", NOT_MEASURED_RULE}
    assert set(SARIF_LEVELS) == set(SEVERITIES)
    for rule in RULES_WITH_HELP:
        assert len(Message(f"help.{rule}.title")) < 80
        assert Message(f"help.{rule}.text").endswith(".")
        assert Message(f"help.{rule}.text").said("zh").endswith("。")


def test_a_finding_lies_in_the_repository_first() -> None:
    sources = (
        SourceFile("lib/attn.py", "lib/attn.py", "packages"),
        SourceFile("mine.py", "src/mine.py", "root"),
        SourceFile("m/config.json", "m/config.json", "root"),
        SourceFile("far.py", "/opt/far.py", "elsewhere"),
    )
    report = placed(healthy(1), "lib/attn.py:3, mine.py:14", sources=sources, root="/work tree")
    calls = (dataclasses.replace(report.calls[0], declared_at="m/config.json:9"),)
    report = dataclasses.replace(report, calls=calls)
    assert artifacts(report) == [
        ("src/mine.py", "SRCROOT", 14), ("m/config.json", "SRCROOT", 9), ("lib/attn.py", "PYTHONPATH", 3),
    ]  # fmt: skip
    run = sarif_rules.checked(to_sarif(report))
    assert run["originalUriBaseIds"]["SRCROOT"]["uri"] == "file:///work%20tree/"
    outside = placed(report, "lib/attn.py:3, far.py:1")
    assert artifacts(outside)[0] == ("m/config.json", "SRCROOT", 9)
    assert artifacts(placed(healthy(1), "far.py:1", sources=sources)) == [("file:///opt/far.py", None, 1)]


def test_without_a_place_a_finding_lies_where_the_call_was_made_or_where_the_model_was_named() -> None:
    report = healthy(1)
    call = dataclasses.replace(report.calls[0].call, product_at="mine.py:3", softmax_at="mine.py:5")
    report = dataclasses.replace(report, calls=(dataclasses.replace(report.calls[0], call=call),))
    sources = (SourceFile("mine.py", "mine.py", "root"), SourceFile("nets.py", "nets.py", "root"))
    assert artifacts(placed(report, None, sources=sources)) == [
        ("mine.py", "SRCROOT", 3),
        ("mine.py", "SRCROOT", 5),
    ]
    nowhere = placed(healthy(1), None, sources=sources)
    assert artifacts(nowhere) == []
    named = dataclasses.replace(nowhere, model=dataclasses.replace(nowhere.model, at="nets.py:7"))
    assert artifacts(named) == [("nets.py", "SRCROOT", 7)]


def test_fingerprints_outlast_moved_lines_and_drifting_numbers() -> None:
    def prints(report: CheckReport) -> list[str]:
        results = sarif_rules.checked(to_sarif(report))["results"]
        return [result["partialFingerprints"][FINGERPRINT] for result in results]

    before = sick()
    moved = tuple(
        dataclasses.replace(entry, at="x.py:99", message=re.sub(r"\d+", "7", entry.message))
        for entry in before.findings
    )
    assert prints(dataclasses.replace(before, findings=moved)) == prints(before)
    elsewhere = (dataclasses.replace(before.findings[0], site="other"), *before.findings[1:])
    assert prints(dataclasses.replace(before, findings=elsewhere)) != prints(before)


def test_what_is_said_twice_at_a_site_is_two_results() -> None:
    report = placed(healthy(1), None)
    (first,) = report.findings
    again = tuple(dataclasses.replace(first, message=f"call {number} of 2") for number in (1, 2))
    results = sarif_rules.checked(to_sarif(dataclasses.replace(report, findings=again)))["results"]
    prints = [result["partialFingerprints"][FINGERPRINT].split(":") for result in results]
    assert prints[0][0] == prints[1][0]
    assert [number for _, number in prints] == ["1", "2"]


def test_a_name_makes_no_link_and_no_path_out_of_the_tree() -> None:
    report = placed(healthy(1), f"{EVIL}/a b.py:3", sources=(SourceFile(f"{EVIL}/a b.py", f"{EVIL}/a b.py", "root"),))
    assert len(artifacts(report)) == 1
    finding = dataclasses.replace(report.findings[0], message="see [here](http://evil)")
    (result,) = sarif_rules.checked(to_sarif(dataclasses.replace(report, findings=(finding,))))["results"]
    assert r"\[here\](http://evil)" in result["message"]["text"]
    whole = to_sarif(hostile())
    assert "\x1b" not in whole
    assert "\\u202e" not in whole.replace("\\\\u202e", "")


def test_models_of_one_commit_have_categories_of_their_own() -> None:
    ids = {sarif_rules.checked(to_sarif(make()))["automationDetails"]["id"] for make in REPORTS.values()}
    assert len(ids) == len(REPORTS)
    assert all(re.fullmatch(r"sqrtdk/[\w.-]+/", name) for name in ids)
