"""paper-footnote: the footnote of the paper, for components that are not Gaussian."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk_lab._rows import dot_products, standard_pairs
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Mean and variance of q . k for components of several distributions."""
    figures = []
    for components in run["components"]:
        for d_k in run["dims"]:
            rng, place = run.generator(components, d_k), {"components": components, "d_k": d_k}
            product = dot_products(rng, run["pairs"], d_k, standard_pairs(components, run["shared"]))
            figures += [
                mean("mean_over_root_d_k", product / d_k**0.5, **place),
                mean("variance_over_d_k", (product - product.mean()) ** 2 / d_k, **place),
            ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "components",
        r"variance of $q \cdot k$, over $d_k$",
        tuple(
            series_over(f"$d_k = {d_k}$", figures.all("variance_over_d_k", d_k=d_k), "components", style="bars")
            for d_k in dims
        ),
        lines=(("footnote", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(float(figure.at["d_k"]) for figure in figures)
    normal, signs, laplace = (
        figures("variance_over_d_k", components=name, d_k=large) for name in ("normal", "signs", "Laplace")
    )
    return WORDS("why", large=f"{large:g}", normal=normal, signs=signs, laplace=laplace)


CLAIM = Claim(
    id="paper-footnote",
    group="structure",
    sources=("S1", "arXiv:1706.03762"),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}\left[\sum_{i=1}^{d_k} q_i k_i\right] = "
    r"\sum_{i=1}^{d_k} \mathrm{E}[q_i^2]\,\mathrm{E}[k_i^2] = d_k",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "components": ("normal", "uniform", "signs", "Laplace"),
        "dims": (16, 64, 256),
        "pairs": 150_000,
        "shared": 0.0,
    },
    quick={"dims": (16, 64), "pairs": 60_000},
    flipped={"shared": 0.5},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.mean"), (Expect("mean_over_root_d_k", low=-0.05, high=0.05),)),
        ClaimPart(
            WORDS("part.variance"),
            (Expect("variance_over_d_k", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
