"""var-general: the variance of a product of components with any means and variances."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.theory import dot_product_moments
from sqrtdk_lab._rows import dot_products, standard_pairs
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# mean and variance of a component of q, then of k
COMPONENT_SETTINGS = {
    "A": (0.0, 1.0, 0.0, 1.0),
    "B": (1.0, 1.0, 0.0, 1.0),
    "C": (0.0, 4.0, 0.0, 0.25),
    "D": (2.0, 0.5, -1.0, 3.0),
    "E": (3.0, 1.0, 3.0, 1.0),
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Variance of the product of independent components over the formula's, for each setting and distribution."""
    figures = []
    for setting in COMPONENT_SETTINGS:
        for components in run["components"]:
            for d_k in run["dims"]:
                place = {"setting": setting, "components": components, "d_k": d_k}
                figures.append(mean("variance_over_formula", _ratios(run, setting, components, d_k), **place))
    return ExperimentResult(figures, (_plot(Figures(figures), run["components"]),))


def _ratios(run: ExperimentRun, setting: str, components: str, d_k: int) -> Tensor:
    """Squared deviations of the products, over the variance that the formula gives."""
    query_mean, query_variance, key_mean, key_variance = COMPONENT_SETTINGS[setting]
    standard = standard_pairs(components, run["shared"])

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = standard(rng, pairs, d_k)
        return query_mean + query_variance**0.5 * query, key_mean + key_variance**0.5 * key

    product = dot_products(run.generator(setting, components, d_k), run["pairs"], d_k, draw)
    formula = dot_product_moments(
        d_k, query_mean=query_mean, query_variance=query_variance, key_mean=key_mean, key_variance=key_variance
    )
    return (product - product.mean()) ** 2 / formula.variance


def _plot(figures: Figures, distributions: tuple[str, ...]) -> Plot:
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "setting",
        "variance over the formula's",
        tuple(
            series_over(name, figures.all("variance_over_formula", components=name, d_k=1), "setting", style="bars")
            for name in distributions
        ),
        lines=(("formula", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    far = figures("variance_over_formula", setting="E", components="normal", d_k=1)
    mean_part = (
        COMPONENT_SETTINGS["E"][0] ** 2 * COMPONENT_SETTINGS["E"][3]
        + COMPONENT_SETTINGS["E"][2] ** 2 * COMPONENT_SETTINGS["E"][1]
    )
    return WORDS("why", mean_part=f"{mean_part:g}", total=f"{mean_part + 1:g}", far=far)


CLAIM = Claim(
    id="var-general",
    group="statistics",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}[q_i k_i] = \sigma_q^2 \sigma_k^2 + \mu_q^2 \sigma_k^2 + \mu_k^2 \sigma_q^2",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (1, 16, 64), "components": ("normal", "uniform"), "pairs": 400_000, "shared": 0.0},
    quick={"dims": (1, 8), "pairs": 200_000},
    flipped={"shared": 0.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.formula"),
            (Expect("variance_over_formula", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
