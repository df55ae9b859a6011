"""softmax-example: five printed weights against the softmax of their logits."""

from __future__ import annotations

import math

import torch

from sqrtdk.messages import Text
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, Series, format_figure
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# five scaled logits printed by an explanation, with the weights that it gives them
EXAMPLE_LOGITS = (-3.0, -1.0, 0.0, 1.0, 3.0)
WEIGHTS = (0.012, 0.089, 0.243, 0.661, 0.995)

TO_THREE_DIGITS = tuple(round(math.exp(z) / sum(map(math.exp, EXAMPLE_LOGITS)), 3) for z in EXAMPLE_LOGITS)


def measure(run: ExperimentRun) -> ExperimentResult:
    """The softmax of all five logits, and of the first four alone."""
    logits = torch.tensor(run["logits"], dtype=torch.float64)
    printed = torch.tensor(run["printed"], dtype=torch.float64)
    weights, first_four = logits.softmax(0), logits[:-1].softmax(0)
    figures = [exact("sum_of_printed", float(printed.sum()))]
    for logit, weight, given in zip(run["logits"], weights.tolist(), run["printed"], strict=True):
        figures += [exact("weight", weight, logit=logit), exact("printed_minus_weight", given - weight, logit=logit)]
    away = (printed[:-1] - first_four).abs().max()
    figures.append(exact("largest_error_against_first_four", float(away)))
    return ExperimentResult(figures, (_plot(run["printed"], weights.tolist(), run["logits"]),))


def _plot(printed: tuple[float, ...], weights: list[float], logits: tuple[float, ...]) -> Plot:
    names = tuple(f"{logit:g}" for logit in logits)
    return Plot(
        "weights",
        WORDS("plot.weights"),
        "logit",
        "weight",
        (Series("printed", names, printed, style="bars"), Series("softmax", names, tuple(weights), style="bars")),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    weights = ", ".join(format_figure(figure.value) for figure in figures.all("weight"))
    total = format_figure(figures("sum_of_printed").value)
    away = format_figure(figures("largest_error_against_first_four").value)
    return WORDS("why", total=total, weights=weights, away=away)


CLAIM = Claim(
    id="softmax-example",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement", weights=list(WEIGHTS)),
    formula=r"\mathrm{softmax}(z)_i = \frac{e^{z_i}}{\sum_j e^{z_j}}, \qquad \sum_i \mathrm{softmax}(z)_i = 1",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"logits": EXAMPLE_LOGITS, "printed": WEIGHTS},
    quick={},
    flipped={"printed": TO_THREE_DIGITS},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.digits"),
            (Expect("printed_minus_weight", low=-0.000501, high=0.000501),),
        ),
        ClaimPart(
            WORDS("part.sum"),
            (Expect("sum_of_printed", low=0.997, high=1.003),),
        ),
    ),
    why=why,
)
