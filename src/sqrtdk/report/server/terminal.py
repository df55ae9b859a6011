"""Draws the report of a server as text: the address, the laws, what is broken, and what asking cost."""

from __future__ import annotations

from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.answers.server_report import ServerReport
from sqrtdk.messages import Message, said, word
from sqrtdk.report.check.laws import counts, draw_laws
from sqrtdk.report.console import FINDING_STYLES
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed


def to_text(report: ServerReport, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Draw the report as text of at most `width` columns.

    Args:
        report: What `check_server` returned.
        width: In columns, at least 40.
        color: Whether to write ANSI colours.
        language: "en" or "zh".

    Example:
        >>> from sqrtdk.audit.records import KEPT, LawAnswer
        >>> answers = (LawAnswer("repeats", "", KEPT), LawAnswer("prefix", "", KEPT))
        >>> print(to_text(ServerReport("http://127.0.0.1:8000/v1", "vllm", "", answers, requests=6, tokens=720)))
        http://127.0.0.1:8000/v1  vllm
        <BLANKLINE>
        Laws  2 kept, 0 broken, 0 not asked
          repeats, prefix  kept
        <BLANKLINE>
        6 requests, 720 tokens. Exit code 0 (fail-on: fail).
        <BLANKLINE>
    """

    def draw(printer: Printer) -> None:
        head = printer.line(report.url, "bold")
        head.append(f"  {plain('  '.join(filter(None, (report.kind, report.model))))}", style="not bold")
        printer.paragraph(head)
        printer.blank()
        draw_laws(printer, report.laws, reasons=True)
        _findings(printer, report)
        for note in report.notes:
            printer.paragraph(Message("servers.page.note", note=note))
        printer.paragraph(summary_of(report))

    return printed(draw, width, color, language)


def summary_of(report: ServerReport) -> str:
    """Return the last line: what asking cost, and the exit code."""
    id = "servers.page.cost" if report.tokens else "servers.page.cost_untold"
    return Message(
        id, requests=report.requests, tokens=f"{report.tokens:,}", code=report.exit_code, fail_on=report.fail_on
    )


def server_summary_line(report: ServerReport, language: Language) -> str:
    """Return the counts of the laws and the last line, for stderr beside JSON."""
    return (
        said(counts(report.laws), language)
        + word("words.mark.semicolon", language)
        + said(summary_of(report), language)
    )


def _findings(printer: Printer, report: ServerReport) -> None:
    for finding in report.findings:
        line = Text(f" {printer.word(f'words.severity.{finding.severity}')} ", FINDING_STYLES.get(finding.severity, ""))
        line.append(f" {plain(printer.said(finding.message))}", style="not bold default on default")
        printer.paragraph(line)
        printer.paragraph(Message("terminal.fix", fix=finding.fix), 4)
        printer.paragraph(Message("terminal.source", source=finding.source), 4, "dim")
    if report.findings:
        printer.blank()
