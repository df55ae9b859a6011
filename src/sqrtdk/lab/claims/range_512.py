"""range-512: how far the logits reach at 512 dimensions, without and with the scale."""

from __future__ import annotations

import math

from sqrtdk.lab._rows import factor, product_matrices
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figure, Figures, Plot, curve_series, format_figure, series_over
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.theory import logit_distribution

WORDS = words_of(__name__)

D_K = 512
CLAIMED_BOUND = 100.0
THREE_STDS = 3.0


def measure(run: ExperimentRun) -> ExperimentResult:
    """Largest logits of one row and of whole matrices, and the share of logits near 0, a draw of q and k at a time."""
    length = run["length"]
    without, scaled = (factor(run[name], D_K) for name in ("without", "scaled"))
    largest: dict[int, list[float]] = {}
    rows, beyond, within = [], [], []
    for product in product_matrices(run, run["draws"], length, D_K):
        size = product.abs()
        rows.append(float(size.amax(-1).mean()) * without)
        beyond.append(float((size * without >= CLAIMED_BOUND).double().mean()))
        within.append(float((size * scaled <= THREE_STDS).double().mean()))
        for side in run["sides"]:
            largest.setdefault(side, []).append(float(size[:side, :side].max()) * without)
    figures = [
        mean("largest_logit", rows, of="row", logits=length),
        *(mean("largest_logit", values, of="matrix", logits=side * side) for side, values in largest.items()),
        mean("share_beyond_100", beyond),
        mean("share_within_3_scaled", within),
    ]
    return ExperimentResult(figures, (_plot(Figures(figures), without),))


def _plot(figures: Figures, scale: float) -> Plot:
    theory = logit_distribution(D_K, scale)
    matrices = figures.all("largest_logit", of="matrix")
    numbers = [int(figure.at["logits"]) for figure in matrices]
    medians = (theory.quantile(1.0 - math.log(2.0) / (2 * n)) for n in numbers)  # of the largest of n independent ones
    return Plot(
        "largest",
        WORDS("plot.largest"),
        "number of logits",
        "largest magnitude",
        (
            series_over("unscaled", matrices, "logits", style="points"),
            curve_series("median in theory", numbers, medians, style="dashed"),
        ),
        x_axis="log",
        lines=(("100", CLAIMED_BOUND),),
    )


def _side(largest: Figure) -> Text:
    return WORDS("below" if largest.value < CLAIMED_BOUND else "beyond")


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    row, share = figures("largest_logit", of="row"), figures("share_beyond_100")
    matrix = max(figures.all("largest_logit", of="matrix"), key=lambda f: f.at["logits"])
    within = figures("share_within_3_scaled")
    rule = math.erf(THREE_STDS / math.sqrt(2.0))
    return WORDS(
        "why",
        far=f"{CLAIMED_BOUND:g}",
        deviations=format_figure(CLAIMED_BOUND / D_K**0.5),
        deviation=format_figure(D_K**0.5),
        keys=row.at["logits"],
        row=row,
        logits=matrix.at["logits"],
        matrix=matrix,
        share=share,
        row_side=_side(row),
        matrix_side=_side(matrix),
        within=within,
        near=f"{THREE_STDS:g}",
        rule=format_figure(rule),
    )


CLAIM = Claim(
    id="range-512",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"P(|q \cdot k| > 100) \approx 2\,\Phi\left(-\frac{100}{\sqrt{512}}\right) \approx 10^{-5}, \qquad "
    r"P(|z| \le 3) \approx 0.997",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "draws": 60,
        "length": 1024,
        "sides": (8, 16, 32, 64, 128, 256, 512, 1024),
        "without": "none",
        "scaled": "sqrt_dk",
    },
    quick={"draws": 10, "sides": (8, 64, 1024)},
    flipped={"without": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.row"),
            (Expect("largest_logit", low=CLAIMED_BOUND, at={"of": "row"}),),
        ),
        ClaimPart(
            WORDS("part.matrix"),
            (Expect("largest_logit", low=CLAIMED_BOUND, at={"of": "matrix", "logits": 1024 * 1024}),),
        ),
        ClaimPart(
            WORDS("part.scaled"),
            (Expect("share_within_3_scaled", low=0.9965, high=0.9975),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
