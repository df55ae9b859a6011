"""The report as one HTML file that needs nothing else: no network, no font, no library.

Whatever comes from the model is text. It passes `plain` and the template's autoescape on its way into the page, and
the data block has no `<`, `>` or `&`. Should something slip through all the same, the page's content security
policy runs only the one script whose hash it names, and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import math
from collections import Counter
from typing import Any

import jinja2
from markupsafe import Markup

from sqrtdk.audit.records import SEVERITIES, VERDICTS, CheckReport
from sqrtdk.report import figures
from sqrtdk.report.fold import fold_calls, fold_findings, values
from sqrtdk.report.payload import payload
from sqrtdk.report.plain import plain

_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
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
    style, script = _asset("report.css"), _asset("report.js")
    calls = report.calls
    verdicts = Counter(judged.verdict for judged in calls)
    severities = Counter(finding.severity for finding in report.findings)
    without = [judged.call.stats_reason or "no reason given" for judged in calls if judged.call.stats is None]
    context: dict[str, Any] = {
        "report": report,
        "version": importlib.metadata.version("sqrtdk"),
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": Markup(_data(payload(report))),
        "folds": fold_calls(calls),
        "findings": fold_findings(report.findings),
        "verdicts": [(name, verdicts[name]) for name in VERDICTS if verdicts[name]],
        "severities": [(name, severities[name]) for name in reversed(SEVERITIES) if severities[name]],
        "several_kinds": len({judged.call.kind for judged in calls}) > 1,
        "why_no_stats": sorted(set(without)),
        "has_stats": len(without) < len(calls),
    }
    return _environment().get_template("report.html").render(context)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sqrtdk.report", "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        number=figures.number,
        ratio=figures.ratio,
        percent=figures.percent,
        count=figures.count,
        health=figures.health,
        values=values,
        dial=_dial,
    )
    return environment


def _visible(value: Any) -> Any:
    """Make every text that a template prints visible; our own markup is left alone."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _dial(ratio: float | None) -> float | None:
    """Place a ratio on a logarithmic dial from -1 to 1 with the textbook value 1 in the middle."""
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return None
    return round(max(-1.0, min(1.0, math.log2(ratio) / _DIAL_OCTAVES)), 3)


def _data(value: Any) -> str:
    """Write JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for char, escape in _UNSAFE.items():
        text = text.replace(char, escape)
    return text


def _asset(name: str) -> str:
    return importlib.resources.files("sqrtdk.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
