"""Writes the register of claims, one claim, or the verdicts of a run, as terminal text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from sqrtdk import _json
from sqrtdk._language import Language
from sqrtdk.lab.claim import EXPLANATION_IDS, Claim, Expect, spelled
from sqrtdk.lab.figures import format_figure
from sqrtdk.lab.record import Record
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.runner import Done
from sqrtdk.messages import Message, in_language, said, word
from sqrtdk.report import latex
from sqrtdk.report.console import Cell, TableColumn, console_text, paragraph, print_table
from sqrtdk.report.plain import plain

ANSWER_COLOURS = {"holds": "green", "fails": "red", "partly": "blue", "depends": "yellow", "undecided": "magenta"}


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
    return _json.json_document({"claims": [_described(claim) for claim in CLAIMS.values()]})


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
    return _json.json_document(_described(claim))


def verdicts_text(
    done: Sequence[Done], folder: Path, language: Language = "en", *, width: int = 100, color: bool = False
) -> str:
    """Return the verdicts of a run, one line a claim. A mixed or undecided claim shows its condition and its parts."""

    def draw(console: Console) -> None:
        rows: list[tuple[Cell, ...]] = []
        for one in done:
            record, verdict = one.record, one.record.outcome.verdict
            answer = Line(word(f"lab.answer.{verdict.answer}", language), style=ANSWER_COLOURS[verdict.answer])
            seconds = Message("lab.terminal.seconds", seconds=f"{record.duration_s:.1f}")
            time = Line(said(Message("lab.terminal.kept") if one.reused else seconds, language), style="dim")
            rows.append((Line(plain(record.id), style="cyan"), answer, time, _on(record, language)))
            if record.doubt is not None:
                same = Message(f"lab.answer.{record.control.verdict.answer}")
                warning = Message("lab.terminal.control_undecided")
                if record.doubt == "same":
                    warning = Message("lab.terminal.control_same", answer=same)
                unsound = Line(word("lab.terminal.unsound", language), style="bold red")
                rows.append(("", unsound, "", said(warning, language)))
        print_table(console, _columns(4), rows, language=language)
        counts = tally([one.record.outcome.verdict.answer for one in done], language)
        told = word("lab.terminal.records", language, counts=counts, folder=plain(str(folder)))
        console.print()
        paragraph(console, told, most=console.width)

    return console_text(draw, width, color)


def verdicts_json(done: Sequence[Done]) -> str:
    """Return the verdicts of a run as one JSON document; the figures are in the records."""
    rows = [
        {
            "id": one.record.id,
            "verdict": one.record.outcome.verdict.answer,
            "control": one.record.control.verdict.answer,
            "sound": one.record.sound,
            "decided": one.record.decided,
            "condition": None if one.record.condition is None else one.record.condition.en,
            "parts": [
                {"text": part.text.en, "met": part.met, "state": part.state}
                for part in one.record.outcome.verdict.findings
            ],
            "quick": one.record.quick,
            "seed": one.record.seed,
            "duration_s": one.record.duration_s,
            "reused": one.reused,
            "record": None if one.path is None else str(one.path),
        }
        for one in done
    ]
    return _json.json_document({"claims": rows})


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


def _on(record: Record, language: Language) -> str:
    """Return a mixed verdict's condition and parts; empty if the claim holds or fails as a whole."""
    verdict = record.outcome.verdict
    if verdict.answer in ("holds", "fails"):
        return ""
    of_part = {"met": "holds", "missed": "fails", "undecided": "undecided", "not_measurable": "not_measurable"}
    answers = [
        word(
            "lab.terminal.finding",
            language,
            met=Message(f"lab.answer.{of_part[part.state]}"),
            part=plain(in_language(part.text, language)),
        )
        for part in verdict.findings
    ]
    parts = word("words.mark.semicolon", language).join(answers)
    return parts if record.condition is None else f"{plain(in_language(record.condition, language))}\n{parts}"


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
            {"en": part.text.en, "zh": part.text.zh, "bars": [bar_in_symbols(expect) for expect in part.expects]}
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
