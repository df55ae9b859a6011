"""Writes a comparison as JSON, schema_version 1; docs/diff.schema.json describes it.

NaN is written as null and an infinity as a string: see `sqrtdk._json`.
"""

from __future__ import annotations

from typing import Any

from sqrtdk._json import json_document
from sqrtdk.compare.backward.records import BackwardDiff
from sqrtdk.compare.fixes import fix_of
from sqrtdk.compare.records import DiffReport, OutputDiff, PairDiff
from sqrtdk.messages import fields
from sqrtdk.report.json_values import reasoned, record_fields, tool

SCHEMA_VERSION = 1
_DRAWN = ("scatter", "mends", "codes", "lacks", "written")  # points, which only the HTML page holds; what `fix` says


def to_json(report: DiffReport) -> str:
    """Return the comparison as one JSON document, ASCII only, that ends with a newline.

    Args:
        report: what `sqrtdk.diff` returned.

    Returns:
        A document with the keys `schema_version`, `tool`, `environment`, `command`, `seed`, `a`, `b`, `forwards`,
        `same`, `pairs`, `unpaired_a`, `unpaired_b`, `paragraphs`, `paragraph_messages`, `fail_on`, `exit_code`,
        `outputs`, `first_module`, `outputs_from`, `outputs_missing`, `module_causes`, `weights`, and
        `backward` if gradients were compared.

    Example:
        >>> import json
        >>> from sqrtdk.compare.records import SideInfo
        >>> side = SideInfo("demo", "model")
        >>> json.loads(to_json(DiffReport(side, side, (), (), (), ())))["same"]
        True
    """
    return json_document(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": tool(),
            "environment": report.environment,
            "command": report.command,
            "seed": report.seed,
            "a": report.a,
            "b": report.b,
            "forwards": report.forwards,
            "same": report.same,
            "pairs": [_pair(pair) for pair in report.pairs],
            "unpaired_a": [reasoned(call) for call in report.unpaired_a],
            "unpaired_b": [reasoned(call) for call in report.unpaired_b],
            "paragraphs": report.paragraphs,
            "paragraph_messages": [fields(paragraph) for paragraph in report.paragraphs],
            "fail_on": report.fail_on,
            "exit_code": report.exit_code,
            "outputs": [_output(one) for one in report.outputs],
            "first_module": report.first_module,
            "outputs_from": report.outputs_from,
            "outputs_missing": report.outputs_missing,
            "module_causes": [record_fields(cause) | fields(cause.text) for cause in report.module_causes],
            "weights": report.weights,
        }
        | ({} if report.backward is None else {"backward": _backward(report.backward)})
    )


def _pair(pair: PairDiff) -> dict[str, Any]:
    causes = [record_fields(cause, _DRAWN) | fields(cause.text) | {"fix": fix_of(cause)} for cause in pair.causes]
    return reasoned(pair, _DRAWN) | {"causes": causes, "stages": [reasoned(stage) for stage in pair.stages]}


def _backward(found: BackwardDiff) -> dict[str, Any]:
    faults = [record_fields(fault) | fields(fault.text) for fault in found.faults]
    return record_fields(found) | {"faults": faults, "same": found.same}


def _output(output: OutputDiff) -> dict[str, Any]:
    """Return the fields of an output, without those of its reason if it has none."""
    if output.reason:
        return reasoned(output)
    return {name: value for name, value in record_fields(output).items() if name != "reason"}
