"""Writes the report of a check as JSON, schema_version 1; docs/check.schema.json describes it.

NaN is written as null and an infinity as a string: see `sqrtdk._json`.
"""

from __future__ import annotations

from typing import Any

from sqrtdk._json import json_document
from sqrtdk.audit.records import CheckReport, JudgedCall
from sqrtdk.messages import fields
from sqrtdk.report.json_values import reasoned, record_fields
from sqrtdk.report.kv.json import forecast_fields

_LISTED = ("finding",)  # of a law: it stands in `findings`
_BULKY = ("logit_histogram", "entropy_histogram")  # only the HTML report draws them


def to_json(report: CheckReport) -> str:
    """Return the report as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        A document with the keys `schema_version`, `tool`, `environment`, `command`, `seed`, `model`, `mode`,
        `kv_bytes_per_token`, `calls`, `not_attention`, `not_measured`, `findings`, `laws`, `sources`, `fail_on` and
        `exit_code`. A report with the forecast of a quantised cache also has `kv_cache`, one with those of all
        formats `kv_formats`, and one of several ranks `ranks`.

    Example:
        >>> import json
        >>> from sqrtdk.audit.records import ModelInfo
        >>> text = to_json(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()))
        >>> json.loads(text)["model"]
        {'id': 'demo', 'class': 'Decoder', 'parameters': 1}
    """
    return json_document(to_document(report))


def to_document(report: CheckReport) -> dict[str, Any]:
    """Return the document of `to_json` as a dict, before its values are converted to JSON types.

    It may hold NaN, infinities and records. Its fields are those of `docs/check.schema.json`.
    """
    return (
        {
            "schema_version": report.schema_version,
            "tool": report.tool,
            "environment": report.environment,
            "command": report.command,
            "seed": report.seed,
            "model": {"id": report.model.id, "class": report.model.cls, "parameters": report.model.parameters},
            "mode": report.mode,
            "kv_bytes_per_token": report.kv_bytes_per_token,
            "calls": [_call(judged) for judged in report.calls],
            "not_attention": [reasoned(entry) for entry in report.not_attention],
            "not_measured": [reasoned(entry) for entry in report.not_measured],
            "findings": [record_fields(finding) | fields(finding.message) for finding in report.findings],
            "laws": [reasoned(answer, _LISTED) for answer in report.laws],
            "sources": [record_fields(item) for item in report.sources],
            "fail_on": report.fail_on,
            "exit_code": report.exit_code,
        }
        | _forecasts(report)
        | ({} if report.ranks is None else {"ranks": record_fields(report.ranks)})
    )


def _call(judged: JudgedCall) -> dict[str, Any]:
    """Return the fields of a judged call for JSON: those of the call, then those of its verdict."""
    # the verdict stands behind the fields of the call, as in the schema
    stats = judged.call.stats
    return (
        record_fields(judged.call)
        | {
            "verdict": judged.verdict,
            "health": judged.health,
            "mistake": judged.mistake,
            "declared_by": judged.declared_by,
            "declared_by_message": fields(judged.declared_by),
            "declared_at": judged.declared_at,
            "expected": judged.expected,
            "reason": judged.reason,
        }
        | fields(judged.reason)
        | {"stats": None if stats is None else record_fields(stats, _BULKY)}
    )


def _forecasts(report: CheckReport) -> dict[str, Any]:
    one = {} if report.kv_cache is None else {"kv_cache": forecast_fields(report.kv_cache)}
    return one | ({"kv_formats": list(map(forecast_fields, report.kv_formats))} if report.kv_formats else {})
