"""normal: how close the scaled dot product is to a normal distribution, in the middle and far out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.theory import dot_product_moments, logit_distribution
from sqrtdk_lab._rows import dot_products, factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import CONFIDENCE, Figure, Figures, Plot, curve_series, format_figure, series_over
from sqrtdk_lab.intervals import mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

DIMS = (4, 16, 64, 256)
LIMITS_IN_DEVIATIONS = (1.0, 2.0, 3.0, 4.0)
# The explanations say that 99.7% lie within 3 deviations, so 0.25% to 0.35% may lie outside; a normal variable has
# 0.27%. The bars on a probability over the normal's are these two ends over that, wherever it is asked.
BEYOND_3 = math.erfc(3.0 / math.sqrt(2.0))
LEAST, MOST = 0.0025 / BEYOND_3, 0.0035 / BEYOND_3


def measure(run: ExperimentRun) -> ExperimentResult:
    """Probabilities of large logits over the normal's; and the distance from N(0, 1) and the excess kurtosis."""
    figures = []
    for d_k in DIMS:
        one = factor(run["scale"], d_k)
        # Given q, the logits of Gaussian keys are exactly normal with deviation scale |q|. The average of that
        # normal's tail over queries counts the rare logits without waiting for them.
        lengths = run.generator("queries", d_k)
        spread = one * torch.randn(run["queries"], d_k, generator=lengths).double().norm(dim=-1)
        for outside in LIMITS_IN_DEVIATIONS:
            tail = torch.special.erfc(outside / (spread * math.sqrt(2.0)))
            place = {"d_k": d_k, "outside": outside}
            figures.append(mean("tail_over_normal", tail / math.erfc(outside / math.sqrt(2.0)), **place))
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        unit = product / d_k**0.5
        figures += [
            _distance(one * product, d_k),
            # the variance is known to be 1, which reduces the noise
            mean("excess_kurtosis", unit**4 - 6.0 * unit**2 + 3.0, d_k=d_k),
            proportion(
                "counted_beyond_4", int((one * product.abs() > LIMITS_IN_DEVIATIONS[-1]).sum()), len(product), d_k=d_k
            ),
        ]
    return ExperimentResult(figures, _plots(Figures(figures)))


def _distance(logits: Tensor, d_k: int) -> Figure:
    """Kolmogorov's distance from N(0, 1), with the interval of Dvoretzky, Kiefer and Wolfowitz (Massart 1990)."""
    from scipy import stats

    distance = float(stats.kstest(logits.numpy(), "norm").statistic)
    reach = math.sqrt(math.log(2.0 / (1.0 - CONFIDENCE)) / (2 * len(logits)))
    ends = max(0.0, distance - reach), min(1.0, distance + reach)
    return Figure("kolmogorov_distance", distance, *ends, "DKW", len(logits), {"d_k": d_k})


def _theory(d_k: int, outside: float) -> float:
    """P(|z| > outside) of the scaled product over that of a normal, from the exact distribution."""
    above = math.exp(logit_distribution(d_k).log_above(outside))
    return above / (0.5 * math.erfc(outside / math.sqrt(2.0)))


def _plots(figures: Figures) -> tuple[Plot, Plot]:
    tails = []
    for outside in LIMITS_IN_DEVIATIONS:
        found = figures.all("tail_over_normal", outside=outside)
        tails.append(series_over(f"beyond {outside:g}", found, "d_k", style="points"))
        theory = (_theory(d_k, outside) for d_k in DIMS)
        tails.append(curve_series(f"beyond {outside:g}, exact", DIMS, theory, style="dashed"))
    tail = Plot(
        "tail",
        WORDS("plot.tail"),
        "$d_k$",
        "probability over the normal's",
        tuple(tails),
        x_axis="log",
        y_axis="log",
        lines=(("normal", 1.0),),
    )
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
    return tail, kurtosis


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    counted = figures("counted_beyond_4", d_k=64)
    return WORDS(
        "why",
        few=figures("excess_kurtosis", d_k=4),
        many=figures("excess_kurtosis", d_k=64),
        distance=figures("kolmogorov_distance", d_k=64),
        three=figures("tail_over_normal", d_k=64, outside=3.0),
        three_small=figures("tail_over_normal", d_k=16, outside=3.0),
        four=figures("tail_over_normal", d_k=64, outside=4.0),
        four_large=figures("tail_over_normal", d_k=256, outside=4.0),
        counted=counted,
        normal=format_figure(math.erfc(LIMITS_IN_DEVIATIONS[-1] / math.sqrt(2.0))),
    )


def _part(d_k: int, outside: float) -> ClaimPart:
    at = {"d_k": d_k, "outside": outside}
    bar = Expect("tail_over_normal", low=LEAST, high=MOST, at=at)
    return ClaimPart(WORDS("part.normal", d_k=d_k, outside=f"{outside:g}"), (bar,))


CLAIM = Claim(
    id="normal",
    group="statistics",
    sources=("S1", "S3"),
    statement=WORDS("statement"),
    formula=r"z = \frac{q \cdot k}{\sqrt{d_k}}, \qquad z \sim N\left(0, \frac{|q|^2}{d_k}\right) \text{ given } q, "
    r"\qquad \frac{\mathrm{E}[z^4]}{\mathrm{E}[z^2]^2} - 3 = \frac{6}{d_k}",
    method=WORDS("method", least=format_figure(LEAST), most=format_figure(MOST)),
    control=WORDS("control"),
    parameters={"pairs": 500_000, "queries": 500_000, "scale": "sqrt_dk"},
    quick={"pairs": 60_000, "queries": 100_000},
    flipped={"scale": "none"},
    measure=measure,
    parts=tuple(_part(d_k, outside) for d_k in (16, 64, 256) for outside in (1.0, 3.0, 4.0)),
    why=why,
    condition=WORDS("condition"),
)
