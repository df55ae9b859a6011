import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import FAIL_ON, HEALTH, OUTCOMES, CheckReport
from sqrtdk.report import terminal
from sqrtdk.report.check_words import RESULTS
from sqrtdk.report.json import to_json
from tests.report.sample_report import EVIL, head_stats, healthy, hostile, judged, sick, static

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
REPORTS = {"healthy": healthy, "static": static, "sick": sick, "hostile": hostile}


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant}")

    return json.loads(text, parse_constant=refuse)


def _document(report: CheckReport) -> Any:
    document = _strict(to_json(report))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", REPORTS)
def test_reports_fit_the_schema(name: str) -> None:
    report = REPORTS[name]()
    document = _document(report)
    assert len(document["calls"]) == len(report.calls)
    assert document["exit_code"] == report.exit_code


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("calls", 0, "verdict"), "fine"),
        (("calls", 0, "mistake"), "typo"),
        (("calls", 0, "scale", "ratio"), "NaN"),
        (("calls", 0, "stats", "peak", 0), "high"),
        (("findings", 0, "severity"), "bad"),
        (("surprise",), 1),
    ],
)
def test_the_schema_refuses(path: tuple[str | int, ...], value: object) -> None:
    document = _strict(to_json(sick()))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_names_of_the_contract() -> None:
    document = _document(sick())
    assert {"id", "class", "parameters"} == set(document["model"])
    assert document["tool"]["name"] == "sqrtdk"
    wanted = "site index kind score heads kv_heads head_dim query_len key_len dtype formula scale verdict mistake"
    wanted += " declared_by softcap bias mask stats"
    assert set(wanted.split()) <= set(document["calls"][0])
    assert {"effective", "ratio", "r_squared", "factors"} <= set(document["calls"][0]["scale"])
    assert set(document["findings"][0]) == {f.name for f in dataclasses.fields(sick().findings[0])}


def test_nan_is_null_and_an_infinity_is_named() -> None:
    document = _document(sick())
    nan_call = next(call for call in document["calls"] if call["site"] == "decoder.h.4.attn")
    assert nan_call["stats"]["max_logit"][5] is None
    assert nan_call["stats"]["max_logit"][0] == "Infinity"
    stats = dataclasses.replace(head_stats(1), min_logit=(-math.inf,))
    report = dataclasses.replace(healthy(), calls=(judged("a", stats=stats),))
    assert _document(report)["calls"][0]["stats"]["min_logit"] == ["-Infinity"]


def test_texts_survive_and_are_plain_ascii() -> None:
    text = to_json(hostile())
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert json.loads(text)["calls"][0]["formula"] == f"softmax({EVIL})"


def test_odd_values_of_the_environment_become_text() -> None:
    environment = {"torch": Path("x"), "flags": {1: {"a"}}, "nan": math.nan, "yes": True}
    document = _document(dataclasses.replace(healthy(), environment=environment))
    assert document["environment"] == {"torch": "x", "flags": {"1": ["a"]}, "nan": None, "yes": True}


def test_a_list_of_numbers_is_one_line() -> None:
    assert len(to_json(healthy(layers=1, heads=1000)).splitlines()) < 120


def test_the_words_of_the_records_are_those_of_the_schema_and_of_both_reports() -> None:
    call = SCHEMA["$defs"]["call"]["properties"]
    assert set(call["health"]["enum"]) == set(HEALTH)
    assert call["mistake"]["enum"] == [None, *MISTAKES]
    assert set(SCHEMA["properties"]["fail_on"]["enum"]) == set(FAIL_ON)
    assert set(terminal._OUTCOME_STYLE) == set(RESULTS) == set(OUTCOMES)
