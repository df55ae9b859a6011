"""A run, or several, as one HTML page in English and Simplified Chinese that needs nothing else.

Names of sites, texts of alarms and reasons come from records, which are a stranger's: see `sqrtdk.report.page`.
"""

from __future__ import annotations

import importlib.metadata
import math
import string
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.text import Text
from sqrtdk.report import page
from sqrtdk.report.figures import number, percent
from sqrtdk.report.page import both
from sqrtdk.report.watch_compare import Comparison
from sqrtdk.report.watch_payload import alarms_shown, payload
from sqrtdk.report.watch_summary import STATISTICS, Site, Summary
from sqrtdk.report.watch_words import SEVERITY_WORDS, STATISTICS_MEAN, WORDS, WORST_WORDS, missing_text

_TONES = {"critical": "bad", "fail": "bad", "warn": "doubtful", "note": ""}
_MOST_MISSING = 200
_LETTERS = string.ascii_uppercase  # a run is called by


def to_html(runs: Sequence[Summary], compared: Comparison | None = None) -> str:
    """Draw one run, or several next to each other, as one self-contained page that opens from disk.

    Args:
        runs: one, or some.
        compared: what differs, where they are two.

    Returns:
        A complete HTML document.

    Raises:
        InvalidValueError: there are more runs than letters to call them by.
    """
    if len(runs) > len(_LETTERS):
        raise InvalidValueError(
            f"a page has at most {len(_LETTERS)} runs; got {len(runs)}", hint="`sqrtdk watch report RUN` draws each."
        )
    drawn = payload(runs)
    context: dict[str, Any] = {
        "version": importlib.metadata.version("sqrtdk"),
        "runs": list(zip(_LETTERS, runs, strict=False)),
        "two": len(runs) > 1,
        "compared": compared,
        "payload": Markup(page.script_json(drawn)),
        "a_column": drawn["samples_a_column"],
        "statistics": STATISTICS,
        "result": result,
        "shown_alarms": lambda run: [run.alarms[at] for at in alarms_shown(run)],
        "missing": lambda run: [both(missing_text(entry)) for entry in run.missing[:_MOST_MISSING]],
        "missing_left": lambda run: max(0, len(run.missing) - _MOST_MISSING),
        "newest": newest,
        "value": value,
        "number": number,
        "model_of": model_of,
        "losses": lambda run: tuple(number(float(run.losses[at])) for at in (0, -1)),
        "least_loss": lambda run: number(min((x for x in run.losses.tolist() if not math.isnan(x)), default=math.nan)),
        "severity": lambda name: both(SEVERITY_WORDS.get(name, Text(name, name))),
        "means": lambda name: both(STATISTICS_MEAN[name]),
        "worst_word": lambda name: both(WORST_WORDS[STATISTICS[name].worst]),
        "say": _say,
        "both": both,
        "letters": _LETTERS,
    }
    return page.render("watch", context, languages=True)


def result(run: Summary) -> tuple[Markup, str]:
    """The word for a run and its tone: that of the worst alarm; green only where all was measured."""
    for severity, number_of in run.counts.items():
        if number_of:
            return both(SEVERITY_WORDS[severity]), _TONES[severity]
    if run.alarms:
        return both(SEVERITY_WORDS["critical"]), "bad"
    if not run.sites:
        return _say("nothing"), "doubtful"
    serious = any(entry.kind not in ("statistic", "loss") for entry in run.missing)
    return _say("good"), "doubtful" if serious else "good"


def newest(site: Site, column: str) -> str:
    """The worst head of the newest sample, as it is shown."""
    return value(column, float(site.worst(column)[0][-1]))


def value(column: str, number_of: float | None) -> str:
    """A value in the statistic's unit.

    Example:
        >>> value("saturated", 0.25), value("max_logit", 12.5), value("max_logit", None)
        ('25%', '12.5', '-')
    """
    if number_of is None or math.isnan(number_of):
        return "-"
    return percent(number_of) if STATISTICS[column].unit == "%" else number(number_of)


def model_of(run: Summary) -> list[tuple[str, str]]:
    """What the writer said of the model and of the watch."""
    told = []
    for part in (run.model, run.settings):
        told += [(str(key), str(item)) for key, item in part.items()] if isinstance(part, dict) else [("", str(part))]
    return [(key, text[:200]) for key, text in told[:40]]


def _say(key: str, **parts: object) -> Markup:
    text = WORDS[key]
    return both(Text(text.en.format(**parts), text.zh.format(**parts))) if parts else both(text)
