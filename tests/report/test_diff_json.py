import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sqrtdk.compare.records import FAIL_ON, Cause, DiffReport, PairDiff, SideInfo, StageDiff, Unpaired
from sqrtdk.compare.suspect import STAGES
from sqrtdk.report.diff_json import to_json
from tests.report.sample_diff import EVIL, REPORTS, hostile, not_finite, softcap, two_causes, unknown

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def _document(report: DiffReport) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant}")

    return json.loads(to_json(report), parse_constant=refuse)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "hostile"])
def test_reports_fit_the_schema(name: str) -> None:
    report = REPORTS[name]()
    document = _document(report)
    VALIDATOR.validate(document)
    assert len(document["pairs"]) == len(report.pairs)
    assert (document["same"], document["exit_code"]) == (report.same, report.exit_code)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("same",), "yes"),
        (("pairs", 1, "causes", 0, "name"), "typo"),
        (("pairs", 1, "causes", 0, "explained"), "all"),
        (("pairs", 1, "residue"), "NaN"),
        (("pairs", 1, "stages", 0, "same"), 1),
        (("pairs", 2, "picture", "rows", 0), 7),
        (("fail_on",), "fail"),
        (("exit_code",), 2),
        (("a", "calls"), -1),
        (("surprise",), 1),
    ],
)
def test_the_schema_refuses(path: tuple[str | int, ...], value: object) -> None:
    document = _document(two_causes())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(document)


def test_names_of_the_contract() -> None:
    document = _document(two_causes())
    wanted = "schema_version same pairs unpaired_a unpaired_b exit_code"
    assert set(wanted.split()) <= set(document)
    wanted = "site_a site_b same first_stage follows_from causes residue allowed"
    assert set(wanted.split()) <= set(document["pairs"][0])
    assert {"name", "a", "b", "explained"} <= set(document["pairs"][1]["causes"][0])


@pytest.mark.parametrize(
    ("record", "name"),
    [(PairDiff, "pair"), (Cause, "cause"), (StageDiff, "stage"), (SideInfo, "side"), (Unpaired, "unpaired")],
)
def test_every_field_of_the_records_is_described(record: type, name: str) -> None:
    drawn_only = {"scatter"} if record is PairDiff else set()
    fields = {field.name for field in dataclasses.fields(record)}
    assert set(SCHEMA["$defs"][name]["properties"]) == fields - drawn_only


def test_the_words_of_the_schema_are_those_of_the_records() -> None:
    assert tuple(SCHEMA["properties"]["fail_on"]["enum"]) == FAIL_ON
    assert SCHEMA["$defs"]["stage"]["properties"]["stage"]["description"] == f"One of: {', '.join(STAGES)}."


def test_nan_is_null_and_an_infinity_is_named() -> None:
    report = not_finite()
    assert math.isnan(report.pairs[1].residue or 0)
    assert _document(report)["pairs"][1]["residue"] is None
    endless = dataclasses.replace(softcap().pairs[0], residue=math.inf)
    document = _document(dataclasses.replace(softcap(), pairs=(endless,)))
    VALIDATOR.validate(document)
    assert document["pairs"][0]["residue"] == "Infinity"


def test_texts_survive_and_are_plain_ascii() -> None:
    text = to_json(hostile())
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert json.loads(text)["pairs"][0]["causes"][0]["text"] == EVIL


def test_points_are_left_to_the_page() -> None:
    assert "scatter" not in _document(unknown())["pairs"][1]
    assert len(to_json(softcap())) < 60_000
