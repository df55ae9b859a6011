"""Writes the report of a check as JSON, schema_version 1; docs/check.schema.json describes it.

NaN is written as null and an infinity as a string: see `sqrtdk._json`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sqrtdk._json import json_document
from sqrtdk.audit.cache import CacheForecast
from sqrtdk.audit.records import CheckReport, JudgedCall, LawAnswer
from sqrtdk.messages import fields
from sqrtdk.tracing.records import NotAttention, NotMeasured

_BULKY = ("logit_histogram", "entropy_histogram")  # only the HTML report draws them


def to_json(report: CheckReport) -> str:
    """Return the report as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        A document with the keys `schema_version`, `tool`, `environment`, `command`, `seed`, `model`, `mode`,
        `calls`, `not_attention`, `not_measured`, `findings`, `laws`, `sources`, `fail_on` and `exit_code`. A report
        with the forecast of a quantised cache also has `kv_cache`, and one with those of all formats `kv_formats`.

    Example:
        >>> import json
        >>> from sqrtdk.audit.records import ModelInfo
        >>> text = to_json(CheckReport(ModelInfo("demo", "Decoder", 1), "static", (), (), (), ()))
        >>> json.loads(text)["model"]
        {'id': 'demo', 'class': 'Decoder', 'parameters': 1}
    """
    return json_document(to_document(report))


def forecast_to_json(forecast: CacheForecast) -> str:
    """Return the forecast of a quantised cache as one JSON document, as the report of a check holds it."""
    return json_document(_forecast(forecast))


def to_document(report: CheckReport) -> dict[str, Any]:
    """Return the document of `to_json` before conversion to JSON types: it may hold NaN, infinities and records."""
    return {
        "schema_version": report.schema_version,
        "tool": report.tool,
        "environment": report.environment,
        "command": report.command,
        "seed": report.seed,
        "model": {"id": report.model.id, "class": report.model.cls, "parameters": report.model.parameters},
        "mode": report.mode,
        "calls": [_call(judged) for judged in report.calls],
        "not_attention": [_with_reason(entry) for entry in report.not_attention],
        "not_measured": [_with_reason(entry) for entry in report.not_measured],
        "findings": [_fields(finding) | fields(finding.message) for finding in report.findings],
        "laws": [_law(answer) for answer in report.laws],
        "sources": [_fields(item) for item in report.sources],
        "fail_on": report.fail_on,
        "exit_code": report.exit_code,
    } | _forecasts(report)


def _call(judged: JudgedCall) -> dict[str, Any]:
    record = _fields(judged.call)
    stats = None
    if judged.call.stats is not None:
        stats = {name: value for name, value in _fields(judged.call.stats).items() if name not in _BULKY}
    verdict = {
        "verdict": judged.verdict,
        "health": judged.health,
        "mistake": judged.mistake,
        "declared_by": judged.declared_by,
        "declared_by_message": fields(judged.declared_by),
        "declared_at": judged.declared_at,
        "expected": judged.expected,
        "reason": judged.reason,
    }
    return record | verdict | fields(judged.reason) | {"stats": stats}


def _law(answer: LawAnswer) -> dict[str, Any]:
    """Return the fields of an answer without its finding, which is listed in `findings`."""
    return {name: value for name, value in _fields(answer).items() if name != "finding"} | fields(answer.reason)


def _forecasts(report: CheckReport) -> dict[str, Any]:
    one = {} if report.kv_cache is None else {"kv_cache": _forecast(report.kv_cache)}
    return one | ({"kv_formats": list(map(_forecast, report.kv_formats))} if report.kv_formats else {})


def _forecast(forecast: CacheForecast) -> dict[str, Any]:
    silent = {
        name: list(map(_with_reason, entries))
        for name, entries in (("not_measured", forecast.not_measured), ("without_cache", forecast.without_cache))
    }
    calls = [
        _fields(call) | {"blame": [_fields(blame) | fields(blame.text) for blame in call.blame]}
        for call in forecast.calls
    ]
    return _fields(forecast) | {"calls": calls} | silent


def _with_reason(entry: NotAttention | NotMeasured) -> dict[str, Any]:
    return _fields(entry) | fields(entry.reason)


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields uncopied: `dataclasses.asdict` would deep-copy objects of the model, which runs their code."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
