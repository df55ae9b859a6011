"""cosine-analogy: division by sqrt(d) beside the division by the norms in cosine similarity."""

from __future__ import annotations

import numpy as np
import torch

from sqrtdk.messages import Text
from sqrtdk_lab._rows import normal_pairs, root_mean_square
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import bootstrap, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """The product of the norms, and the two quotients of the same independent pairs."""
    figures = []
    for d_k in run["dims"]:
        std = d_k ** run["std_power"]
        query, key = (std * x.double() for x in normal_pairs(run.generator("pairs", d_k, std), run["pairs"], d_k))
        product = torch.linalg.vecdot(query, key)
        norms = query.norm(dim=-1) * key.norm(dim=-1)
        scaled, cosine = product / d_k**0.5, product / norms
        pair = (scaled, cosine)
        figures += [
            mean("norms_over_root_d", norms / d_k**0.5, d_k=d_k),
            mean("product_of_norms", norms, d_k=d_k),
            bootstrap("correlation", pair, _correlation, seed=run.seed, d_k=d_k),
        ]
        for by, logits in (("1", product), ("root_d", scaled), ("norms", cosine)):
            figures.append(root_mean_square("deviation", logits, divided_by=by, d_k=d_k))
    return ExperimentResult(figures, _plots(Figures(figures), run["dims"]))


def _correlation(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
    """Correlation of numbers whose means are known to be 0."""
    covariance = (one * other).sum(axis)
    found: np.ndarray = covariance / np.sqrt((one**2).sum(axis) * (other**2).sum(axis))
    return found


def _plots(figures: Figures, dims: tuple[int, ...]) -> tuple[Plot, Plot]:
    names = {"1": "unscaled", "root_d": r"over $\sqrt{d}$", "norms": "over the norms (cosine)"}
    return (
        Plot(
            "norms",
            WORDS("plot.norms"),
            "$d$",
            "divisor",
            (
                series_over(r"$|q| \, |k|$, measured", figures.all("product_of_norms"), "d_k", style="points"),
                curve_series("$d$", dims, dims, style="dashed"),
                curve_series(r"$\sqrt{d}$", dims, (d**0.5 for d in dims)),
            ),
            x_axis="log",
            y_axis="log",
        ),
        Plot(
            "deviation",
            WORDS("plot.deviation"),
            "$d$",
            "standard deviation",
            tuple(series_over(label, figures.all("deviation", divided_by=by), "d_k") for by, label in names.items()),
            x_axis="log",
            y_axis="log",
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(float(figure.at["d_k"]) for figure in figures.all("correlation"))
    return WORDS(
        "why",
        d_k=f"{d_k:g}",
        norms=figures("product_of_norms", d_k=d_k),
        ratio=figures("norms_over_root_d", d_k=d_k),
        scaled=figures("deviation", divided_by="root_d", d_k=d_k),
        cosine=figures("deviation", divided_by="norms", d_k=d_k),
        correlation=min(figures.all("correlation"), key=lambda figure: figure.value),
    )


CLAIM = Claim(
    id="cosine-analogy",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\cos(q, k) = \frac{q \cdot k}{|q| \, |k|}, \qquad |q| \, |k| \approx d, \qquad "
    r"\frac{q \cdot k}{\sqrt{d}} \approx \sqrt{d} \, \cos(q, k)",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 256, 1024), "pairs": 50_000, "std_power": 0.0},
    quick={"dims": (16, 64, 256), "pairs": 10_000},
    flipped={"std_power": -0.25},
    measure=measure,
    parts=(
        # a quarter: the mean product of norms is 3% below d at d = 16, and sqrt(d) is 4 times too small there
        ClaimPart(WORDS("part.size"), (Expect("norms_over_root_d", low=0.75, high=1.25),)),
        # 0.95: nine tenths of the variance of one quotient are then in the other
        ClaimPart(WORDS("part.shape"), (Expect("correlation", low=0.95),)),
    ),
    why=why,
)
