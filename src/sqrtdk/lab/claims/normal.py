"""normal: how close the scaled dot product is to a normal distribution."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.lab._rows import dot_products, factor
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import CONFIDENCE, Figure, Figures, Plot, curve_series, series_over
from sqrtdk.lab.intervals import exact, mean
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.theory import dot_product_moments, logit_distribution

WORDS = words_of(__name__)

DIMS = (1, 4, 16, 64, 128)
FOUR_STDS = 4.0  # standard deviations


def measure(run: ExperimentRun) -> ExperimentResult:
    """Distance of the scaled product's distribution from N(0, 1), and its excess kurtosis."""
    figures = []
    for d_k in DIMS:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        unit = product / d_k**0.5
        figures += [
            _distance(factor(run["scale"], d_k) * product, d_k),
            # the variance is known to be 1, which reduces the noise
            mean("excess_kurtosis", unit**4 - 6.0 * unit**2 + 3.0, d_k=d_k),
            exact("tail_beyond_4_over_normal", _tail(d_k), d_k=d_k),
        ]
    return ExperimentResult(figures, _plots(Figures(figures)))


def _distance(logits: Tensor, d_k: int) -> Figure:
    """Kolmogorov's distance from N(0, 1), with the interval of Dvoretzky, Kiefer and Wolfowitz (Massart 1990)."""
    from scipy import stats

    distance = float(stats.kstest(logits.numpy(), "norm").statistic)
    reach = math.sqrt(math.log(2.0 / (1.0 - CONFIDENCE)) / (2 * len(logits)))
    ends = max(0.0, distance - reach), min(1.0, distance + reach)
    return Figure("kolmogorov_distance", distance, *ends, "DKW", len(logits), {"d_k": d_k})


def _tail(d_k: int) -> float:
    """P(z > 4) of the scaled product over that of a normal, from the exact distribution."""
    return math.exp(logit_distribution(d_k).log_above(FOUR_STDS)) / (0.5 * math.erfc(FOUR_STDS / math.sqrt(2.0)))


def _plots(figures: Figures) -> tuple[Plot, Plot]:
    kurtosis = Plot(
        "kurtosis",
        WORDS("plot.kurtosis"),
        "$d_k$",
        "excess kurtosis",
        (
            series_over("measured", figures.all("excess_kurtosis"), "d_k", style="points"),
            curve_series("$6/d_k$", DIMS, (dot_product_moments(d).excess_kurtosis for d in DIMS), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )
    tail = Plot(
        "tail",
        WORDS("plot.tail"),
        "$d_k$",
        r"$P(z > 4)$ over the normal's",
        (series_over("exact", figures.all("tail_beyond_4_over_normal"), "d_k"),),
        x_axis="log",
        y_axis="log",
        lines=(("normal", 1.0),),
    )
    return kurtosis, tail


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    few, many = figures("excess_kurtosis", d_k=4), figures("excess_kurtosis", d_k=64)
    distance = figures("kolmogorov_distance", d_k=64)
    tails = figures("tail_beyond_4_over_normal", d_k=4), figures("tail_beyond_4_over_normal", d_k=64)
    return WORDS("why", few=few, many=many, distance=distance, tail_few=tails[0], tail_many=tails[1])


def _part(d_k: int) -> ClaimPart:
    at = {"d_k": d_k}
    return ClaimPart(
        WORDS("part.normal", d_k=d_k),
        (Expect("kolmogorov_distance", high=0.02, at=at), Expect("excess_kurtosis", low=-0.2, high=0.2, at=at)),
    )


CLAIM = Claim(
    id="normal",
    group="statistics",
    sources=("S1", "S3"),
    statement=WORDS("statement"),
    formula=r"z = \frac{q \cdot k}{\sqrt{d_k}}, \qquad \frac{\mathrm{E}[z^4]}{\mathrm{E}[z^2]^2} - 3 = \frac{6}{d_k}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"pairs": 500_000, "scale": "sqrt_dk"},
    quick={"pairs": 150_000},
    flipped={"scale": "none"},
    measure=measure,
    parts=tuple(_part(d_k) for d_k in DIMS),
    why=why,
    condition=WORDS("condition"),
)
