"""Several runs over one another: their letters, what each came to, and the attentions that not all of them have."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message, joined
from sqrtdk.report.console import TableColumn
from sqrtdk.report.figures import format_number
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.watch.headline import run_headline
from sqrtdk.report.watch.statistics import badness, value_text
from sqrtdk.report.watch.summary import Summary, alarms_with

RUN_LETTERS = string.ascii_uppercase  # names of the runs, in the page's script too
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class PartlyShared:
    """Attentions that some of the runs have and others do not.

    Attributes:
        sites: their labels, in the order of the first run that has them.
        letters: of the runs that have them.
        runs: the folders of these runs, as the caller named them.
    """

    sites: tuple[str, ...]
    letters: tuple[str, ...]
    runs: tuple[str, ...]


def check_letters(runs: int) -> None:
    """Raise an error if there are more runs than letters.

    Raises:
        InvalidValueError: there are more than 26 runs.
    """
    if runs > len(RUN_LETTERS):
        raise InvalidValueError(
            Message("errors.output.runs", most=len(RUN_LETTERS), runs=runs), hint=Message("errors.hint.watch_page")
        )


def partly_shared(runs: Sequence[Summary]) -> tuple[PartlyShared, ...]:
    """Return the attentions that not all runs have, in groups by who has them; runs without any don't count."""
    having: dict[str, list[str]] = {}
    measured = [(letter, run) for letter, run in zip(RUN_LETTERS, runs, strict=False) if run.sites]
    for letter, run in measured:
        for site in run.sites:
            having.setdefault(site.label, []).append(letter)
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, letters in having.items():
        if len(letters) < len(measured):
            groups.setdefault(tuple(letters), []).append(label)
    names = {letter: run.name for letter, run in measured}
    return tuple(
        PartlyShared(tuple(labels), letters, tuple(names[letter] for letter in letters))
        for letters, labels in groups.items()
    )


def shared_sentence(group: PartlyShared) -> Message:
    """Return a sentence that names attentions which only some of the runs have.

    Args:
        group: The attentions; the first five are named, and the others counted.
    """
    names: str = joined([plain(site) for site in group.sites[:_MOST_NAMED]], "comma")
    if (left := len(group.sites) - _MOST_NAMED) > 0:
        names = Message("watch.missing.more_places", places=names, count=left)
    return Message("watch.several.only_in", runs=joined(list(group.letters), "comma"), names=names)


def newest_worst(run: Summary, column: str) -> float:
    """Return the worst value of a statistic over all attentions, each at its newest sample; NaN if none has one.

    Args:
        run: The run.
        column: The statistic's column in the records.
    """
    values = np.array([math.nan, *(float(site.worst(column)[0][-1]) for site in run.sites)])
    return float(values[badness(values, column).argmax()])


def run_state(run: Summary) -> str:
    """Return the alarms of a run by their severities, or that there are none."""
    counts = [alarms_with(severity, count) for severity, count in run.counts.items() if count]
    if counts:
        return joined(counts, "comma")
    return Message("watch.page.good" if run.sites else "watch.page.nothing")


def wrong_runs(runs: Sequence[Summary]) -> list[tuple[str, Summary]]:
    """Return the letters and the runs in which something is wrong, by the headline of each."""
    every = zip(RUN_LETTERS, runs, strict=False)
    return [(letter, run) for letter, run in every if run_headline(run).wrong]


def count_wrong(runs: Sequence[Summary]) -> Message:
    """Return the sentence that says in how many of the runs something is wrong."""
    wrong = wrong_runs(runs)
    if not wrong:
        return Message("watch.several.none_wrong", count=len(runs))
    return Message(
        "watch.several.wrong", wrong=len(wrong), count=len(runs), runs=joined([letter for letter, _ in wrong], "comma")
    )


def several_text(
    runs: Sequence[Summary], columns: Sequence[str], *, width: int = 100, color: bool = False, language: Language = "en"
) -> str:
    """Draw several runs for the terminal: a line each, and the headlines of those in which something is wrong.

    Args:
        runs: The runs.
        columns: Statistics; of each, the worst value of the newest samples is shown.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """

    def draw(printer: Printer) -> None:
        printer.paragraph(printer.said(count_wrong(runs)) + printer.mark("stop").rstrip(), style="bold")
        printer.blank()
        titles = ("run", "steps", "loss", "least")
        table = [TableColumn("")]
        table += [
            TableColumn(Message(f"watch.column.{name}"), right=name != "run", fold=name == "run") for name in titles
        ]
        table += [TableColumn(column, right=True) for column in columns]
        table.append(TableColumn(Message("watch.terminal.alarms"), fold=True))
        printer.table(
            table, [_row(printer, letter, run, columns) for letter, run in zip(RUN_LETTERS, runs, strict=False)]
        )
        printer.paragraph(Message("watch.several.columns_mean"), style="dim")
        for letter, run in wrong_runs(runs):
            head = run_headline(run)
            printer.blank()
            said = printer.said(head.text) + printer.mark("stop").rstrip()
            printer.paragraph(Text.assemble((f"{letter}  ", "bold"), plain(said)))
            if head.fix:
                printer.paragraph(
                    Text.assemble((printer.word("runs.fix.label"), "bold"), plain(printer.said(head.fix))), 3
                )
        if groups := partly_shared(runs):
            printer.blank()
            for group in groups:
                printer.paragraph(shared_sentence(group))

    return printed(draw, width, color, language)


def _row(printer: Printer, letter: str, run: Summary, columns: Sequence[str]) -> list[Text | str]:
    steps = "-" if run.last_step is None else f"{run.first_step}-{run.last_step}"
    known = run.losses[~np.isnan(run.losses)]
    loss, least = "-", "-"
    if len(run.losses):
        loss = format_number(float(run.losses[-1])) if not math.isnan(run.losses[-1]) else "NaN"
        least = format_number(float(known.min())) if len(known) else "NaN"
    tone = "red" if run_headline(run).wrong else ""
    values = (value_text(column, newest_worst(run, column)) for column in columns)
    return [Text(letter, "bold"), run.name, steps, loss, least, *values, printer.line(run_state(run), tone)]
