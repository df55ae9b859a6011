"""derivative-floor: p (1 - p), the derivative of a weight by its own logit, for five scaled logits."""

from __future__ import annotations

import torch

from sqrtdk.messages import Text
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.claims.softmax_example import EXAMPLE_LOGITS, WEIGHTS
from sqrtdk_lab.figures import Figures, Plot, format_figure, series_over
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

FLOOR = 0.01


def measure(run: ExperimentRun) -> ExperimentResult:
    """The diagonal of the Jacobian, by automatic differentiation, of the logits and of the logits without a scale."""
    logits = torch.tensor(run["logits"], dtype=torch.float64) * run["factor"]
    figures = []
    for side, inputs in (("scaled", logits), ("unscaled", logits * run["d_k"] ** 0.5)):
        jacobian = torch.autograd.functional.jacobian(lambda z: z.softmax(0), inputs)  # type: ignore[no-untyped-call]
        diagonal = jacobian.diagonal().tolist()
        for logit, derivative in zip(run["logits"], diagonal, strict=True):
            figures.append(exact("derivative", derivative, side=side, logit=logit))
        figures.append(exact("smallest_derivative", min(diagonal), side=side))
        figures.append(exact("largest_derivative", max(diagonal), side=side))
    figures.append(exact("smallest_from_printed_weights", min(p * (1 - p) for p in WEIGHTS)))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "derivatives",
        WORDS("plot.derivatives"),
        "scaled logit",
        "$p (1 - p)$",
        tuple(
            series_over(side, figures.all("derivative", side=side), "logit", style="bars")
            for side in ("scaled", "unscaled")
        ),
        y_axis="log",
        lines=((f"{FLOOR}", FLOOR),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    least, most = (format_figure(figures(f"{end}_derivative", side="scaled").value) for end in ("smallest", "largest"))
    unscaled = format_figure(figures("largest_derivative", side="unscaled").value)
    above = sum(figure.value > FLOOR for figure in figures.all("derivative", side="scaled"))
    of_printed = format_figure(figures("smallest_from_printed_weights").value)
    return WORDS("why", above=above, floor=FLOOR, most=most, least=least, of_printed=of_printed, unscaled=unscaled)


CLAIM = Claim(
    id="derivative-floor",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement", floor=FLOOR),
    formula=r"\frac{\partial p_i}{\partial z_i} = p_i (1 - p_i), \qquad \frac{\partial p_i}{\partial z_j} = -p_i p_j",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"logits": EXAMPLE_LOGITS, "factor": 1.0, "d_k": 64},
    quick={},
    flipped={"factor": 0.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.all_five", floor=FLOOR),
            (Expect("derivative", low=FLOOR, at={"side": "scaled"}),),
        ),
    ),
    why=why,
)
