"""The documents of `sqrtdk watch` fit docs/watch.schema.json, which says what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch_compare import compare
from sqrtdk.report.watch_json import comparison_json, to_json
from sqrtdk.report.watch_summary import Summary, summarise
from sqrtdk.report.watch_words import MISSING

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "watch.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture(scope="module")
def told(runs: dict[str, Path]) -> dict[str, Summary]:
    return {name: summarise(read_run(folder)) for name, folder in runs.items()}


def of_show(told: dict[str, Summary]) -> dict[str, Any]:
    return dict(json.loads(to_json(told["unscaled"])))


def test_the_schema_is_one_and_names_every_kind_of_missing() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["$defs"]["missing"]["properties"]["kind"]["enum"]) == set(MISSING)


def test_every_run_fits_the_schema(told: dict[str, Summary]) -> None:
    for summary in told.values():
        VALIDATOR.validate(json.loads(to_json(summary)))


def test_two_runs_fit_the_schema(told: dict[str, Summary]) -> None:
    for b in ("healthy", "sick"):
        one, other = told["unscaled"], told[b]
        VALIDATOR.validate(json.loads(comparison_json(one, other, compare(one, other))))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("tool",), "sqrtdk 0.1.0"),
        (("samples",), None),
        (("loss", "values", 0), "NaN"),
        (("alarms", 0, "severity"), "bad"),
        (("sites", 0, "statistics", "max_logit"), {}),
        (("more",), 1),
    ],
)
def test_the_schema_refuses(told: dict[str, Summary], path: tuple[str | int, ...], value: object) -> None:
    document: Any = of_show(told)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(document)
