"""The register, one claim, and the verdicts of a run, for the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as Line

from sqrtdk import _json
from sqrtdk.lab.claim import GROUPS, Claim, Expect
from sqrtdk.lab.figures import number
from sqrtdk.lab.judge import Verdict
from sqrtdk.lab.register import CLAIMS
from sqrtdk.lab.runner import Done
from sqrtdk.lab.text import Text
from sqrtdk.report.console import drawn

COLOURS = {"holds": "green", "fails": "red", "depends": "yellow", "undecided": "magenta"}
WORDS = {
    "holds": Text("holds", "成立"),
    "fails": Text("fails", "不成立"),
    "depends": Text("depends", "视情况而定"),
    "undecided": Text("undecided", "未定"),
    "Method": Text("Method", "方法"),
    "Control": Text("Control", "对照"),
    "Formula": Text("Formula", "公式"),
    "Parameters": Text("Parameters", "参数"),
    "True if": Text("True if", "判据"),
}


def say(text: Text, language: str) -> str:
    """The text in one language, "en" or "zh"."""
    return str(getattr(text, language))


def register_text(language: str = "en", *, width: int = 100, color: bool = False) -> str:
    """All claims by group: id, sources, statement."""

    def draw(console: Console) -> None:
        for group, claims in groupby(CLAIMS.values(), key=lambda claim: claim.group):
            console.print(say(GROUPS[group], language), style="bold")
            table = _grid(3)
            for claim in claims:
                table.add_row(Line(claim.id, style="cyan"), " ".join(claim.sources[:5]), say(claim.statement, language))
            console.print(Padding(table, (0, 0, 1, 2)))

    return drawn(draw, width, color)


def register_json() -> str:
    """The register as one JSON document."""
    return _json.document({"claims": [_described(claim) for claim in CLAIMS.values()]})


def claim_text(claim: Claim, language: str = "en", *, width: int = 100, color: bool = False) -> str:
    """One claim: what it says, how it is measured, and what counts as true."""

    def draw(console: Console) -> None:
        console.print(Line(claim.id, style="bold cyan"), Line(f"  {', '.join(claim.sources)}", style="dim"), sep="")
        console.print(say(claim.statement, language) + "\n")
        table = _grid(2)
        for name, text in (("Formula", claim.formula), ("Method", claim.method), ("Control", claim.control)):
            table.add_row(_word(name, language), text if isinstance(text, str) else say(text, language))
        for part in claim.parts:
            bars = "; ".join(bar(expect) for expect in part.expects)
            table.add_row(_word("True if", language), f"{say(part.text, language)}  ({bars})")
        for name, value in claim.parameters.items():
            quick = f"  (--quick: {_short(claim.quick[name])})" if name in claim.quick else ""
            table.add_row(_word("Parameters", language), f"{name} = {_short(value)}{quick}")
        console.print(table)

    return drawn(draw, width, color)


def claim_json(claim: Claim) -> str:
    """One claim as a JSON document."""
    return _json.document(_described(claim))


def verdicts_text(
    done: Sequence[Done], folder: Path, language: str = "en", *, width: int = 100, color: bool = False
) -> str:
    """The verdicts of a run, a line a claim, and for `depends` what it depends on."""

    def draw(console: Console) -> None:
        table = _grid(4)
        for one in done:
            verdict = one.record.outcome.verdict
            answer = Line(say(WORDS[verdict.answer], language), style=COLOURS[verdict.answer])
            seconds = "kept" if one.reused else f"{one.record.duration_s:.1f} s"
            table.add_row(Line(one.record.id, style="cyan"), answer, Line(seconds, style="dim"), _on(verdict, language))
            if not one.record.sound:
                warning = f"the control has the same verdict ({one.record.control.verdict.answer})"
                table.add_row("", Line("unsound", style="bold red"), "", warning)
        console.print(table)
        console.print(f"\n{tally([one.record.outcome.verdict.answer for one in done])} Records: {folder}")

    return drawn(draw, width, color)


def verdicts_json(done: Sequence[Done]) -> str:
    """The verdicts of a run as one JSON document; the figures are in the records."""
    rows = [
        {
            "id": one.record.id,
            "verdict": one.record.outcome.verdict.answer,
            "control": one.record.control.verdict.answer,
            "sound": one.record.sound,
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


def tally(answers: Sequence[str]) -> str:
    """How many claims have which verdict.

    Example:
        >>> tally(["holds", "fails", "holds"])
        '3 claims: 2 hold, 1 fails.'
    """
    verbs = {"holds": "hold", "fails": "fail", "depends": "depend", "undecided": "undecided"}
    counts = [(answer, answers.count(answer)) for answer in verbs if answer in answers]
    parts = ", ".join(f"{count} {answer if count == 1 else verbs[answer]}" for answer, count in counts)
    return f"{len(answers)} claim{'' if len(answers) == 1 else 's'}: {parts}."


def bar(expect: Expect) -> str:
    """A bar in symbols.

    Example:
        >>> bar(Expect("peak", low=0.5)), bar(Expect("mean", -1.0, 1.0, {"d_k": 64}))
        ('peak >= 0.5', '-1 <= mean <= 1 at d_k = 64')
    """
    low = f"{number(expect.low)} <= " if math.isfinite(expect.low) else ""
    high = f" <= {number(expect.high)}" if math.isfinite(expect.high) else ""
    text = f"{expect.figure} >= {number(expect.low)}" if low and not high else f"{low}{expect.figure}{high}"
    at = ", ".join(f"{name} = {place}" for name, place in expect.at.items())
    return f"{text} at {at}" if at else text


def _on(verdict: Verdict, language: str) -> str:
    """What a mixed verdict depends on; empty for any other."""
    if verdict.answer != "depends":
        return ""
    words = {True: WORDS["holds"], False: WORDS["fails"], None: WORDS["undecided"]}
    return "; ".join(f"{say(words[part.met], language)}: {say(part.text, language)}" for part in verdict.findings)


def _described(claim: Claim) -> dict[str, Any]:
    texts = {name: getattr(claim, name) for name in ("statement", "method", "control")}
    return {
        "id": claim.id,
        "group": claim.group,
        "sources": claim.sources,
        **{name: {"en": text.en, "zh": text.zh} for name, text in texts.items()},
        "formula": claim.formula,
        "parts": [
            {"en": part.text.en, "zh": part.text.zh, "bars": [bar(expect) for expect in part.expects]}
            for part in claim.parts
        ],
        "parameters": claim.parameters,
        "quick": claim.quick,
        "flipped": claim.flipped,
    }


def _grid(columns: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for _ in range(columns):
        table.add_column(overflow="fold")  # else rich cuts lines of wide characters
    return table


def _word(name: str, language: str) -> Line:
    return Line(say(WORDS[name], language), style="dim")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
