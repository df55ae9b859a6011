"""exp-examples: e^3 and e^-3 as they are printed, and the ratio of weights that they stand for."""

from __future__ import annotations

import math

from sqrtdk.messages import Text
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, format_figure
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K = 64  # of the example: three standard deviations are 24 without the scale and 3 with it


def measure(run: ExperimentRun) -> ExperimentResult:
    """The exponentials of both ends of the range, and their ratio with and without the scale."""
    end = run["end"]
    figures = [
        exact("exponential_of_the_upper_end", math.exp(end)),
        exact("exponential_of_the_lower_end", math.exp(-end)),
    ]
    for side, factor in (("scaled", 1.0), ("unscaled", D_K**0.5)):
        figures.append(exact("ratio_of_the_ends", math.exp(2 * end * factor), side=side))
    return ExperimentResult(figures, (_plot(end),))


def _plot(end: float) -> Plot:
    x = [end * step / 50 for step in range(-50, 51)]
    return Plot(
        "exponentials",
        WORDS("plot.exponentials", d_k=D_K),
        "standard deviations",
        "exponential of the logit",
        (
            curve_series("scaled", x, map(math.exp, x)),
            curve_series("unscaled", x, (math.exp(D_K**0.5 * z) for z in x)),
        ),
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    upper, lower = (format_figure(figures(f"exponential_of_the_{end}_end").value) for end in ("upper", "lower"))
    scaled, unscaled = (format_figure(figures("ratio_of_the_ends", side=side).value) for side in ("scaled", "unscaled"))
    return WORDS("why", upper=upper, lower=lower, scaled=scaled, unscaled=unscaled, d_k=D_K)


CLAIM = Claim(
    id="exp-examples",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"e^{3} \approx 20.1, \qquad e^{-3} \approx 0.05",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"end": 3.0},
    quick={},
    flipped={"end": 3.0 * D_K**0.5},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.upper"), (Expect("exponential_of_the_upper_end", low=20.05, high=20.15),)),
        ClaimPart(WORDS("part.lower"), (Expect("exponential_of_the_lower_end", low=0.045, high=0.055),)),
    ),
    why=why,
)
