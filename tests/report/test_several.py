"""The report on several models: failing ones first and never cut off, healthy ones a line, lost ones named."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sqrtdk.audit.multipliers import by_config
from sqrtdk.audit.records import CheckReport
from sqrtdk.audit.several import CheckedModel, SeveralReport
from sqrtdk.report.check import several as drawn
from sqrtdk.report.check.json import to_document
from sqrtdk.report.check.junit import to_junit
from sqrtdk.report.check.markdown import MOST_CHARACTERS
from sqrtdk.report.check.sarif import to_sarif
from sqrtdk.report.check.several_page import to_html
from tests.report.sample_report import healthy, hostile, sick
from tests.support.optional import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check-several.schema.json").read_text())


def named(report: CheckReport, name: str) -> CheckedModel:
    return CheckedModel(name, dataclasses.replace(report, model=dataclasses.replace(report.model, id=name)))


def some() -> SeveralReport:
    lost = CheckedModel("models/lost", error="no such file", hint="Look elsewhere.")
    return SeveralReport((named(healthy(2), "models/fine"), named(sick(), "models/sick"), lost))


def test_the_comment_of_twenty_healthy_models_is_short_and_names_each_once() -> None:
    models = [named(healthy(2), f"models/a-model-with-a-longer-name-{number}/config.json") for number in range(20)]
    comment = drawn.several_markdown(SeveralReport(tuple(models)))
    assert len(comment.encode()) < 3000
    assert [comment.count(f"<code>{model.name}</code>") for model in models] == [1] * 20
    assert len(comment.splitlines()) == 4 + 20


@pytest.mark.full
def test_no_failing_model_is_cut_off_whatever_their_number() -> None:
    for number in (2, 100):
        fine = [named(healthy(2), f"fine-{place}") for place in range(300)]
        failing = [named(sick(), f"sick-{place}-end") for place in range(number)]
        comment = drawn.several_markdown(SeveralReport((*fine, *failing)))
        assert len(comment) <= MOST_CHARACTERS
        assert all(f"<code>{model.name}</code>" in comment for model in failing), number
        assert comment.rindex("sick-0-end") < comment.index("fine-0")
        assert comment.count("<details>") == comment.count("</details>")
        shown = sum(f"<code>{model.name}</code>" in comment for model in fine)
        assert shown == 300
    crowd = drawn.several_markdown(
        SeveralReport(tuple(named(healthy(1), f"fine-{place:0200}") for place in range(300)))
    )
    left = 300 - crowd.count("<code>")
    assert len(crowd) <= MOST_CHARACTERS
    assert left
    assert f"- {left} more without findings" in crowd
    assert "#### Attention of <code>sick-0-end</code>: failed" in drawn.several_markdown(
        SeveralReport((fine[0], failing[0]))
    )


@pytest.mark.full
def test_long_reports_of_failing_models_fit_what_github_takes() -> None:
    fine = [named(healthy(32), f"models/fine-{number}/config.json") for number in range(17)]
    long = [dataclasses.replace(one, findings=one.findings * 200) for one in (sick(), hostile(), sick())]
    long = [
        dataclasses.replace(one, findings=tuple(
            dataclasses.replace(finding, message=f"{finding.message} {place}" + " long" * 70)
            for place, finding in enumerate(one.findings)
        ))
        for one in long
    ]  # fmt: skip
    failing = [named(one, f"models/long-{number}/config.json") for number, one in enumerate(long)]
    several = SeveralReport((*fine, *failing))
    for language in ("en", "zh"):
        comment = drawn.several_markdown(several, language)
        assert len(comment) <= MOST_CHARACTERS < 65_536
        assert len(comment.encode()) < 2**20  # a job's summary
        places = [comment.index(f"<code>{model.name}</code>") for model in (*failing, *fine)]
        assert max(places[:3]) < min(places[3:])
        assert comment.count("<details>") == comment.count("</details>")
    log = json.loads(to_sarif(*several.reports))
    assert len(log["runs"]) <= 20
    assert all(len(run["results"]) <= 25_000 for run in log["runs"])
    assert len(gzip.compress(json.dumps(log).encode())) < 10 * 2**20


def test_the_worst_comes_first_and_the_worst_exit_code_counts() -> None:
    report = some()
    text = drawn.to_text(report, width=200)
    assert text.index("models/lost") < text.index("models/sick") < text.index("models/fine")
    last = text.rstrip().splitlines()[-1]
    assert last == (
        "3 models: 1 not checked (models/lost), 1 failed (models/sick), 1 passed. Exit code 2 (fail-on: fail)."
    )
    assert report.exit_code == 2
    assert dataclasses.replace(report, models=report.models[:2]).exit_code == 1
    assert dataclasses.replace(report, models=report.models[:1]).exit_code == 0


def test_the_line_of_a_healthy_model_has_the_scale_that_its_config_declares() -> None:
    by = by_config("attention_multiplier", "1", "sources.field.granite")
    fine = healthy(2)
    calls = tuple(
        dataclasses.replace(judged, verdict="declared", declared_by=by, declared_at="m/config.json:9")
        for judged in fine.calls
    )
    ratio = calls[0].call.scale.ratio
    model = named(dataclasses.replace(fine, calls=calls, findings=()), "m")
    assert model.healthy
    line = str(drawn.one_line(model))
    assert f"ratio {ratio:.3f} by config.attention_multiplier = 1 (Granite: the scale itself), m/config.json:9" in line
    assert line.count("ratio") == 1
    assert "ratio" not in str(drawn.one_line(named(fine, "m")))


def test_an_interrupted_check_ends_with_its_own_exit_code() -> None:
    report = dataclasses.replace(some(), interrupted=True)
    document = json.loads(drawn.to_json(report))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["exit_code"] == report.exit_code == 130


def test_the_document_of_each_model_is_that_of_a_check_of_it_alone() -> None:
    report = some()
    document = json.loads(drawn.to_json(report))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    alone = [json.loads(json.dumps(to_document(one), default=str)) for one in report.reports]
    assert [one["model"] for one in document["models"]] == [one["model"] for one in alone]
    assert [set(one) for one in document["models"]] == [set(one) for one in alone]
    assert document["not_checked"] == [{"model": "models/lost", "error": "no such file", "hint": "Look elsewhere."}]
    assert document["exit_code"] == 2


def test_other_tools_get_a_run_or_a_suite_a_model_and_the_lost_one_by_name() -> None:
    lost = {"models/lost": "no such file"}
    reports = (named(healthy(2), "a/b").report, named(sick(), "a-b").report)
    assert reports[0] is not None
    assert reports[1] is not None
    runs = json.loads(to_sarif(*reports, not_checked=lost))["runs"]
    ids = [run["automationDetails"]["id"] for run in runs]
    assert len(set(ids)) == 3  # code scanning refuses two runs of one id
    assert runs[1]["results"]
    (notification,) = runs[2]["invocations"][0]["toolExecutionNotifications"]
    assert notification["message"]["text"] == "models/lost: no such file"
    assert [run["invocations"][0]["executionSuccessful"] for run in runs] == [True, True, False]
    suites = ElementTree.fromstring(to_junit(*reports, not_checked=lost))
    assert [suite.get("name") for suite in suites] == ["a/b", "a-b", "models/lost"]
    assert suites.get("errors") == "1"
    failures = [int(suite.get("failures", "")) for suite in suites]
    assert failures[0] == 0 < failures[1] == int(suites.get("failures", ""))


def test_the_page_shows_every_model_and_no_strangers_markup() -> None:
    report = dataclasses.replace(some(), models=(*some().models, named(hostile(), "<script>x</script>")))
    page = to_html(report)
    assert "<script>x" not in page
    assert all(f">{name}<" in page for name in ("models/fine", "models/sick", "models/lost"))
    assert page.index("models/lost</b>") < page.index("models/sick</b>") < page.index("models/fine</code>")
