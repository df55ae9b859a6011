"""Records are what docs/lab.schema.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from sqrtdk_lab.figures import Method, Style
from sqrtdk_lab.judge import Answer
from sqrtdk_lab.record import to_json
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.runner import run_claim
from tests.support.optional import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "lab.schema.json").read_text())


@pytest.mark.parametrize("name", ["onehot-64", "scale-dk", "params-single"])
def test_a_record_meets_the_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    record = json.loads(to_json(run_claim(CLAIMS[name], quick=True)))
    jsonschema.Draft202012Validator(SCHEMA).validate(record)
    wrong: list[dict[str, object]] = [{"sound": "yes"}, {"more": 1}, {"level": 1.0}, {"outcome": {}}]
    for broken in wrong:
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(record | broken)


def test_the_schema_names_every_kind() -> None:
    kinds = SCHEMA["$defs"]
    assert kinds["figure"]["properties"]["method"]["enum"] == list(get_args(Method))
    assert kinds["series"]["properties"]["style"]["enum"] == list(get_args(Style))
    assert kinds["outcome"]["properties"]["verdict"]["properties"]["answer"]["enum"] == list(get_args(Answer))
