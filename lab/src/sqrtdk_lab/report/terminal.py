"""Writes the register of claims, one claim, or what came out of a run, as terminal text and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as Line

from sqrtdk.extending import Language, json_document
from sqrtdk.messages import Message, Text, in_language, said, word
from sqrtdk.report.console import Cell, TableColumn, console_text, paragraph, print_table
from sqrtdk.report.plain import plain
from sqrtdk_lab.claim import EXPLANATION_IDS, Claim, Expect, spelled
from sqrtdk_lab.figures import format_figure
from sqrtdk_lab.judge import Check, PartAnswer, deciding_checks
from sqrtdk_lab.record import Record
from sqrtdk_lab.register import CLAIMS
from sqrtdk_lab.report import latex
from sqrtdk_lab.report.plots import plot_files
from sqrtdk_lab.runner import Done

ANSWER_COLOURS = {"holds": "green", "fails": "red", "partly": "blue", "depends": "yellow", "undecided": "magenta"}
_MOST_IN_DETAIL = 3  # claims of a run that are shown in detail; more would not fit on a screen


def register_text(language: Language = "en", *, width: int = 100, color: bool = False) -> str:
    """Return all claims by group (id, sources, statement), then the names of the explanations among the sources."""

    def draw(console: Console) -> None:
        for group, claims in groupby(CLAIMS.values(), key=lambda claim: claim.group):
            paragraph(console, Line(word(f"lab.group.{group}", language), style="bold"))
            rows = [
                (Line(claim.id, style="cyan"), " ".join(claim.sources[:5]), in_language(claim.statement, language))
                for claim in claims
            ]
            print_table(console, _columns(3), rows, indent=2, language=language)
            console.print()
        paragraph(console, Line(word("lab.sources", language), style="bold"))
        paragraph(console, word("lab.sources_mean", language), 2)
        for source in EXPLANATION_IDS:
            paragraph(console, said(spelled(source), language), 2)

    return console_text(draw, width, color)


def register_json() -> str:
    """Return the register as one JSON document."""
    return json_document({"claims": [_described(claim) for claim in CLAIMS.values()]})


def claim_text(claim: Claim, language: Language = "en", *, width: int = 100, color: bool = False) -> str:
    """Return one claim as text: its statement, how it is measured, and what counts as true."""

    def draw(console: Console) -> None:
        sources = word("words.mark.list", language).join(said(spelled(source), language) for source in claim.sources)
        paragraph(console, Line.assemble((claim.id, "bold cyan"), (f"  {sources}", "dim")))
        paragraph(console, in_language(claim.statement, language))
        console.print()
        rows = [
            (_label("lab.formula", language), latex.to_text(claim.formula)),
            (_label("lab.method", language), in_language(claim.method, language)),
            (_label("lab.control", language), in_language(claim.control, language)),
        ]
        for part in claim.parts:
            if part.reason is not None:
                rows.append(
                    (_label("lab.parts.not_measurable", language), _with_reason(part.text, part.reason, language))
                )
                continue
            bars = word("words.mark.semicolon", language).join(
                bar_in_symbols(expect, language) for expect in part.expects
            )
            told = word("lab.terminal.bars", language, part=in_language(part.text, language), bars=bars)
            rows.append((_label("lab.terminal.true_if", language), told))
        if claim.condition is not None:
            rows.append((_label("lab.terminal.condition", language), in_language(claim.condition, language)))
        for name, value in claim.parameters.items():
            told = f"{name} = {_short(value)}"
            if name in claim.quick:
                told = word("lab.terminal.quick", language, parameter=told, value=_short(claim.quick[name]))
            rows.append((_label("lab.terminal.parameters", language), told))
        print_table(console, _columns(2), rows, language=language)

    return console_text(draw, width, color)


def claim_json(claim: Claim) -> str:
    """Return one claim as a JSON document."""
    return json_document(_described(claim))


def verdicts_text(
    done: Sequence[Done],
    folder: Path,
    report: Path,
    language: Language = "en",
    *,
    width: int = 100,
    color: bool = False,
) -> str:
    """Return what came out of a run: each verdict with the figures that decided it, and where the files are.

    Up to three claims are shown with their statement, condition, parts, reason and plots. Of more, each has two lines.
    """

    def draw(console: Console) -> None:
        if len(done) > _MOST_IN_DETAIL:
            widest = max(len(plain(one.record.id)) for one in done)
            answers = max(cell_len(word(f"lab.answer.{answer}", language)) for answer in ANSWER_COLOURS)
            for one in done:
                _compact(console, one, (widest, answers), language)
        else:
            for number, one in enumerate(done):
                if number:
                    console.print()
                _detailed(console, one, language)
        counts = tally([one.record.outcome.verdict.answer for one in done], language)
        console.print()
        paragraph(console, counts)
        rows = [
            (_label("lab.terminal.records", language), plain(str(folder))),
            (_label("lab.terminal.report", language), plain(str(report))),
        ]
        print_table(console, _columns(2), rows, language=language)

    return console_text(draw, width, color)


def _compact(console: Console, one: Done, widths: tuple[int, int], language: Language) -> None:
    """Print a claim on two lines. Of two figures that decided it, the one that is missed is shown."""
    record, verdict = one.record, one.record.outcome.verdict
    answer = _answer(verdict.answer, language)
    answer.append(" " * (widths[1] - answer.cell_len))
    line = Line.assemble((plain(record.id).ljust(widths[0]), "cyan"), "  ", answer, "  ", _time(one, language))
    paragraph(console, line, most=console.width)
    for check in deciding_checks(verdict)[-1:]:
        paragraph(console, _decided_by(check, language), 2, most=console.width)
    if record.doubt is not None:
        paragraph(console, _doubt(record, language), 2, most=console.width)


def _detailed(console: Console, one: Done, language: Language) -> None:
    record, verdict = one.record, one.record.outcome.verdict
    answer = _answer(verdict.answer, language)
    head = Line.assemble((plain(record.id), "bold cyan"), "  ", answer, "  ", _time(one, language))
    paragraph(console, head, most=console.width)
    paragraph(console, plain(in_language(record.statement, language)))
    rows: list[tuple[Cell, ...]] = []
    if record.doubt is not None:
        rows.append((_label("lab.terminal.control", language), _doubt(record, language)))
    if record.condition is not None:
        rows.append((_label("lab.terminal.condition", language), plain(in_language(record.condition, language))))
    # Where all parts agree, the statement says what they say: only those that were not measured are news.
    alike = verdict.answer in ("holds", "fails")
    parts = [part for part in verdict.findings if not alike or part.state == "not_measurable"]
    rows += [(_label("lab.terminal.part", language), _part(part, language)) for part in parts]
    deciding = deciding_checks(verdict)
    for check in deciding:
        told = _decided_by(check, language)
        if len(deciding) > 1:
            side = Message(f"lab.answer.{'holds' if check.met else 'fails'}")
            told = word("lab.terminal.finding", language, met=side, part=told)
        rows.append((_label("lab.terminal.decided", language), told))
    if record.condition is None:
        why = first_sentence(in_language(record.why, language))
        rows.append((_label("lab.why", language), plain(why)))
    rows += [(_label("lab.terminal.plot", language), plain(str(path))) for path in _plots(one) if path.suffix == ".png"]
    print_table(console, _columns(2), rows, indent=2, language=language)


def _answer(answer: str, language: Language) -> Line:
    return Line(word(f"lab.answer.{answer}", language), style=ANSWER_COLOURS[answer])


def _time(one: Done, language: Language) -> Line:
    seconds = Message("lab.terminal.seconds", seconds=f"{one.record.duration_s:.1f}")
    return Line(said(Message("lab.terminal.kept") if one.reused else seconds, language), style="dim")


def _doubt(record: Record, language: Language) -> Line:
    """Return that the control decides nothing, and why."""
    warning = Message("lab.terminal.control_undecided")
    if record.doubt == "same":
        same = Message(f"lab.answer.{record.control.verdict.answer}")
        warning = Message("lab.terminal.control_same", answer=same)
    unsound = word("lab.terminal.unsound", language)
    return Line.assemble((unsound, "bold red"), "  ", said(warning, language))


def _part(part: PartAnswer, language: Language) -> str:
    of_part = {"met": "holds", "missed": "fails", "undecided": "undecided", "not_measurable": "not_measurable"}
    text = plain(in_language(part.text, language))
    if part.reason is not None:
        text = _with_reason(part.text, part.reason, language)
    return word("lab.terminal.finding", language, met=Message(f"lab.answer.{of_part[part.state]}"), part=text)


def _with_reason(part: Text, reason: Text, language: Language) -> str:
    """Return a part that is not measurable, with the reason."""
    part_text, reason_text = (plain(in_language(text, language)) for text in (part, reason))
    return word("lab.terminal.because", language, part=part_text, reason=reason_text.rstrip(".。"))


def _decided_by(check: Check, language: Language) -> str:
    """Return a figure with its place, its interval and its bar."""
    figure = check.figure
    at = word("words.mark.list", language).join(f"{name} = {place}" for name, place in figure.at.items())
    name = word("lab.terminal.bar_at", language, bar=figure.name, at=at) if at else figure.name
    low, high = map(format_figure, (check.low, check.high))
    if check.low == check.high:
        bar = f"= {low}"
    elif math.isinf(check.high):
        bar = f">= {low}"
    elif math.isinf(check.low):
        bar = f"<= {high}"
    else:
        bar = word("lab.terminal.between", language, low=low, high=high)
    return plain(word("lab.terminal.against", language, figure=name, value=str(figure), bar=bar))


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9+\-])|(?<=[。！？])")


def first_sentence(text: str) -> str:
    """Return the first sentence of a paragraph.

    Example:
        >>> first_sentence("It is 0.5, i.e. half. The rest is 0."), first_sentence("是 0.5。其余为 0。")
        ('It is 0.5, i.e. half.', '是 0.5。')
    """
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def _plots(one: Done) -> list[Path]:
    """Return the files of the plots: SVG and PNG of each."""
    if one.path is None:
        return []
    return [path for plot in one.record.plots for path in plot_files(one.record, plot, one.path.parent)]


def verdicts_json(done: Sequence[Done], report: Path) -> str:
    """Return what came out of a run as one JSON document; all other figures are in the records."""
    rows = [
        {
            "id": one.record.id,
            "verdict": one.record.outcome.verdict.answer,
            "control": one.record.control.verdict.answer,
            "sound": one.record.sound,
            "decided": one.record.decided,
            "condition": None if one.record.condition is None else one.record.condition.en,
            "why": one.record.why.en,
            "parts": [
                {"text": part.text.en, "met": part.met, "state": part.state}
                for part in one.record.outcome.verdict.findings
            ],
            "decided_by": [asdict(check) for check in deciding_checks(one.record.outcome.verdict)],
            "quick": one.record.quick,
            "seed": one.record.seed,
            "duration_s": one.record.duration_s,
            "reused": one.reused,
            "record": None if one.path is None else str(one.path),
            "plots": list(map(str, _plots(one))),
        }
        for one in done
    ]
    return json_document({"claims": rows, "report": str(report)})


def tally(answers: Sequence[str], language: Language = "en") -> str:
    """Return the number of claims by verdict, as a sentence.

    Example:
        >>> tally(["holds", "fails", "holds"]), tally(["depends"], "zh")
        ('3 claims: 2 hold, 1 fails.', '1 条说法：1 条视条件而定。')
    """

    counts = {answer: answers.count(answer) for answer in ANSWER_COLOURS if answer in answers}
    each = [word(f"lab.tally.{answer}", language, count=count) for answer, count in counts.items()]
    return word("lab.tally.all", language, count=len(answers), parts=word("words.mark.comma", language).join(each))


def bar_in_symbols(expect: Expect, language: Language = "en") -> str:
    """Return a bar (the bound on a figure) in symbols, with the point that it applies to.

    Example:
        >>> bar_in_symbols(Expect("peak", low=0.5)), bar_in_symbols(Expect("mean", -1.0, 1.0, {"d_k": 64}))
        ('peak >= 0.5', '-1 <= mean <= 1 at d_k = 64')
        >>> bar_in_symbols(Expect("mean", -1.0, 1.0, {"d_k": 64}), "zh")
        '-1 <= mean <= 1，d_k = 64'
    """
    low = f"{format_figure(expect.low)} <= " if math.isfinite(expect.low) else ""
    high = f" <= {format_figure(expect.high)}" if math.isfinite(expect.high) else ""
    bounds = f"{expect.figure} >= {format_figure(expect.low)}" if low and not high else f"{low}{expect.figure}{high}"
    at = word("words.mark.list", language).join(f"{name} = {place}" for name, place in expect.at.items())
    return word("lab.terminal.bar_at", language, bar=bounds, at=at) if at else bounds


def _described(claim: Claim) -> dict[str, Any]:
    texts = {name: getattr(claim, name) for name in ("statement", "method", "control")}
    return {
        "id": claim.id,
        "group": claim.group,
        "sources": claim.sources,
        **{name: {"en": text.en, "zh": text.zh} for name, text in texts.items()},
        "formula": claim.formula,
        "condition": None if claim.condition is None else {"en": claim.condition.en, "zh": claim.condition.zh},
        "parts": [
            {
                "en": part.text.en,
                "zh": part.text.zh,
                "bars": [bar_in_symbols(expect) for expect in part.expects],
                "reason": None if part.reason is None else {"en": part.reason.en, "zh": part.reason.zh},
            }
            for part in claim.parts
        ],
        "parameters": claim.parameters,
        "quick": claim.quick,
        "flipped": claim.flipped,
    }


def _columns(number_of: int) -> tuple[TableColumn, ...]:
    """Return the columns of a table without titles whose last column is prose."""
    return (*(TableColumn("") for _ in range(number_of - 1)), TableColumn("", prose=True))


def _label(id: str, language: Language) -> Line:
    return Line(word(id, language), style="dim")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
