"""Check and diff say of a graph what they said: every record is compared with the stored one."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch.onnx.export needs it")

from tests.graphs.records import CASES, QUICK, said, stored


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_record_is_the_stored_one(name: str) -> None:
    record: Any = json.loads(json.dumps(said(CASES[name])))
    assert record == stored()[name]


def test_the_records_are_whole() -> None:
    assert list(stored()) == list(CASES)
