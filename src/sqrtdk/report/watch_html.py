"""Draws one or several runs as one self-contained HTML page in English and Simplified Chinese.

Names of sites, texts of alarms and reasons come from untrusted records: see `sqrtdk.report.page`.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import string
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sqrtdk._language import Choice
from sqrtdk._sites import site_name
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, Text
from sqrtdk.monitor.samples import NOT_MEASURED, Alarm
from sqrtdk.report import page
from sqrtdk.report.figures import number, percent
from sqrtdk.report.page import both
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import word
from sqrtdk.report.watch_compare import Comparison
from sqrtdk.report.watch_payload import alarms_shown, payload
from sqrtdk.report.watch_statistics import NEWEST, STATISTICS
from sqrtdk.report.watch_summary import Site, Summary
from sqrtdk.report.watch_words import (
    ALARM_WORDS,
    GROUP_WORDS,
    HOW_WORDS,
    MODEL_WORDS,
    SEVERITY_WORDS,
    TERMINAL,
    WORDS,
    missing_text,
)

_TONES = {"critical": "bad", "fail": "bad", "warn": "doubtful", "note": ""}
_MOST_MISSING = 200
_FEW = 6  # up to this many notes stand among the alarms; more of them are folded away
# the recorded text of a schedule: Every(steps=100, urgent=10)
_EVERY = re.compile(r"Every\(steps=(\d+), urgent=(\d+|None)\)")
_VALUES = {
    ("of", "checkpoints"): Text("checkpoints", "检查点"),
    ("trust_remote_code", True): Text("was trusted", "已信任"),
}
_LETTERS = string.ascii_uppercase  # names of the runs on the page


def to_html(runs: Sequence[Summary], compared: Comparison | None = None, language: Choice = "auto") -> str:
    """Draw one run, or several next to each other, as one self-contained page that opens from disk.

    Args:
        runs: one or several runs.
        compared: the comparison, if there are two runs.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.

    Returns:
        A complete HTML document.

    Raises:
        InvalidValueError: there are more runs than letters to name them.
    """
    if len(runs) > len(_LETTERS):
        raise InvalidValueError(
            Message("errors.output.runs", most=len(_LETTERS), runs=len(runs)), hint=Message("errors.hint.watch_report")
        )
    drawn = payload(runs, compared.by if compared else "name")
    context: dict[str, Any] = {
        "version": importlib.metadata.version("sqrtdk"),
        "runs": list(zip(_LETTERS, runs, strict=False)),
        "two": len(runs) > 1,
        "compared": compared,
        "payload": Markup(page.script_json(drawn)),
        "a_column": drawn["samples_a_column"],
        "a_point": drawn["samples_a_point"],
        "statistics": STATISTICS,
        "newest_statistics": {name: STATISTICS[name] for name in NEWEST},
        "drawable": any(run.sites for run in runs),
        "groups": GROUP_WORDS,
        "label": _label,
        "share": _share,
        "result": result,
        "shown_alarms": shown_alarms,
        "in_chinese": in_chinese,
        "said": lambda text: both(Text(text, said(text, "zh"))),
        "how": _how,
        "missing": lambda run: [both(missing_text(entry)) for entry in run.missing[:_MOST_MISSING]],
        "missing_left": lambda run: max(0, len(run.missing) - _MOST_MISSING),
        "newest": newest,
        "value": value,
        "number": number,
        "steps_of": steps_of,
        "model_of": model_of,
        "losses": lambda run: tuple(_loss(float(run.losses[at])) for at in (0, -1)),
        "least_loss": lambda run: _loss(min((x for x in run.losses.tolist() if not math.isnan(x)), default=math.nan)),
        "alarms_with": lambda name, count: both(
            TERMINAL["alarms with"].filled(count=count, what=SEVERITY_WORDS.get(name, Text(name, name)))
        ),
        "severity": lambda name: both(SEVERITY_WORDS.get(name, Text(name, name))),
        "means": lambda name: both(STATISTICS[name].meaning),
        "say": _say,
        "both": both,
        "letters": _LETTERS,
    }
    return page.render("watch", context, languages=True, before=("watch_numbers", "watch_parts"), opens=language)


def result(run: Summary) -> tuple[Markup, str]:
    """Return a run's result and tone: those of the worst alarm. Green requires that everything was measured."""
    for severity, number_of in run.counts.items():
        if number_of:
            return both(SEVERITY_WORDS[severity]), _TONES[severity]
    if run.alarms:  # all are of severities that only a later version knows
        return both(SEVERITY_WORDS["critical"]), "bad"
    if not run.sites:
        return _say("nothing"), "doubtful"
    # a statistic that some kernels lack, or a loss that was never given, is no reason for doubt
    serious = any(entry.kind not in ("statistic", "loss") for entry in run.missing)
    return _say("good"), "doubtful" if serious else "good"


def newest(site: Site, column: str) -> str:
    """Return the worst head's value in the newest sample as text."""
    return value(column, float(site.worst(column)[0][-1]))


def value(column: str, number_of: float | None) -> str:
    """Format a value in the statistic's unit.

    Example:
        >>> value("saturated", 0.25), value("max_logit", 12.5), value("max_logit", None)
        ('25%', '12.5', '-')
    """
    if number_of is None or math.isnan(number_of):
        return "-"
    return percent(number_of) if STATISTICS[column].unit == "%" else number(number_of)


def shown_alarms(run: Summary) -> list[tuple[str, list[tuple[int, Alarm]]]]:
    """Return the page's alarms with their index in the data; many notes form a group apart from the other alarms."""
    every = list(enumerate(run.alarms[at] for at in alarms_shown(run)))
    notes = [one for one in every if one[1].severity == "note"]
    rest = [one for one in every if one[1].severity != "note"]
    return [("rest", rest), ("notes", notes)] if rest and len(notes) > _FEW else [("rest", every)]


def in_chinese(alarm: Alarm) -> str:
    """Return an alarm in Chinese: its recorded English sentence translated, or its fields if no template matches.

    Example:
        >>> in_chinese(Alarm("max_logit", "warn", 5, "", "", site="h.0", index=0, head=3, value=120.0, bar=100.0))
        '最大 logit：h.0，头 3，测得 120，阈值 100'
    """
    sentence = said(alarm.text, "zh")
    if sentence != alarm.text:
        return sentence
    parts = []
    if alarm.site is not None:
        parts.append(site_name(alarm.site, alarm.index or 0))
    if alarm.head is not None:
        parts.append(f"头 {alarm.head}")
    for title, what in (("测得", alarm.value), ("阈值", alarm.bar)):
        if what is not None:
            parts.append(f"{title} {number(what)}")
    name = ALARM_WORDS.get(alarm.name, alarm.name)
    return f"{name}：{'，'.join(parts)}" if parts else name


def steps_of(steps: Sequence[int]) -> Text:
    """Return a list of steps as text.

    Example:
        >>> steps_of([5, 10, 15]).en, steps_of([5, 10, 15]).zh
        ('5, 10, 15', '5、10、15')
    """
    told = list(map(str, steps))
    return Text(word("list comma", "en").join(told), word("list comma", "zh").join(told))


def model_of(run: Summary) -> list[tuple[Markup, Markup]]:
    """Return what the writer recorded on the model and the watch; options left at None, False or [] are dropped."""
    told: list[tuple[str, Any]] = []
    for part in (run.model, run.settings):
        told += list(part.items()) if isinstance(part, dict) else [("", part)]
    named = [
        (key, value) for key, value in told if key == "rows" or not (value is None or value is False or value == [])
    ]
    return [(both(MODEL_WORDS.get(key, Text(key, key))), _setting(key, value)) for key, value in named[:40]]


def _setting(key: str, value: Any) -> Markup:
    if key == "rows" and value is None:
        return _say("all_rows")
    if isinstance(value, str | bool) and (key, value) in _VALUES:
        return both(_VALUES[key, value])
    # not isinstance: True is an int, too
    text = f"{value:,}" if type(value) is int else "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = text[:200]
    every = _EVERY.fullmatch(text) if key == "every" else None
    if every is None:
        return both(Text(text, text))
    often = every[2] != "None"
    en, zh = f"every {every[1]} steps", f"每 {every[1]} 步"
    if often:
        en, zh = f"{en}, {every[2]} while a trend is bad", f"{zh}，趋势不良时每 {every[2]} 步"
    return both(Text(en, zh))


def _how(way: str, count: int) -> Markup:
    what = Text(way, said(way, "zh")) if way.startswith(NOT_MEASURED) else HOW_WORDS.get(way, Text(way, way))
    return both(TERMINAL["samples with"].filled(count=count, what=what))


def _label(key: str, of: str) -> Markup:
    """Return a label for screen readers, in both languages so that the page's script can switch it."""
    en, zh = WORDS[key].en.format(what=WORDS[of].en), WORDS[key].zh.format(what=WORDS[of].zh)
    return Markup('aria-label="{}" data-label-en="{}" data-label-zh="{}"').format(en, en, zh)


def _share(value: float | None) -> str:
    """Format a difference in percent: up to 200% if signs differ, ∞ if a value is infinite."""
    return percent(value) if value is None or math.isfinite(value) else "∞"


def _loss(value: float) -> str:
    return "NaN" if math.isnan(value) else number(value)


def _say(key: str, **parts: object) -> Markup:
    return both(WORDS[key].filled(**parts))
