"""seed-code-shapes: the output of an example with 18 logits, over many seeds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._rows import attention_weights, factor, normal_pairs
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun, stable_seed
from sqrtdk_lab.figures import Figures, Plot, Series, curve_series, format_figure
from sqrtdk_lab.intervals import bootstrap, exact, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

BATCH, D_K = 2, 512
TOLERANCE = 0.05  # relative to the printed value that is claimed
TRAINING_STEPS = 200  # points of the plot


def measure(run: ExperimentRun) -> ExperimentResult:
    """Sample standard deviation of all logits of a run, and its rows of weights, over many runs."""
    runs, length = run["runs"], run["length"]
    query, key = (
        x.view(runs, BATCH, length, D_K)
        for x in normal_pairs(run.generator("runs", length), runs * BATCH * length, D_K)
    )
    product = query @ key.mT
    figures, printed = [exact("logits_of_a_run", BATCH * length**2)], {}
    for scale in ("none", "sqrt_dk"):
        one = factor(scale, D_K)
        printed[scale] = (one * product).flatten(1).std(-1).double()
        off = printed[scale] / (one * D_K**0.5) - 1.0
        sums = attention_weights(query, key, one).sum(-1)
        whole = ((sums - 1.0).abs() <= 1e-5).flatten(1).all(-1)
        seed = stable_seed(["scatter", run.seed, scale])
        figures += [
            mean("printed_deviation", printed[scale], scale=scale),
            bootstrap("scatter_of_printed_deviation", off, np.std, seed=seed, scale=scale),
            proportion("runs_within_5_percent", int((off.abs() <= TOLERANCE).sum()), runs, scale=scale),
            proportion("runs_whose_rows_sum_to_1", int(whole.sum()), runs, scale=scale),
        ]
    return ExperimentResult(figures, (_plot(printed["none"]),))


def _plot(printed: Tensor) -> Plot:
    shares = torch.linspace(0.0, 1.0, TRAINING_STEPS, dtype=torch.float64)
    series: Series = curve_series("runs", torch.quantile(printed, shares).tolist(), shares.tolist())
    return Plot(
        "scatter",
        WORDS("plot.scatter"),
        "printed standard deviation",
        "share of runs",
        (series, curve_series(r"$\sqrt{512}$", (D_K**0.5, D_K**0.5), (0.0, 1.0), style="dashed")),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    none, scaled = (figures("printed_deviation", scale=scale) for scale in ("none", "sqrt_dk"))
    scatter = figures("scatter_of_printed_deviation", scale="none")
    near = figures("runs_within_5_percent", scale="none")
    logits = format_figure(figures("logits_of_a_run").value)
    low, high = (format_figure(round(D_K**0.5 * (1 + side * 2 * scatter.value))) for side in (-1, 1))
    return WORDS(
        "why",
        none=none,
        scaled=scaled,
        logits=logits,
        scatter=scatter,
        near=near,
        tolerance=f"{TOLERANCE:.0%}",
        deviation=format_figure(D_K**0.5),
        low=low,
        high=high,
    )


CLAIM = Claim(
    id="seed-code-shapes",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"s = \sqrt{\frac{1}{17} \sum_{i=1}^{18} (z_i - \bar{z})^2}, \qquad \sum_j p_{ij} = 1",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"runs": 5000, "length": 3},
    quick={"runs": 1500},
    flipped={"length": 24},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.average"),
            (
                Expect("printed_deviation", low=21.5, high=23.75, at={"scale": "none"}),
                Expect("printed_deviation", low=0.95, high=1.05, at={"scale": "sqrt_dk"}),
            ),
        ),
        ClaimPart(
            WORDS("part.single"),
            (Expect("runs_within_5_percent", low=0.9),),
        ),
        ClaimPart(
            WORDS("part.sums"),
            (Expect("runs_whose_rows_sum_to_1", low=0.99),),
        ),
    ),
    why=why,
)
