"""minmax-by-dim: the largest and the smallest of eight weights at three dimensions."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk_lab._rows import SIDES, factor, products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, format_figure, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Both ends of the weights of independent rows; both sides see the same queries and keys."""
    dims = run["dims"]
    largest: dict[tuple[str, int], Tensor] = {}
    smallest: dict[tuple[str, int], Tensor] = {}  # its logarithm, as the mean weight would be dominated by rare rows
    for d_k in dims:
        product = products(run.generator("rows", d_k), draws=run["rows"], keys=run["keys"], d_k=d_k)
        for side in SIDES:
            rows = row_stats(product * factor(run[side], d_k))
            largest[side, d_k], smallest[side, d_k] = rows.peak.flatten(), (rows.min_logit - rows.lse).flatten()
    figures = []
    for side in SIDES:
        for name, weights in (("largest_weight", largest), ("log_smallest_weight", smallest)):
            figures += [mean(name, weights[side, d_k], d_k=d_k, side=side) for d_k in dims]
            change = weights[side, dims[-1]] - weights[side, dims[0]]
            figures.append(mean(f"{name}_change", change, side=side))
    return ExperimentResult(figures, _plots(Figures(figures), run["keys"]))


def _plots(figures: Figures, keys: int) -> tuple[Plot, ...]:
    uniform = {"largest_weight": 1 / keys, "log_smallest_weight": -math.log(keys)}
    return tuple(
        Plot(
            name.replace("_", "-"),
            WORDS("plot." + name.replace("_", "-"), keys=keys),
            "$d_k$",
            name.replace("_", " "),
            tuple(series_over(side, figures.all(name, side=side), "d_k") for side in SIDES),
            x_axis="log",
            lines=(("uniform", uniform[name]),),
        )
        for name in uniform
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(figure.at["d_k"] for figure in figures.all("largest_weight"))
    largest = {side: str(figures("largest_weight", d_k=d_k, side=side)) for side in SIDES}
    smallest = {
        side: format_figure(math.exp(figures("log_smallest_weight", d_k=d_k, side=side).value)) for side in SIDES
    }
    return WORDS(
        "why",
        d_k=d_k,
        largest=largest["unscaled"],
        smallest=smallest["unscaled"],
        largest_scaled=largest["scaled"],
        smallest_scaled=smallest["scaled"],
    )


CLAIM = Claim(
    id="minmax-by-dim",
    group="saturation",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\frac{p_i}{p_j} = e^{z_i - z_j}, \qquad z_i - z_j \sim s \sqrt{2 d_k}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (32, 128, 512), "keys": 8, "rows": 20_000, "unscaled": "none", "scaled": "sqrt_dk"},
    quick={"rows": 3000},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.largest"),
            (
                Expect("largest_weight_change", low=0.08, at={"side": "unscaled"}),
                Expect("largest_weight", low=0.9, at={"side": "unscaled", "d_k": 512}),
            ),
        ),
        ClaimPart(
            WORDS("part.smallest"),
            (
                Expect("log_smallest_weight_change", high=-10.0, at={"side": "unscaled"}),
                Expect("log_smallest_weight", high=-20.0, at={"side": "unscaled", "d_k": 512}),
            ),
        ),
        ClaimPart(
            WORDS("part.scaled"),
            (
                Expect("largest_weight_change", low=-0.03, high=0.03, at={"side": "scaled"}),
                Expect("log_smallest_weight_change", low=-0.3, high=0.3, at={"side": "scaled"}),
            ),
        ),
    ),
    why=why,
)
