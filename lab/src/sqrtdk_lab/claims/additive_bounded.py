"""additive-bounded: how additive scores grow with the width of the hidden layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk.scales import none
from sqrtdk.scores import additive
from sqrtdk.stats import RowStats
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import largest_draw, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

INPUT_DIM = 64
STARTS: dict[str, Callable[[int], float]] = {  # standard deviation of v
    "Xavier": lambda width: math.sqrt(2.0 / (width + 1)),
    "variance 1": lambda width: 1.0,
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Scores of fresh additive attention, one set of weights a draw, over the width and the start of v."""
    figures = []
    for start, std in STARTS.items():
        for width in run["widths"]:
            v, rows = _scores(run, width, std(width))
            bound = v.abs().sum(-1)
            extreme = torch.maximum(rows.max_logit.amax(-1), -rows.min_logit.amin(-1))
            unbiased = run["keys"] / (run["keys"] - 1)
            figures += [
                largest_draw("largest_score_over_bound", extreme / bound, start=start, width=width),
                mean("score_std", (rows.variance.mean(-1) * unbiased).sqrt(), start=start, width=width),
                mean("bound", bound, start=start, width=width),
            ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["widths"]),))


def _scores(run: ExperimentRun, width: int, std: float) -> tuple[Tensor, RowStats]:
    """The vector v (draws, width), and the rows of each draw's scores."""
    rng, draws = run.generator("weights", width), run["draws"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    query, key = normal(draws, run["queries"], INPUT_DIM), normal(draws, run["keys"], INPUT_DIM)
    query_weight, key_weight = (normal(draws, INPUT_DIM, width) / INPUT_DIM**0.5 for _ in range(2))
    v = std * normal(draws, width)
    if run["score"] == "dot":
        return v, sqrtdk.measure(query @ query_weight, key @ key_weight, scale=none())
    return v, sqrtdk.measure(query, key, score=additive(v, query_weight, key_weight))


def _plot(figures: Figures, widths: tuple[int, ...]) -> Plot:
    base = figures("score_std", start="variance 1", width=widths[0]).value
    return Plot(
        "std",
        WORDS("plot.std"),
        "width $A$",
        "standard deviation of the scores",
        (
            *(series_over(f"v: {start}", figures.all("score_std", start=start), "width") for start in STARTS),
            curve_series(
                r"$\propto \sqrt{A}$", widths, (base * (w / widths[0]) ** 0.5 for w in widths), style="dashed"
            ),
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    fresh, unit = (figures.all("score_std", start=start)[-1] for start in STARTS)
    bound = figures.all("bound", start="Xavier")[-1]
    nearest = max(figures.all("largest_score_over_bound"), key=lambda figure: figure.value)
    return WORDS("why", nearest=nearest, fresh=fresh, width=fresh.at["width"], bound=bound, unit=unit)


CLAIM = Claim(
    id="additive-bounded",
    group="factors",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\left| v^\top \tanh(W_q q + W_k k) \right| \le \Vert v \Vert_1, \qquad "
    r"\mathrm{Var} \propto A \, \mathrm{Var}[v]",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"widths": (16, 64, 256, 1024), "draws": 32, "queries": 32, "keys": 64, "score": "additive"},
    quick={"widths": (64, 512), "draws": 12, "queries": 16, "keys": 32},
    flipped={"score": "dot"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.bound"),
            (Expect("largest_score_over_bound", high=1.0),),
        ),
        ClaimPart(
            WORDS("part.xavier"),
            (Expect("score_std", high=2.0, at={"start": "Xavier"}),),
        ),
        ClaimPart(
            WORDS("part.unit"),
            (Expect("score_std", high=2.0, at={"start": "variance 1"}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
