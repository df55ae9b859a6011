"""The documents of `sqrtdk check`, `diff` and `watch` fit their schemas, which say what is in them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import sqrtdk
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import (
    FAIL_ON,
    HEALTH,
    LAW_STATES,
    OUTCOMES,
    AttentionSplit,
    CheckReport,
    LawAnswer,
    RanksOfReport,
)
from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import DIFF_FAIL_ON as DIFF_FAIL_ON
from sqrtdk.compare.records import Cause, DiffReport, ModuleCause, PairDiff, SideInfo, StageDiff, Unpaired
from sqrtdk.messages import recorded, said
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.check import json as check_json
from sqrtdk.report.check.headline import OUTCOME_TONES
from sqrtdk.report.console import TONE_STYLES
from sqrtdk.report.diff import json as diff_json
from sqrtdk.report.watch import json as watch_json
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.missing import MISSING
from sqrtdk.report.watch.summary import Summary, summarise
from tests.report import sample_diff, sample_report
from tests.report.sample_report import EVIL, head_stats, healthy, judged, sick
from tests.support.optional import jsonschema

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {name: json.loads((DOCS / f"{name}.schema.json").read_text()) for name in ("check", "diff", "watch")}
CHECKS = ("healthy", "static", "sick", "lawless", "hostile")


@pytest.fixture(scope="module")
def told(runs: dict[str, Path]) -> dict[str, Summary]:
    return {name: summarise(read_run(folder)) for name, folder in runs.items()}


def parsed(text: str) -> Any:
    """JSON alone: no bare NaN or Infinity."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"bare {constant}"))


def valid(kind: str, text: str) -> Any:
    document = parsed(text)
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(document)
    return document


def of_check(report: CheckReport) -> Any:
    return valid("check", check_json.to_json(report))


def of_diff(report: DiffReport) -> Any:
    return valid("diff", diff_json.to_json(report))


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_schema_is_one(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_fits_the_schema(name: str) -> None:
    report = getattr(sample_report, name)()
    document = of_check(report)
    assert (len(document["calls"]), document["exit_code"]) == (len(report.calls), report.exit_code)


@pytest.mark.parametrize("name", [name for name in sample_diff.REPORTS if name != "hostile"])
def test_a_comparison_fits_the_schema(name: str) -> None:
    report = sample_diff.REPORTS[name]()
    document = of_diff(report)
    assert len(document["pairs"]) == len(report.pairs)
    assert (document["same"], document["exit_code"]) == (report.same, report.exit_code)


def test_every_run_and_two_runs_fit_the_schema(told: dict[str, Summary]) -> None:
    for summary in told.values():
        valid("watch", watch_json.to_json(summary))
        one = told["unscaled"]
        valid("watch", watch_json.comparison_json(one, summary, compare_runs(one, summary)))
    assert set(SCHEMAS["watch"]["$defs"]["missing"]["properties"]["kind"]["enum"]) == set(MISSING)


REFUSED = [
    ("check", "schema_version", 2),
    ("check", "calls 0 verdict", "fine"),
    ("check", "calls 0 mistake", "typo"),
    ("check", "calls 0 scale ratio", "NaN"),
    ("check", "calls 0 stats peak 0", "high"),
    ("check", "findings 0 severity", "bad"),
    ("check", "surprise", 1),
    ("diff", "schema_version", 2),
    ("diff", "same", "yes"),
    ("diff", "pairs 1 causes 0 name", "typo"),
    ("diff", "pairs 1 causes 0 explained", "all"),
    ("diff", "pairs 1 residue", "NaN"),
    ("diff", "pairs 1 stages 0 same", 1),
    ("diff", "pairs 2 picture rows 0", 7),
    ("diff", "fail_on", "fail"),
    ("diff", "exit_code", 2),
    ("diff", "a calls", -1),
    ("diff", "surprise", 1),
    ("watch", "schema_version", 2),
    ("watch", "tool", "sqrtdk 0.1.0"),
    ("watch", "samples", None),
    ("watch", "loss values 0", "NaN"),
    ("watch", "alarms 0 severity", "bad"),
    ("watch", "sites 0 statistics max_logit", {}),
    ("watch", "more", 1),
]


@pytest.mark.parametrize(("kind", "path", "value"), REFUSED)
def test_the_schema_refuses(kind: str, path: str, value: object, told: dict[str, Summary]) -> None:
    place = {
        "check": lambda: of_check(sick()),
        "diff": lambda: of_diff(sample_diff.two_causes()),
        "watch": lambda: valid("watch", watch_json.to_json(told["unscaled"])),
    }[kind]()
    document = place
    *steps, last = (int(step) if step.isdigit() else step for step in path.split())
    for step in steps:
        place = place[step]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(document)


SAID = {"message_id", "values"}  # of the sentence in a record


def test_a_sentence_of_a_document_can_be_said_in_chinese() -> None:
    report = sqrtdk.check("demo:unscaled", seq_len=16)
    for finding, record in zip(report.findings, of_check(report)["findings"], strict=True):
        again = recorded(record["message"], record["message_id"], record["values"])
        assert (again, said(again, "zh")) == (finding.message, said(finding.message, "zh"))
        assert said(again, "zh") != again
    first = of_check(report)["findings"][0]
    assert (first["message_id"], first["values"]["why"]["values"]["mistake"]) == (
        "rules.scale_ledger.unexplained", "missing",
    )  # fmt: skip


def test_every_field_of_a_check_is_in_the_document() -> None:
    """`to_json` lists the fields one by one, so a new one has to be added there and in the schema."""
    split = AttentionSplit("layers.0", 0, (0, 1), ("rows", "heads"), "zigzag")
    ranks = RanksOfReport(2, (split,), ((0, 1), (1,)))
    report = dataclasses.replace(sick(), kv_bytes_per_token=3072, ranks=ranks)
    document = of_check(report)
    not_written = {"root", "kv_cache", "kv_formats"}  # a path of the machine; forecasts, which this report has none of
    assert {field.name for field in dataclasses.fields(report)} - not_written <= set(document)
    assert document["kv_bytes_per_token"] == 3072
    assert document["ranks"]["attentions"] == [dataclasses.asdict(split) | {"ranks": [0, 1], "ways": ["rows", "heads"]}]
    assert document["ranks"]["findings"] == [[0, 1], [1]]


def test_names_of_the_contract() -> None:
    check = of_check(sick())
    assert {"id", "class", "parameters"} == set(check["model"])
    assert check["tool"]["name"] == "sqrtdk"
    wanted = "site index kind score heads kv_heads head_dim query_len key_len dtype formula scale verdict mistake"
    wanted += " declared_by softcap bias mask stats"
    assert set(wanted.split()) <= set(check["calls"][0])
    assert {"effective", "ratio", "r_squared", "factors"} <= set(check["calls"][0]["scale"])
    assert set(check["findings"][0]) == {f.name for f in dataclasses.fields(sick().findings[0])} | SAID
    diff = of_diff(sample_diff.two_causes())
    assert {"schema_version", "same", "pairs", "unpaired_a", "unpaired_b", "exit_code"} <= set(diff)
    wanted = "site_a site_b same first_stage follows_from causes residue allowed"
    assert set(wanted.split()) <= set(diff["pairs"][0])
    assert {"name", "a", "b", "explained"} <= set(diff["pairs"][1]["causes"][0])


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (PairDiff, "pair"),
        (Cause, "cause"),
        (StageDiff, "stage"),
        (SideInfo, "side"),
        (Unpaired, "unpaired"),
        (ModuleCause, "module_cause"),
    ],
)
def test_every_field_of_a_comparison_is_described(record: type, name: str) -> None:
    # `fix` says what these are for
    drawn_only = {PairDiff: {"scatter"}, Cause: {"mends", "codes", "lacks", "written"}}.get(record, set())
    fields = {field.name for field in dataclasses.fields(record)}
    said = SAID if fields & {"text", "reason"} else set()
    said = said | {"fix"} if record is Cause else said  # made of the cause where it is written
    assert set(SCHEMAS["diff"]["$defs"][name]["properties"]) == fields - drawn_only | said


def test_the_words_of_the_records_are_those_of_the_schemas_and_of_the_reports() -> None:
    call = SCHEMAS["check"]["$defs"]["call"]["properties"]
    assert set(call["health"]["enum"]) == set(HEALTH)
    assert call["mistake"]["enum"] == [None, *MISTAKES]
    law = SCHEMAS["check"]["$defs"]["law"]["properties"]
    assert tuple(law["state"]["enum"]) == LAW_STATES
    assert set(law) == {field.name for field in dataclasses.fields(LawAnswer)} - {"finding"} | SAID
    assert set(SCHEMAS["check"]["properties"]["fail_on"]["enum"]) == set(FAIL_ON)
    assert set(OUTCOME_TONES) == set(OUTCOMES)
    assert set(OUTCOME_TONES.values()) <= set(TONE_STYLES)
    assert tuple(SCHEMAS["diff"]["properties"]["fail_on"]["enum"]) == DIFF_FAIL_ON
    stage = SCHEMAS["diff"]["$defs"]["stage"]["properties"]["stage"]
    assert stage["description"] == f"One of: {', '.join(STAGES)}."


def test_nan_is_null_and_an_infinity_is_named() -> None:
    (nan_call,) = (call for call in of_check(sick())["calls"] if call["site"] == "decoder.h.4.attn")
    assert nan_call["stats"]["max_logit"][5] is None
    assert nan_call["stats"]["max_logit"][0] == "Infinity"
    stats = dataclasses.replace(head_stats(1), min_logit=(-math.inf,))
    report = dataclasses.replace(healthy(), calls=(judged("a", stats=stats),))
    assert of_check(report)["calls"][0]["stats"]["min_logit"] == ["-Infinity"]
    broken = sample_diff.not_finite()
    assert math.isnan(broken.pairs[1].residue or 0)
    assert of_diff(broken)["pairs"][1]["residue"] is None
    endless = dataclasses.replace(sample_diff.softcap().pairs[0], residue=math.inf)
    assert of_diff(dataclasses.replace(broken, pairs=(endless,)))["pairs"][0]["residue"] == "Infinity"


def test_texts_survive_and_are_plain_ascii() -> None:
    check = check_json.to_json(sample_report.hostile())
    diff = diff_json.to_json(sample_diff.hostile())
    for text in (check, diff):
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
    assert json.loads(check)["calls"][0]["formula"] == f"softmax({EVIL})"
    assert json.loads(diff)["pairs"][0]["causes"][0]["text"] == sample_diff.EVIL


def test_odd_values_of_the_environment_become_text() -> None:
    environment = {"torch": Path("x"), "flags": {1: {"a"}}, "nan": math.nan, "yes": True}
    document = of_check(dataclasses.replace(healthy(1, 1), environment=environment))
    assert document["environment"] == {"torch": "x", "flags": {"1": ["a"]}, "nan": None, "yes": True}


def test_documents_stay_small() -> None:
    """A list of numbers is one line, and the points of a comparison are left to the page."""
    assert len(check_json.to_json(healthy(layers=1, heads=1000)).splitlines()) < 125
    assert "scatter" not in of_diff(sample_diff.unknown())["pairs"][1]
    assert len(diff_json.to_json(sample_diff.softcap())) < 60_000
