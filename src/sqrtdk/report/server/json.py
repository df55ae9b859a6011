"""Writes the report of a server as JSON, schema_version 1; docs/server.schema.json describes it."""

from __future__ import annotations

from typing import Any

from sqrtdk._json import json_document
from sqrtdk.answers.server_report import ServerReport
from sqrtdk.messages import fields
from sqrtdk.report.json_values import reasoned, record_fields, tool

_WITHOUT = ("finding", "about", "site", "by_length")  # of a law: a finding stands in `findings`, the others are empty
_UNSET = ("site", "at", "call", "consequence")  # of a finding: a server has no modules


def to_json(report: ServerReport) -> str:
    """Return the report as one JSON document, ASCII only, that ends with a newline.

    Neither the key nor what a prompt or an answer held is in it.

    Example:
        >>> import json
        >>> sorted(json.loads(to_json(ServerReport("http://127.0.0.1:8000/v1", "vllm", "", ()))))[:4]
        ['command', 'exit_code', 'fail_on', 'findings']
    """
    return json_document(_document(report))


def _document(report: ServerReport) -> dict[str, Any]:
    """Return the document of `to_json` as a dict, before its values are converted to JSON types."""
    return {
        "schema_version": 1,
        "tool": tool(),
        "command": report.command,
        "server": {"url": report.url, "kind": report.kind, "model": report.model},
        "laws": [reasoned(answer, _WITHOUT) for answer in report.laws],
        "findings": [record_fields(finding, _UNSET) | fields(finding.message) for finding in report.findings],
        "notes": [{"text": note} | fields(note) for note in report.notes],
        "requests": report.requests,
        "tokens": report.tokens,
        "fail_on": report.fail_on,
        "exit_code": report.exit_code,
    }
