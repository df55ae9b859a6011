"""Writes a comparison with a side that answers as JSON, schema_version 1; docs/answers.schema.json describes it.

NaN is written as null and an infinity as a string: see `sqrtdk._json`.
"""

from __future__ import annotations

from sqrtdk._json import json_document
from sqrtdk.answers.records import AnswersReport
from sqrtdk.messages import fields
from sqrtdk.report.json_values import record_fields, tool

SCHEMA_VERSION = 1


def to_json(report: AnswersReport) -> str:
    """Return the comparison as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: What `sqrtdk.answers.diff_answers` returned.

    Returns:
        A document with the fields of the report, `schema_version`, `tool`, `same`, `exit_code` and
        `paragraph_messages`. Beside the text of a cause are its `message_id` and `values`.
    """
    causes = [record_fields(cause) | fields(cause.text) for cause in report.causes]
    paragraphs = [fields(paragraph) for paragraph in report.paragraphs]
    own = record_fields(report) | {"causes": causes, "paragraph_messages": paragraphs}
    return json_document(
        {"schema_version": SCHEMA_VERSION, "tool": tool(), **own, "same": report.same, "exit_code": report.exit_code}
    )
