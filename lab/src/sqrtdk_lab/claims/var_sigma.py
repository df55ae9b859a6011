"""var-sigma: the variance of a dot product as d sigma^2, and what sigma^2 has to be the variance of."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.theory import dot_product_moments
from sqrtdk_lab._rows import Draw, dot_products, normal_pairs
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# What has the variance sigma^2, and the power of sigma that is then the standard deviation of a component.
READINGS = {"component": 1.0, "product": 0.5}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Variance of q . k over d sigma^2, for both readings."""
    figures = []
    for reading, power in READINGS.items():
        for sigma in run["sigmas"]:
            for d_k in run["dims"]:
                rng = run.generator(reading, sigma, d_k)
                product = sigma ** (2 * power) * dot_products(rng, run["pairs"], d_k, _draw(run["independent"]))
                unit = "yes" if sigma == 1.0 else "no"
                place = {"reading": reading, "sigma": sigma, "unit": unit, "d_k": d_k}
                # the mean is known to be 0
                figures.append(mean("variance_over_d_sigma_squared", product**2 / (d_k * sigma**2), **place))
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _draw(independent: bool) -> Draw:
    """Return a function that draws q and k with independent components, or each with one number in all components."""
    if independent:
        return normal_pairs

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = normal_pairs(rng, pairs, 1)
        return query.expand(-1, d_k), key.expand(-1, d_k)

    return draw


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    large, sigmas = max(run["dims"]), run["sigmas"]
    series = []
    for reading, power in READINGS.items():
        found = figures.all("variance_over_d_sigma_squared", reading=reading, d_k=large)
        variances = [sigma ** (2 * power) for sigma in sigmas]
        products = [dot_product_moments(1, query_variance=v, key_variance=v).variance for v in variances]
        theory = [variance / sigma**2 for variance, sigma in zip(products, sigmas, strict=True)]
        label = rf"$\sigma^2$ of a {reading}"
        series.append(series_over(label, found, "sigma", style="points"))
        series.append(curve_series(f"{label}, theory", sigmas, theory, style="dashed"))
    return Plot(
        "variance",
        WORDS("plot.variance", d_k=large),
        r"$\sigma$",
        r"variance of $q \cdot k$ over $d \, \sigma^2$",
        tuple(series),
        x_axis="log",
        y_axis="log",
        lines=(("claimed", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    found = figures.all("variance_over_d_sigma_squared")
    sigma, d_k = (max(float(figure.at[entry]) for figure in found) for entry in ("sigma", "d_k"))
    of = {
        reading: figures("variance_over_d_sigma_squared", reading=reading, sigma=sigma, d_k=d_k) for reading in READINGS
    }
    return WORDS("why", sigma=f"{sigma:g}", d_k=f"{d_k:g}", component=of["component"], product=of["product"])


def _part(name: str, **at: str) -> ClaimPart:
    # 5%: the full run's intervals reach 2%, and the readings differ by a factor of 4
    return ClaimPart(WORDS(f"part.{name}"), (Expect("variance_over_d_sigma_squared", low=0.95, high=1.05, at=at),))


CLAIM = Claim(
    id="var-sigma",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}[q \cdot k] = d \, \mathrm{Var}[q_i k_i], \qquad "
    r"\mathrm{Var}[q_i k_i] = \mathrm{Var}[q_i] \, \mathrm{Var}[k_i] = \sigma^4",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 256), "sigmas": (0.25, 0.5, 1.0, 2.0), "pairs": 100_000, "independent": True},
    quick={"dims": (16, 64), "sigmas": (0.5, 1.0, 2.0), "pairs": 50_000},
    flipped={"independent": False},
    measure=measure,
    parts=(
        _part("component", reading="component", unit="no"),
        _part("unit", reading="component", unit="yes"),
        _part("product", reading="product"),
    ),
    why=why,
    condition=WORDS("condition"),
)
