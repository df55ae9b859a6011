"""Draws a comparison with a side that answers as text: both sides, the result, the nearest changes of A."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.answers.records import AnswersReport, EditResidue
from sqrtdk.answers.sentences import nats
from sqrtdk.compare.records import SideInfo
from sqrtdk.messages import Message, joined
from sqrtdk.report.console import TONE_STYLES, TableColumn
from sqrtdk.report.environment import premises, print_premises
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

MOST_EDITS = 6


def to_text(report: AnswersReport, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Draw the report as text of at most `width` columns.

    Args:
        report: What `sqrtdk.answers.diff_answers` returned.
        width: In columns, at least 40.
        color: Whether to write ANSI colours.
        language: "en" or "zh".

    Returns:
        The text, ending with a newline.
    """

    def draw(printer: Printer) -> None:
        printer.paragraph(_model(printer, report.a), most=printer.console.width)
        printer.paragraph(_answering(printer, report), most=printer.console.width)
        print_premises(printer, premises(report.environment))
        printer.blank()
        for paragraph in report.paragraphs:
            printer.paragraph(paragraph)
        printer.blank()
        fixes = [cause for cause in report.causes if cause.fix]
        if fixes:
            printer.paragraph(Message("diff.terminal.to_change"), style="bold")
        for cause in fixes:
            printer.paragraph(Text.assemble((cause.name, "bold red"), "  ", plain(printer.said(cause.fix))), 2)
        if fixes:
            printer.blank()
        columns = (
            TableColumn(Message("answers.table.change"), prose=True),
            TableColumn(Message("answers.table.residue"), right=True),
            TableColumn(Message("answers.table.floor"), right=True),
        )
        printer.table(columns, [_row(edit) for edit in shown_edits(report, MOST_EDITS)])
        printer.blank()
        printer.paragraph(_summary(printer, report), most=printer.console.width)

    return printed(draw, width, color, language)


def answers_summary_line(report: AnswersReport, language: Language = "en") -> str:
    """Return the last line of the report: what it took, the result, and the exit code."""
    return _summary(Speaker(language), report).plain


def shown_edits(report: AnswersReport, most: int) -> list[EditResidue]:
    """Return the nearest changes, the unchanged model among them, each kind of change once."""
    nearest: dict[tuple[str, ...], EditResidue] = {}
    for edit in report.edits:
        nearest.setdefault(edit.texts, edit)
    rows = list(nearest.values())
    shown = rows[:most]
    unchanged = next((row for row in rows if not row.names), None)
    if unchanged is not None and unchanged not in shown:
        shown[-1:] = [unchanged]
    return shown


def edit_text(edit: EditResidue) -> str:
    """Return what is changed, as one sentence."""
    return joined(edit.texts) if edit.texts else Message("answers.table.unchanged")


def _row(edit: EditResidue) -> Sequence[Text | str]:
    floor = "-" if edit.floor is None else nats(edit.floor)
    return edit_text(edit), nats(edit.residue), floor


def _model(printer: Printer, side: SideInfo) -> Text:
    facts = printer.join([side.module_class, side.dtype, Message("words.attentions", count=f"{side.calls:,}")])
    return Text.assemble(("A", "bold magenta"), "  ", (plain(side.name), "bold"), (f"  {plain(facts)}", "dim"))


def _answering(printer: Printer, report: AnswersReport) -> Text:
    counts = {name: f"{getattr(report, name):,}" for name in ("prompts", "tokens", "rows")}
    facts = plain(printer.said(Message("answers.table.asked", kind=answering_word(report.b), **counts)))
    return Text.assemble(("B", "bold magenta"), "  ", (plain(report.b.name), "bold"), (f"  {facts}", "dim"))


def answering_word(side: SideInfo) -> str:
    """Return the kind of a side that answers."""
    try:
        return Message(f"answers.kind.{side.kind}")
    except KeyError:
        return side.kind


def verdict_word(report: AnswersReport) -> tuple[str, str]:
    """Return the verdict in one or two words, and its tone."""
    name = report.verdict.replace(" ", "_")
    tone = "bad" if report.same is False else "good" if report.same else "doubtful"
    return Message(f"answers.verdict.{name}"), tone


def _summary(speaker: Speaker, report: AnswersReport) -> Text:
    spent = Message("answers.table.spent", requests=f"{report.requests:,}", forwards=f"{report.forwards:,}")
    word, tone = verdict_word(report)
    text = Text(speaker.said(spent)).append(speaker.mark("stop"))
    text.append(speaker.said(word), style=TONE_STYLES[tone])
    return text.append(speaker.word("terminal.exit", code=report.exit_code, fail_on=report.fail_on))
