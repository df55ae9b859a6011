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
from sqrtdk.lab.claim import EXPLANATIONS, GROUPS, Claim, Expect, spelled
from sqrtdk.lab.figures import number
from sqrtdk.lab.record import Record
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.runner import Done
from sqrtdk.messages import Text, say
from sqrtdk.report import latex
from sqrtdk.report.console import Cell, Column, drawn, paragraph, print_table
from sqrtdk.report.lab_words import ANSWERS, TALLY, TERMINAL, WORDS
from sqrtdk.report.plain import plain
from sqrtdk.report.terminal_words import word

COLOURS = {"holds": "green", "fails": "red", "partly": "blue", "depends": "yellow", "undecided": "magenta"}


def register_text(language: Language = "en", *, width: int = 100, color: bool = False) -> str:
    """Return all claims by group (id, sources, statement), then the names of the explanations among the sources."""

    def draw(console: Console) -> None:
        for group, claims in groupby(CLAIMS.values(), key=lambda claim: claim.group):
            paragraph(console, Line(say(GROUPS[group], language), style="bold"))
            rows = [
                (Line(claim.id, style="cyan"), " ".join(claim.sources[:5]), say(claim.statement, language))
                for claim in claims
            ]
            print_table(console, _columns(3), rows, indent=2, language=language)
            console.print()
        paragraph(console, Line(say(WORDS["sources"], language), style="bold"))
        paragraph(console, say(WORDS["sources_mean"], language), 2)
        for source in EXPLANATIONS:
            paragraph(console, say(spelled(source), language), 2)

    return drawn(draw, width, color)


def register_json() -> str:
    """Return the register as one JSON document."""
    return _json.document({"claims": [_described(claim) for claim in CLAIMS.values()]})


def claim_text(claim: Claim, language: Language = "en", *, width: int = 100, color: bool = False) -> str:
    """Return one claim as text: its statement, how it is measured, and what counts as true."""

    def draw(console: Console) -> None:
        sources = word("list comma", language).join(say(spelled(source), language) for source in claim.sources)
        paragraph(console, Line.assemble((claim.id, "bold cyan"), (f"  {sources}", "dim")))
        paragraph(console, say(claim.statement, language))
        console.print()
        rows = [
            (_word(WORDS["formula"], language), latex.to_text(claim.formula)),
            (_word(WORDS["method"], language), say(claim.method, language)),
            (_word(WORDS["control"], language), say(claim.control, language)),
        ]
        for part in claim.parts:
            bars = say(TERMINAL["semicolon"], language).join(bar(expect, language) for expect in part.expects)
            told = say(TERMINAL["bars"], language, part=say(part.text, language), bars=bars)
            rows.append((_word(TERMINAL["true_if"], language), told))
        if claim.condition is not None:
            rows.append((_word(TERMINAL["condition"], language), say(claim.condition, language)))
        for name, value in claim.parameters.items():
            told = f"{name} = {_short(value)}"
            if name in claim.quick:
                told = say(TERMINAL["quick"], language, parameter=told, value=_short(claim.quick[name]))
            rows.append((_word(TERMINAL["parameters"], language), told))
        print_table(console, _columns(2), rows, language=language)

    return drawn(draw, width, color)


def claim_json(claim: Claim) -> str:
    """Return one claim as a JSON document."""
    return _json.document(_described(claim))


def verdicts_text(
    done: Sequence[Done], folder: Path, language: Language = "en", *, width: int = 100, color: bool = False
) -> str:
    """Return the verdicts of a run, one line a claim. A mixed or undecided claim shows its condition and its parts."""

    def draw(console: Console) -> None:
        rows: list[tuple[Cell, ...]] = []
        for one in done:
            record, verdict = one.record, one.record.outcome.verdict
            answer = Line(say(ANSWERS[verdict.answer], language), style=COLOURS[verdict.answer])
            seconds = "kept" if one.reused else "seconds"
            time = Line(say(TERMINAL[seconds], language, seconds=record.duration_s), style="dim")
            rows.append((Line(plain(record.id), style="cyan"), answer, time, _on(record, language)))
            if record.doubt is not None:
                same = say(ANSWERS[record.control.verdict.answer], language)
                warning = say(TERMINAL[f"control_{record.doubt}"], language, answer=same)
                rows.append(("", Line(say(TERMINAL["unsound"], language), style="bold red"), "", warning))
        print_table(console, _columns(4), rows, language=language)
        counts = tally([one.record.outcome.verdict.answer for one in done], language)
        told = say(TERMINAL["records"], language, counts=counts, folder=plain(str(folder)))
        console.print()
        paragraph(console, told, most=console.width)

    return drawn(draw, width, color)


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
            "parts": [{"text": part.text.en, "met": part.met} for part in one.record.outcome.verdict.findings],
            "quick": one.record.quick,
            "seed": one.record.seed,
            "duration_s": one.record.duration_s,
            "reused": one.reused,
            "record": None if one.path is None else str(one.path),
        }
        for one in done
    ]
    return _json.document({"claims": rows})


def tally(answers: Sequence[str], language: Language = "en") -> str:
    """Return the number of claims by verdict, as a sentence.

    Example:
        >>> tally(["holds", "fails", "holds"]), tally(["depends"], "zh")
        ('3 claims: 2 hold, 1 fails.', '1 条说法：1 条视条件而定。')
    """

    def counted(name: str, count: int, **parts: object) -> str:
        return say(TALLY[f"{name}_1" if count == 1 else name], language, count=count, **parts)

    each = [counted(answer, answers.count(answer)) for answer in ANSWERS if answer in answers]
    return counted("all", len(answers), parts=say(TALLY["comma"], language).join(each))


def bar(expect: Expect, language: Language = "en") -> str:
    """Return a bar (the bound on a figure) in symbols, with the point that it applies to.

    Example:
        >>> bar(Expect("peak", low=0.5)), bar(Expect("mean", -1.0, 1.0, {"d_k": 64}))
        ('peak >= 0.5', '-1 <= mean <= 1 at d_k = 64')
        >>> bar(Expect("mean", -1.0, 1.0, {"d_k": 64}), "zh")
        '-1 <= mean <= 1，d_k = 64'
    """
    low = f"{number(expect.low)} <= " if math.isfinite(expect.low) else ""
    high = f" <= {number(expect.high)}" if math.isfinite(expect.high) else ""
    text = f"{expect.figure} >= {number(expect.low)}" if low and not high else f"{low}{expect.figure}{high}"
    at = word("list comma", language).join(f"{name} = {place}" for name, place in expect.at.items())
    return say(TERMINAL["bar at"], language, bar=text, at=at) if at else text


def _on(record: Record, language: Language) -> str:
    """Return a mixed verdict's condition and parts; empty if the claim holds or fails as a whole."""
    verdict = record.outcome.verdict
    if verdict.answer in ("holds", "fails"):
        return ""
    words = {True: ANSWERS["holds"], False: ANSWERS["fails"], None: ANSWERS["undecided"]}
    answers = [
        say(TERMINAL["finding"], language, met=say(words[part.met], language), part=plain(say(part.text, language)))
        for part in verdict.findings
    ]
    parts = say(TERMINAL["semicolon"], language).join(answers)
    return parts if record.condition is None else f"{plain(say(record.condition, language))}\n{parts}"


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
            {"en": part.text.en, "zh": part.text.zh, "bars": [bar(expect) for expect in part.expects]}
            for part in claim.parts
        ],
        "parameters": claim.parameters,
        "quick": claim.quick,
        "flipped": claim.flipped,
    }


def _columns(number_of: int) -> tuple[Column, ...]:
    """Return the columns of a table without titles whose last column is prose."""
    return (*(Column("") for _ in range(number_of - 1)), Column("", prose=True))


def _word(text: Text, language: Language) -> Line:
    return Line(say(text, language), style="dim")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
