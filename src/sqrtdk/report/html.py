"""The report of a check as one HTML file that needs nothing else.

Whatever comes from the model is text: see `sqrtdk.report.page`. The data block has no `<`, `>` or `&`.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from markupsafe import Markup

from sqrtdk.audit.records import SEVERITIES, UNMEASURED, VERDICTS, CheckReport, JudgedCall
from sqrtdk.report import figures, notebook, page
from sqrtdk.report.fold import fold_calls, fold_findings, values
from sqrtdk.report.kv_cache import section
from sqrtdk.report.payload import payload
from sqrtdk.report.places import places
from sqrtdk.tracing.records import AttentionCall

_RESULTS = {  # the word for the whole, and its tone
    "failed": ("Failed", "bad"),
    "findings": ("Findings", "bad"),
    "incomplete": ("Incomplete", "doubtful"),
    "warnings": ("Passed", "doubtful"),
    "scales": ("Scales passed", ""),
    "passed": ("Passed", "good"),
}
_DIAL_OCTAVES = 8.0  # the ratio's dial reaches from 2^-8 to 2^8


def to_html(report: CheckReport) -> str:
    """Draw the report as one self-contained page that opens from disk.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        A complete HTML document.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> page = to_html(CheckReport(ModelInfo("<b>", "Decoder", 1), "static", (), (), (), ()))
        >>> "<b>" in page, "&lt;b&gt;" in page
        (False, True)
    """
    calls = report.calls
    verdicts = Counter((judged.verdict, judged.sound_but_failing) for judged in calls)
    severities = Counter(finding.severity for finding in report.findings)
    without = [judged.call.stats_reason or "no reason given" for judged in calls if judged.call.stats is None]
    context: dict[str, Any] = {
        "report": report,
        "version": importlib.metadata.version("sqrtdk"),
        "payload": Markup(page.script_json(payload(report))),
        "folds": fold_calls(calls),
        "findings": fold_findings(report.findings),
        "verdicts": [(*key, verdicts[key]) for key in product(VERDICTS, (False, True)) if verdicts[key]],
        "result": _RESULTS[report.outcome],
        "not_measured": [entry for entry in report.not_measured if not report.repeated(entry)],
        "not_attention": [entry for entry in report.not_attention if not report.repeated(entry)],
        "severities": [(name, severities[name]) for name in reversed(SEVERITIES) if severities[name]],
        "several_kinds": len({judged.call.kind for judged in calls}) > 1,
        "why_no_stats": sorted(set(without)),
        "has_stats": len(without) < len(calls),
        "kv_cache": section(report.kv_cache),
        "number": figures.number,
        "ratio": figures.ratio,
        "percent": figures.percent,
        "count": figures.count,
        "worst_head": figures.worst_head,
        "values": values,
        "dial": _dial,
        "written": places,
    }
    return page.render("report", context)


def to_table(report: CheckReport) -> str:
    """The table of the sites and the findings, for a notebook."""
    findings = fold_findings(report.findings)
    return _table(report.calls, report=report, result=_RESULTS[report.outcome], findings=findings, judges=True)


def judged_table(judged: JudgedCall) -> str:
    """The line of one call and its steps, for a notebook."""
    return _table([judged], call=judged.call, judges=True)


def call_table(call: AttentionCall) -> str:
    """The line of one call that nobody judged, and its steps, for a notebook."""
    return _table([JudgedCall(call, UNMEASURED)], call=call)


def _table(calls: Sequence[JudgedCall], **context: Any) -> str:
    functions = {"ratio": figures.ratio, "percent": figures.percent, "count": figures.count}
    shown = {"folds": fold_calls(calls), "worst_head": figures.worst_head, "findings": (), **functions}
    return notebook.fragment("check", {"report": None, "call": None, "judges": False, **shown, **context})


def _dial(ratio: float | None) -> float | None:
    """Place a ratio on a logarithmic dial from -1 to 1 with the textbook value 1 in the middle."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return None
    return round(max(-1.0, min(1.0, math.log2(ratio) / _DIAL_OCTAVES)), 3)
