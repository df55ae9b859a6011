"""The report as JSON, schema_version 1; docs/check.schema.json describes it.

JSON has no NaN and no infinity. NaN is written as null: there was nothing to measure. An infinite value is a
measurement, and the worst one, so it is written as the string "Infinity" or "-Infinity".
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from typing import Any

from sqrtdk.audit.records import SCHEMA_VERSION, CheckReport, JudgedCall

_BULKY = ("logit_histogram", "entropy_histogram")  # drawn in the HTML report only


def to_json(report: CheckReport) -> str:
    """Return the report as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        A document with the keys `schema_version`, `tool`, `environment`, `command`, `seed`, `model`, `mode`,
        `calls`, `not_attention`, `not_measured`, `findings`, `fail_on` and `exit_code`.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> text = to_json(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()))
        >>> json.loads(text)["model"]
        {'id': 'demo', 'class': 'Decoder', 'parameters': 1}
    """
    return _pretty(_finite(to_document(report))) + "\n"


def to_document(report: CheckReport) -> dict[str, Any]:
    """Return what `to_json` writes, as Python data; numbers may still be NaN or infinite."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")},
        "environment": report.environment,
        "command": report.command,
        "seed": report.seed,
        "model": {"id": report.model.id, "class": report.model.cls, "parameters": report.model.parameters},
        "mode": report.mode,
        "calls": [_call(judged) for judged in report.calls],
        "not_attention": [dataclasses.asdict(item) for item in report.not_attention],
        "not_measured": [dataclasses.asdict(item) for item in report.not_measured],
        "findings": [dataclasses.asdict(item) for item in report.findings],
        "fail_on": report.fail_on,
        "exit_code": report.exit_code,
    }


def _call(judged: JudgedCall) -> dict[str, Any]:
    record = dataclasses.asdict(judged.call)
    stats = record.pop("stats")
    if stats is not None:
        stats = {name: value for name, value in stats.items() if name not in _BULKY}
    verdict = {
        "verdict": judged.verdict,
        "mistake": judged.mistake,
        "declared_by": judged.declared_by,
        "expected": judged.expected,
        "reason": judged.reason,
    }
    return record | verdict | {"stats": stats}


def _finite(value: Any) -> Any:
    """Replace what JSON cannot hold, at any depth."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    return str(value)  # e.g. a torch.dtype or a version object in `environment`


def _pretty(value: Any, indent: str = "") -> str:
    """Indent as `json.dumps(indent=2)` does, but keep containers of plain values on one line."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, (dict, list)) for child in children):
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    lines = [inner + _pretty(item, inner) for item in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"
