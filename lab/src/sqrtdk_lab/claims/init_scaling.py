"""init-scaling: whether an initialisation of q and k can replace the scale."""

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
    """Variance of unscaled products, for both readings of N(0, 1/sqrt(d)): component variance d^-power."""
    figures = []
    for d_k in run["dims"]:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        for reading, power in run["powers"].items():
            variance = d_k**-power
            figures.append(mean("variance", (variance * product) ** 2, d_k=d_k, reading=reading))
    return ExperimentResult(figures, (_plot(Figures(figures), run["dims"], run["powers"]),))


def _plot(figures: Figures, dims: tuple[int, ...], powers: dict[str, float]) -> Plot:
    series = []
    for reading, power in powers.items():
        theory = (dot_product_moments(d, query_variance=d**-power, key_variance=d**-power).variance for d in dims)
        series += [
            series_over(reading, figures.all("variance", reading=reading), "d_k", style="points"),
            curve_series(f"{reading}, theory", dims, theory, style="dashed"),
        ]
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "$d$",
        r"variance of $q \cdot k$",
        tuple(series),
        x_axis="log",
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(float(figure.at["d_k"]) for figure in figures)
    as_variance = figures("variance", reading="variance", d_k=large)
    as_deviation = figures("variance", reading="deviation", d_k=large)
    return WORDS("why", as_variance=as_variance, large=f"{large:g}", as_deviation=as_deviation)


CLAIM = Claim(
    id="init-scaling",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}[q \cdot k] = d\,v^2 = 1 \quad\Leftrightarrow\quad v = \frac{1}{\sqrt{d}}, \qquad "
    r"\sqrt{v} = d^{-1/4}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 64, 256, 1024),
        "pairs": 100_000,
        "powers": {"variance": 0.5, "deviation": 1.0},
    },
    quick={"dims": (16, 64, 256), "pairs": 40_000},
    flipped={"powers": {"variance": 0.0, "deviation": 0.0}},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.variance"),
            (Expect("variance", low=0.95, high=1.05, at={"reading": "variance"}),),
        ),
        ClaimPart(
            WORDS("part.deviation"),
            (Expect("variance", low=0.95, high=1.05, at={"reading": "deviation"}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
