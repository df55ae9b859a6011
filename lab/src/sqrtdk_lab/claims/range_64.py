"""range-64: the three-sigma range of the logits at 64 dimensions."""

from __future__ import annotations

import numpy as np

from sqrtdk.messages import Text
from sqrtdk_lab._rows import product_matrices
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import bootstrap, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K = 64
THREE_STDS_UNSCALED = 24.0  # 3 once the product is divided by 8


def measure(run: ExperimentRun) -> ExperimentResult:
    """Share of logits within the range, and of rows of growing length that lie in it as a whole."""
    within: list[float] = []
    whole: dict[int, list[float]] = {}
    for product in product_matrices(run, run["draws"], run["length"], D_K, run["component_std"]):
        inside = product.abs() <= THREE_STDS_UNSCALED
        within.append(float(inside.double().mean()))
        for keys in run["row_keys"]:
            whole.setdefault(keys, []).append(float(inside[:, :keys].all(-1).double().mean()))
    figures = [mean("share_within", within)]
    figures += [bootstrap("rows_within", values, np.mean, seed=run.seed, keys=keys) for keys, values in whole.items()]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "rows",
        WORDS("plot.rows"),
        "keys",
        r"share of rows within $\pm 3\sigma$",
        (series_over("measured", figures.all("rows_within"), "keys"),),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    share = figures("share_within")
    row = max(figures.all("rows_within"), key=lambda f: f.at["keys"])
    return WORDS("why", share=share, row=row, keys=row.at["keys"])


CLAIM = Claim(
    id="range-64",
    group="statistics",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"3\,\sqrt{64} = 24, \qquad P(|q \cdot k| \le 24) = P\left(\frac{|q \cdot k|}{8} \le 3\right)",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"draws": 100, "length": 1024, "row_keys": (8, 16, 32, 64, 128, 256, 512, 1024), "component_std": 1.0},
    quick={"draws": 20, "row_keys": (8, 64, 512)},
    flipped={"component_std": 1.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.range"),
            (Expect("share_within", low=0.9965, high=0.9975),),
        ),
    ),
    why=why,
)
