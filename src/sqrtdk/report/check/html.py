"""Draws the report of a check as one self-contained HTML file.

Everything that comes from the model is escaped: see `sqrtdk.report.page`. The data block has no `<`, `>` or `&`.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from markupsafe import Markup

from sqrtdk._language import Choice
from sqrtdk._sites import site_name
from sqrtdk.audit.records import UNMEASURED, VERDICTS, CheckReport, JudgedCall
from sqrtdk.messages import Message, named, text_of_value, word
from sqrtdk.report import figures, notebook, page
from sqrtdk.report.check.consequences import consequences
from sqrtdk.report.check.fold import Fold, expected_text, fold_calls, severity_counts, values
from sqrtdk.report.check.headline import OUTCOME_TONES, headline
from sqrtdk.report.check.laws import LAW_FUNCTIONS
from sqrtdk.report.check.payload import check_page_data
from sqrtdk.report.check.places import at_text, source_lines
from sqrtdk.report.environment import premises, shown_environment
from sqrtdk.report.kv.forecast import cache_section, formats_section
from sqrtdk.report.plain import plain
from sqrtdk.tracing.records import AttentionCall

_DIAL_OCTAVES = 8.0  # the dial of the scale ratio reaches from 2^-8 to 2^8
_MOST_NOTES_OPEN = 6  # notes on values that were made up or chosen for the user; they stand beside the figures


def to_html(report: CheckReport, language: Choice = "auto") -> str:
    """Draw the report as one self-contained page, in English and Chinese, that opens from disk.

    Args:
        report: what `sqrtdk.check` returned.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.

    Returns:
        A complete HTML document.

    Raises:
        InvalidValueError: the language is none of these.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> page = to_html(CheckReport(ModelInfo("<b>", "Decoder", 1), "static", (), (), (), ()))
        >>> "<b>" in page, "&lt;b&gt;" in page
        (False, True)
    """
    calls = report.calls
    verdicts = Counter((judged.verdict, judged.sound_but_failing) for judged in calls)
    without = [judged.call.stats_reason or Message("words.no_reason") for judged in calls if judged.call.stats is None]
    version = importlib.metadata.version("sqrtdk")  # that drew the page
    context = {
        "report": report,
        "payload": Markup(page.script_json(check_page_data(report))),
        "headline": headline(report),
        "folds": fold_calls(calls),
        "causes": consequences(report.findings),
        "verdicts": [
            (name, failing, total, Message("words.calls_with", count=total, what=Message(f"words.verdict.{name}")))
            for name, failing in product(VERDICTS, (False, True))
            if (total := verdicts[name, failing])
        ],
        "notes": premises(report.environment)[:_MOST_NOTES_OPEN],
        "tone": OUTCOME_TONES[report.outcome],
        "environment": [*shown_environment({**report.environment, "sqrtdk": version})],
        "not_measured": [entry for entry in report.not_measured if not report.repeated(entry)],
        "not_attention": [entry for entry in report.not_attention if not report.repeated(entry)],
        "severities": severity_counts(report.findings),
        "several_kinds": len({judged.call.kind for judged in calls}) > 1,
        "why_no_stats": sorted(set(without)),
        "has_stats": len(without) < len(calls),
        "kv_cache": cache_section(report.kv_cache) or formats_section(report.kv_formats),
    }
    return page.render(
        "report", {**context, **CHECK_FUNCTIONS}, languages=True, before=("report_sites",), opens=language
    )


def health_word(name: str) -> str:
    """Return the word that a page shows for the health of a call.

    Args:
        name: A severity, "good", or "unmeasured".
    """
    return Message(f"words.verdict.{UNMEASURED}") if name == UNMEASURED else named("words.severity", name)


def breakable(path: str) -> Markup:
    """Return a module path or a file path as HTML that may wrap after each dot or slash.

    Example:
        >>> breakable("model.layers.0")
        Markup('model.<wbr>layers.<wbr>0')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[./])(?=\w)", plain(path)))


def searched_text(fold: Fold) -> str:
    """Return the text, in lower case, that the site filter of the page searches for this line.

    It has the sites, the formula, the verdict, health and mistake in both languages, and the source lines.
    """
    first = fold.first
    words = [site_name(judged.call.site) for judged in fold.calls]
    mistake = text_of_value(named("words.mistake", first.mistake or ""))
    words += [first.call.formula, mistake.en, mistake.zh, first.verdict, word(f"words.verdict.{first.verdict}", "zh")]
    health = text_of_value(health_word(first.health))
    words += [health.en, health.zh, first.call.kind, *source_lines(first.call)]
    return "\n".join((fold.site, *words)).lower()


def check_table(report: CheckReport) -> str:
    """Return the headline, the table of sites and the findings as HTML for a notebook (no script)."""
    outcome = {"headline": headline(report), "tone": OUTCOME_TONES[report.outcome]}
    return _table(report.calls, report=report, causes=consequences(report.findings), judges=True, **outcome)


def judged_table(judged: JudgedCall) -> str:
    """Return one judged call as HTML for a notebook: its line of the table and the steps of its formula."""
    return _table([judged], call=judged.call, judges=True)


def call_table(call: AttentionCall) -> str:
    """Return one call without a verdict as HTML for a notebook: its line of the table and the steps of its formula."""
    return _table([JudgedCall(call, UNMEASURED)], call=call)


def _table(calls: Sequence[JudgedCall], **context: Any) -> str:
    values = {"report": None, "call": None, "judges": False, "causes": (), "folds": fold_calls(calls)}
    return notebook.table_fragment("check", {**values, **CHECK_FUNCTIONS, **context})


def dial_place(ratio: float | None) -> float | None:
    """Return where a scale ratio stands on the page's logarithmic dial, from -1 to 1.

    The textbook ratio 1 is at 0. A ratio beyond the ends is drawn at the end. Returns None if there is nothing to draw:
    the ratio is unknown, not finite, or not above 0.

    Example:
        >>> dial_place(1.0), dial_place(2.0) == -dial_place(0.5), dial_place(None)
        (0.0, True, None)
    """
    if ratio is None or not math.isfinite(ratio) or ratio <= 0:
        return None
    return round(max(-1.0, min(1.0, math.log2(ratio) / _DIAL_OCTAVES)), 3)


CHECK_FUNCTIONS = LAW_FUNCTIONS | {  # what the templates of a check call, beside the functions of every template
    function.__name__: function
    for function in (
        at_text, breakable, dial_place, expected_text, health_word, searched_text, source_lines, values,
        figures.worst_head,
    )
}  # fmt: skip
