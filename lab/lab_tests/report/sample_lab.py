"""Records of real claims in quick runs, and what is made of them: what the drawing code is tested on."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

from sqrtdk.messages import Text
from sqrtdk_lab.claims import (
    cosine_analogy,
    jacobian_vanishes,
    minmax_by_dim,
    onehot_64,
    scale_dk,
    softmax_example,
    var_linear,
)
from sqrtdk_lab.figures import Figure, Plot, Series, Style
from sqrtdk_lab.judge import Check, ClaimVerdict, PartAnswer
from sqrtdk_lab.record import Outcome, Record
from sqrtdk_lab.runner import run_claim
from tests.report.sample_report import EVIL

STYLES: tuple[Style, ...] = ("line", "curve", "dashed", "points", "bars")


@cache
def records() -> tuple[Record, ...]:
    """All answers but `undecided`; none, one and two plots; every style of series."""
    claims = (var_linear, onehot_64, softmax_example, minmax_by_dim, jacobian_vanishes, scale_dk, cosine_analogy)
    return tuple(run_claim(module.CLAIM, quick=True, command="sqrtdk lab run all --quick") for module in claims)


def unsound(record: Record) -> Record:
    """Its control gives the answer of the experiment."""
    return dataclasses.replace(record, id=f"{record.id}-unsound", control=record.outcome)


def undecided(record: Record) -> Record:
    """The interval of its first check lies across a bar."""
    first, *others = record.outcome.verdict.findings
    check = dataclasses.replace(first.checks[0], met=None)
    found = (PartAnswer(first.text, (check, *first.checks[1:]), None), *others)
    outcome = dataclasses.replace(record.outcome, verdict=ClaimVerdict("undecided", found))
    return dataclasses.replace(record, id=f"{record.id}-undecided", outcome=outcome)


def hostile() -> Record:
    """Every text is an attack."""
    evil = Text(EVIL, EVIL + "中")
    figure = Figure(EVIL, math.nan, -math.inf, math.inf, "t", 3, {EVIL: EVIL})
    check = Check(figure, 0.0, math.inf, None)
    outcome = Outcome({EVIL: EVIL}, (figure,), ClaimVerdict("undecided", (PartAnswer(evil, (check,), None),)))
    series = Series(EVIL, (1.0, 2.0), (1.0, 2.0), style="line"), Series("$\\frac{$", (1.0,), (2.0,), style="points")
    return Record(
        id=EVIL,
        group=EVIL,
        sources=(EVIL, 'arXiv:1706.03762"><script>document.title="owned"</script>'),
        statement=evil,
        formula=r"\text{<script>document.title='owned'</script>} \href{javascript:alert(1)}{x} \style{color:red}{y}",
        method=evil,
        control_method=evil,
        why=evil,
        condition=evil,
        quick=True,
        seed=0,
        outcome=outcome,
        control=dataclasses.replace(outcome, verdict=ClaimVerdict("fails", outcome.verdict.findings)),
        plots=(Plot("x", evil, EVIL, EVIL, series, lines=((EVIL, 1.5),)),),
        environment={EVIL: EVIL},
        command=EVIL,
        started=EVIL,
    )


def series(style: Style, label: str = "measured", factor: float = 1.0) -> Series:
    """Five points with intervals."""
    x: tuple[float, ...] | tuple[str, ...] = (16.0, 32.0, 64.0, 128.0, 256.0)
    if style == "bars":
        x = ("dot", "cosine", "additive", "bilinear", "general")
    y = tuple(factor * value for value in (1.0, 2.0, 4.0, 7.0, 16.0))
    return Series(label, x, y, tuple(0.8 * value for value in y), tuple(1.3 * value for value in y), style)


def plot(*every: Series, **settings: object) -> Plot:
    """A plot of these series."""
    return Plot("sample", Text("A sample.", "示例。"), "$d_k$", "size of it", every, **settings)  # type: ignore[arg-type]
