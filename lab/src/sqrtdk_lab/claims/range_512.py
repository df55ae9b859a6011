"""range-512: how far the logits reach at 512 dimensions, without and with the scale."""

from __future__ import annotations

import math

from sqrtdk.messages import Text
from sqrtdk.theory import logit_distribution
from sqrtdk_lab._rows import SIDES, factor, product_matrices
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, format_figure, series_over
from sqrtdk_lab.intervals import mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K = 512
CLAIMED_VALUE = 100.0
THREE_STDS = 3.0


def measure(run: ExperimentRun) -> ExperimentResult:
    """Matrices that contain a logit of 100, their largest logits on both sides, and the share of logits near 0."""
    factors = {side: factor(run[side], D_K) for side in SIDES}
    largest: dict[int, list[float]] = {}
    beyond, within = [], []
    for product in product_matrices(run, run["draws"], max(run["lengths"]), D_K):
        size = product.abs()
        beyond.append(float((size * factors["unscaled"] >= CLAIMED_VALUE).double().mean()))
        within.append(float((size * factors["scaled"] <= THREE_STDS).double().mean()))
        for length in run["lengths"]:
            largest.setdefault(length, []).append(float(size[:length, :length].max()))
    figures = [mean("share_of_logits_beyond_100", beyond), mean("share_within_3_scaled", within)]
    for length, values in largest.items():
        hits = sum(value * factors["unscaled"] >= CLAIMED_VALUE for value in values)
        figures.append(proportion("matrices_that_contain_100", hits, run["draws"], length=length))
        figures += [
            mean("largest_logit", [value * factors[side] for value in values], side=side, length=length)
            for side in SIDES
        ]
    return ExperimentResult(figures, (_plot(Figures(figures), factors),))


def _plot(figures: Figures, factors: dict[str, float]) -> Plot:
    series = []
    for side in SIDES:
        theory = logit_distribution(D_K, factors[side])
        found = figures.all("largest_logit", side=side)
        lengths = [int(figure.at["length"]) for figure in found]
        # of the largest magnitude among so many independent logits
        medians = (theory.quantile(1.0 - math.log(2.0) / (2 * n * n)) for n in lengths)
        series.append(series_over(side, found, "length", style="points"))
        series.append(curve_series(f"{side}: median in theory", lengths, medians, style="dashed"))
    return Plot(
        "largest",
        WORDS("plot.largest"),
        "queries and keys",
        "largest magnitude of the logits",
        tuple(series),
        x_axis="log",
        y_axis="log",
        lines=(("100", CLAIMED_VALUE), ("3", THREE_STDS)),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    matrices = figures.all("matrices_that_contain_100")
    short, long = (end(matrices, key=lambda figure: figure.at["length"]) for end in (min, max))
    return WORDS(
        "why",
        value=f"{CLAIMED_VALUE:g}",
        deviations=format_figure(CLAIMED_VALUE / D_K**0.5),
        deviation=format_figure(D_K**0.5),
        share=figures("share_of_logits_beyond_100"),
        short=short.at["length"],
        few=short,
        long=long.at["length"],
        most=long,
        largest=figures("largest_logit", side="unscaled", length=long.at["length"]),
        within=figures("share_within_3_scaled"),
        rule=format_figure(math.erf(THREE_STDS / math.sqrt(2.0))),
        scaled=figures("largest_logit", side="scaled", length=long.at["length"]),
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
        "lengths": (8, 16, 32, 64, 128, 256, 512, 1024),
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"draws": 10, "lengths": (8, 64, 1024)},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        # "may contain" asks for no more than one matrix of ordinary size that does; more than half is safe from luck
        ClaimPart(
            WORDS("part.contain"),
            (Expect("matrices_that_contain_100", low=0.5, at={"length": 1024}),),
        ),
        # 99.7% in the digits given
        ClaimPart(
            WORDS("part.scaled"),
            (Expect("share_within_3_scaled", low=0.9965, high=0.9975),),
        ),
    ),
    why=why,
)
