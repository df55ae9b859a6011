"""var-linear: the variance of a dot product is its dimension."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk.theory import dot_product_moments
from sqrtdk_lab._rows import dot_products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Mean and variance of q . k over independent pairs."""
    figures = []
    for d_k in run["dims"]:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k) * d_k ** -run["power"]
        figures += [
            mean("mean_over_root_d_k", product / d_k**0.5, d_k=d_k),
            mean("variance_over_d_k", product**2 / d_k, d_k=d_k),  # the mean is known to be 0
        ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "$d_k$",
        r"variance of $q \cdot k$, over $d_k$",
        (
            series_over("measured", figures.all("variance_over_d_k"), "d_k", style="points"),
            curve_series("theory", dims, (dot_product_moments(d).variance / d for d in dims), style="dashed"),
        ),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(figures.all("variance_over_d_k"), key=lambda f: f.at["d_k"])
    return WORDS("why", d_k=large.at["d_k"], large=large)


CLAIM = Claim(
    id="var-linear",
    group="statistics",
    sources=("S0", "S1", "S2", "S3", "S4"),
    statement=WORDS("statement"),
    formula=r"\mathrm{E}[q \cdot k] = 0, \qquad \mathrm{Var}[q \cdot k] = \sum_{i=1}^{d_k} \mathrm{Var}[q_i k_i] = d_k",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (1, 4, 16, 64, 256, 1024), "pairs": 200_000, "power": 0.0},
    quick={"dims": (4, 64, 512), "pairs": 40_000},
    flipped={"power": 0.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.mean"),
            (Expect("mean_over_root_d_k", low=-0.05, high=0.05),),
        ),
        ClaimPart(
            WORDS("part.variance"),
            (Expect("variance_over_d_k", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
