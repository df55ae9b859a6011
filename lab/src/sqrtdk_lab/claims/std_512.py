"""std-512: the standard deviation of the logits at 512 dimensions, without and with the scale."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk_lab._rows import dot_products, factor, root_mean_square
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Standard deviation of scaled and unscaled products over independent pairs."""
    figures = []
    for d_k in run["dims"]:
        product = run["component_std"] ** 2 * dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        figures += [
            root_mean_square("standard_deviation", factor(scale, d_k) * product, d_k=d_k, scale=scale)
            for scale in ("none", "sqrt_dk")
        ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    measured = [
        series_over(label, figures.all("standard_deviation", scale=scale), "d_k", style="points")
        for label, scale in (("unscaled", "none"), (r"scaled by $1/\sqrt{d_k}$", "sqrt_dk"))
    ]
    return Plot(
        "deviation",
        WORDS("plot.deviation"),
        "$d_k$",
        "standard deviation of the logits",
        (*measured, curve_series(r"$\sqrt{d_k}$", dims, (d**0.5 for d in dims), style="dashed")),
        x_axis="log",
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    none, scaled = (figures("standard_deviation", d_k=512, scale=scale) for scale in ("none", "sqrt_dk"))
    return WORDS("why", none=none, scaled=scaled)


CLAIM = Claim(
    id="std-512",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\sigma(q \cdot k) = \sqrt{512} \approx 22.63, \qquad "
    r"\sigma\left(\frac{q \cdot k}{\sqrt{512}}\right) = 1",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (8, 32, 128, 512, 2048), "pairs": 100_000, "component_std": 1.0},
    quick={"dims": (32, 512), "pairs": 40_000},
    flipped={"component_std": 1.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.unscaled"),
            (Expect("standard_deviation", low=21.92, high=23.28, at={"d_k": 512, "scale": "none"}),),
        ),
        ClaimPart(
            WORDS("part.scaled"),
            (Expect("standard_deviation", low=0.97, high=1.03, at={"d_k": 512, "scale": "sqrt_dk"}),),
        ),
    ),
    why=why,
)
