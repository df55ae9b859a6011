"""Writes a comparison as JSON, schema_version 1; docs/diff.schema.json describes it.

NaN is written as null and an infinity as a string: see `sqrtdk._json`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from sqrtdk._json import document
from sqrtdk.compare.records import DiffReport, OutputDiff

SCHEMA_VERSION = 1
_DRAWN = ("scatter",)  # thousands of points; only the HTML page holds them


def to_json(report: DiffReport) -> str:
    """Return the comparison as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: what `sqrtdk.diff` returned.

    Returns:
        A document with the keys `schema_version`, `tool`, `environment`, `command`, `seed`, `a`, `b`, `forwards`,
        `same`, `pairs`, `unpaired_a`, `unpaired_b`, `paragraphs`, `fail_on`, `exit_code`, `outputs`, `first_module`,
        `outputs_from` and `outputs_missing`.

    Example:
        >>> import json
        >>> from sqrtdk.compare.records import SideInfo
        >>> side = SideInfo("demo", "model")
        >>> json.loads(to_json(DiffReport(side, side, (), (), (), ())))["same"]
        True
    """
    return document(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")},
            "environment": report.environment,
            "command": report.command,
            "seed": report.seed,
            "a": report.a,
            "b": report.b,
            "forwards": report.forwards,
            "same": report.same,
            "pairs": [_fields(pair) for pair in report.pairs],
            "unpaired_a": report.unpaired_a,
            "unpaired_b": report.unpaired_b,
            "paragraphs": report.paragraphs,
            "fail_on": report.fail_on,
            "exit_code": report.exit_code,
            "outputs": [_without_empty(one) for one in report.outputs],
            "first_module": report.first_module,
            "outputs_from": report.outputs_from,
            "outputs_missing": report.outputs_missing,
        }
    )


def _fields(record: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in _DRAWN}


def _without_empty(output: OutputDiff) -> dict[str, Any]:
    """Return the fields of an output, without `reason` if it is empty."""
    fields = dataclasses.asdict(output)
    return fields if output.reason else {name: value for name, value in fields.items() if name != "reason"}
