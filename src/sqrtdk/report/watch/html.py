"""Draws one or several runs as one self-contained HTML page in English and Simplified Chinese.

Names of sites, texts of alarms and reasons come from untrusted records: see `sqrtdk.report.page`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from sqrtdk._language import Choice
from sqrtdk._sites import site_name
from sqrtdk.messages import Message, Text, joined, named
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report import page
from sqrtdk.report.figures import format_number, format_percent
from sqrtdk.report.speaker import Speaker
from sqrtdk.report.watch.compare import RunComparison
from sqrtdk.report.watch.fix import NONFINITE, alarm_fix, root_alarms
from sqrtdk.report.watch.headline import Headline, compared_headline, run_headline
from sqrtdk.report.watch.payload import alarms_shown, watch_page_data
from sqrtdk.report.watch.several import (
    RUN_LETTERS,
    check_letters,
    count_wrong,
    partly_shared,
    run_state,
    shared_sentence,
    wrong_runs,
)
from sqrtdk.report.watch.sites import Site
from sqrtdk.report.watch.statistics import NEWEST, STATISTIC_BY_COLUMN, value_text
from sqrtdk.report.watch.summary import Summary, alarms_with, rank, samples_with, update_sentence

_SEVERITY_TONES = {"critical": "bad", "fail": "bad", "warn": "doubtful", "note": ""}
_MOST_UNMEASURED_ON_PAGE = 200
_ALARMS_UNFOLDED = 6  # the worst alarms of a run stand above its maps; the others are folded away
# the recorded text of a schedule: Every(steps=100, urgent=10)
_EVERY = re.compile(r"Every\(steps=(\d+), urgent=(\d+|None)\)")
_SETTING_MESSAGES = {
    ("of", "checkpoints"): "watch.setting.checkpoints",
    ("trust_remote_code", True): "watch.setting.trusted",
}
WATCH_SCRIPTS = ("watch_numbers", "watch_parts", "watch_view", "watch_charts", "watch_panel", "watch_runs")


def to_html(
    runs: Sequence[Summary], compared: RunComparison | None = None, language: Choice = "auto", live: str = ""
) -> str:
    """Draw one run, or several over one another, as one self-contained page that opens from disk.

    Args:
        runs: one or several runs.
        compared: the comparison, if there are two runs.
        language: "en" or "zh-CN", the language that the page opens in; "auto" follows the reader's browser.
        live: mark of what is drawn, for a page that is served and asks whether there is more; "" for a file.

    Returns:
        A complete HTML document.

    Raises:
        InvalidValueError: there are more runs than letters to name them.
    """
    check_letters(len(runs))
    drawn = watch_page_data(runs, compared.by if compared else "name")
    context = {
        "runs": list(zip(RUN_LETTERS, runs, strict=False)),
        "two": len(runs) > 1,
        "live": live,
        "compared": compared,
        "payload": Markup(page.script_json(drawn)),
        "a_column": drawn["samples_a_column"],
        "a_point": drawn["samples_a_point"],
        "letters": RUN_LETTERS,
        "most_missing": _MOST_UNMEASURED_ON_PAGE,
        "statistics": STATISTIC_BY_COLUMN,
        "newest_statistics": {name: STATISTIC_BY_COLUMN[name] for name in NEWEST},
        "drawable": any(run.sites for run in runs),
        "heads": _heads(runs, compared),
        "partly": [] if compared else partly_shared(runs),
    }
    before = (*WATCH_SCRIPTS, *(["watch_live"] if live else []))
    shown = {**context, **WATCH_FUNCTIONS}
    return page.render("watch", shown, languages=True, before=before, opens=language, asks=bool(live))


def result(run: Summary) -> tuple[str, str]:
    """Return the result of a run and its tone, by the worst alarm.

    Returns:
        The result in words. The tone, which chooses a colour, is "good" only if there is no alarm and everything was
        measured; else it is "bad" or "doubtful".
    """
    for severity, number_of in run.counts.items():
        if number_of:
            return named("words.severity", severity), _SEVERITY_TONES[severity]
    if run.alarms:  # all are of severities that only a later version knows
        return Message("words.severity.critical"), "bad"
    if not run.sites:
        return Message("watch.page.nothing"), "doubtful"
    return Message("watch.page.good"), "doubtful" if run.lacks else "good"


def newest(site: Site, column: str) -> str:
    """Return the worst head's value of a statistic in the newest sample of an attention, formatted for readers.

    Args:
        site: The attention.
        column: Name of the statistic's column in the records.
    """
    return value_text(column, float(site.worst(column)[0][-1]))


def _heads(runs: Sequence[Summary], compared: RunComparison | None) -> list[tuple[str, str, Headline]]:
    """Return what the page says first: letter of the run ("" for all), tone, headline, and what to do."""
    tones = [result(run)[1] for run in runs]
    if compared is not None:
        worst = max(tones, key=("good", "", "doubtful", "bad").index)
        return [_head("", worst, compared_headline(runs[0], runs[1], compared))]
    if len(runs) == 1:  # which needs no letter
        return [_head("", tones[0], run_headline(runs[0]))]
    wrong = wrong_runs(runs)
    count = Headline(count_wrong(runs), count_wrong(runs), (), "", bool(wrong))
    worst = max(tones, key=("good", "", "doubtful", "bad").index)
    tone_of = dict(zip(RUN_LETTERS, tones, strict=False))
    return [_head("", worst, count), *(_head(letter, tone_of[letter], run_headline(run)) for letter, run in wrong)]


def writer_states(run: Summary) -> dict[str, Message]:
    """Return what a served page says about the process that writes the run, for each state of it.

    Returns:
        Sentences for the states "writing", "unknown", "gone", "ended" and "killed". The page asks for the state again
        and again, and shows its sentence.
    """
    step = "-" if run.last_step is None else run.last_step
    states = {"writing": {}, "unknown": {}, "gone": {}, "ended": {"step": step}, "killed": {"step": step}}
    return {name: Message(f"runs.writer.{name}", **values) for name, values in states.items()}


def _head(letter: str, tone: str, head: Headline) -> tuple[str, str, Headline]:
    # a loss of NaN between two samples is wrong although no alarm could be raised
    return letter, "bad" if head.wrong and tone == "good" else tone, head


def shown_alarms(run: Summary) -> list[tuple[str, list[tuple[int, Alarm]]]]:
    """Return the alarms of the page in two groups, "first" and "more", the second folded away.

    Returns:
        Pairs of a group's name and its alarms, each with its index in the data of the page. The roots of the others
        come first, then NaN, then the worst; among equals, the earliest.
    """
    every, roots = list(enumerate(run.alarms[at] for at in alarms_shown(run))), root_alarms(run)

    def order(alarm: Alarm) -> tuple[int, bool, int, int]:
        nan = alarm.name == NONFINITE and alarm.severity != "note"
        at = roots.index(alarm) if alarm in roots else len(roots)
        return at, not nan, -rank(alarm.severity), alarm.step

    every.sort(key=lambda one: order(one[1]))
    return [("first", every[:_ALARMS_UNFOLDED]), ("more", every[_ALARMS_UNFOLDED:])]


def in_chinese(alarm: Alarm) -> str:
    """Return an alarm in Chinese: what it says, or its fields if an older version recorded it in English alone.

    Example:
        >>> in_chinese(Alarm("max_logit", "warn", 5, "", "", site="h.0", index=0, head=3, value=120.0, bar=100.0))
        '最大 logit：h.0，头 3，测得 120，阈值 100'
    """
    chinese = Speaker("zh")
    if isinstance(alarm.text, Message):
        return chinese.said(alarm.text)
    fields = []
    if alarm.site is not None:
        fields.append(site_name(alarm.site, alarm.index or 0))
    if alarm.head is not None:
        fields.append(Message("watch.field.head", head=alarm.head))
    if alarm.value is not None:
        fields.append(Message("watch.field.value", value=format_number(alarm.value)))
    if alarm.bar is not None:
        fields.append(Message("watch.field.bar", bar=format_number(alarm.bar)))
    name = named("watch.alarm", alarm.name)
    if not fields:
        return chinese.said(name)
    return chinese.word("watch.field.named", name=name, fields=chinese.join(fields))


def letters_without(runs: Sequence[tuple[str, Summary]], what: str) -> str:
    """Return the letters of the runs without "alarms", or without anything that is "missing"; "" if there are none."""
    empty = [letter for letter, run in runs if not (run.alarms if what == "alarms" else run.missing)]
    return joined(empty, "comma") if empty else ""


def steps_of(steps: Sequence[int]) -> str:
    """Return a list of steps as text.

    Example:
        >>> steps_of([5, 10, 15]), steps_of([5, 10, 15]).said("zh")
        ('5, 10, 15', '5、10、15')
    """
    return joined(list(map(str, steps)), "comma")


def model_rows(run: Summary) -> list[tuple[str, str]]:
    """Return what the records say about the model and the settings of the watch, as pairs of label and value.

    Options that are None, False or [] are left out, and so is what comes after the fortieth.
    """
    recorded: list[tuple[str, Any]] = []
    for part in (run.model, run.settings):
        recorded += list(part.items()) if isinstance(part, dict) else [("", part)]
    chosen = [
        (key, value) for key, value in recorded if key == "rows" or not (value is None or value is False or value == [])
    ]
    return [(named("watch.model", key), _setting(key, value)) for key, value in chosen[:40]]


def _setting(key: str, value: Any) -> str:
    """Return the value of a setting of the watch as a reader sees it."""
    if key == "rows" and value is None:
        return Message("watch.setting.all_rows")
    if isinstance(value, str | bool) and (key, value) in _SETTING_MESSAGES:
        return Message(_SETTING_MESSAGES[key, value])
    # not isinstance: True is an int, too
    shown = (
        f"{value:,}" if type(value) is int else "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    )
    shown = shown[:200]
    every = _EVERY.fullmatch(shown) if key == "every" else None
    if every is None:
        return shown
    if every[2] == "None":
        return Message("watch.setting.every", steps=every[1])
    return Message("watch.setting.every_urgent", steps=every[1], urgent=every[2])


def labelled(key: str, of: str) -> Markup:
    """Return HTML attributes that label an element for screen readers; the page's script switches the language.

    Args:
        key: Id of the label in the catalogue, after "watch.page."; it has the part `what`.
        of: Id of that part, after "watch.page.".
    """
    label = Message(f"watch.page.{key}", what=Message(f"watch.page.{of}")).text
    return Markup('aria-label="{}" data-label-en="{}" data-label-zh="{}"').format(label.en, label.en, label.zh)


def share_apart(value: float | None) -> str:
    """Return a difference (`Pair.apart`) in percent: up to 200% if the signs differ, ∞ if a value is infinite.

    Example:
        >>> share_apart(0.75), share_apart(float("inf"))
        ('75%', '∞')
    """
    return format_percent(value) if value is None or math.isfinite(value) else "∞"


def loss_shown(run: Summary, at: int) -> str:
    """Return the loss of one step as text; NaN is written "NaN".

    Args:
        run: The run.
        at: Index in `run.losses`.
    """
    return _loss_text(float(run.losses[at]))


def least_loss(run: Summary) -> str:
    """Return the least loss of a run as text; "NaN" if no loss is a number."""
    return _loss_text(min((loss for loss in run.losses.tolist() if not math.isnan(loss)), default=math.nan))


def _loss_text(loss: float) -> str:
    return "NaN" if math.isnan(loss) else format_number(loss)


def statistic_groups() -> dict[bool, Text]:
    """Return the titles of the two groups of statistics on the page.

    Returns:
        Under True, the title of those that the table of the newest sample shows; under False, that of the others.
    """
    return {True: Message("watch.group.most_used").text, False: Message("watch.group.more").text}


WATCH_FUNCTIONS = {  # what the template of runs calls, beside the functions of every template
    function.__name__: function
    for function in (
        alarm_fix, alarms_with, in_chinese, labelled, least_loss, letters_without, loss_shown, model_rows, newest,
        result, run_state, samples_with, share_apart, shared_sentence, shown_alarms, statistic_groups, steps_of,
        update_sentence, value_text, writer_states,
    )
}  # fmt: skip
