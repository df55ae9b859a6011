"""onehot-64: the softmax of five logits as large as d_k = 64 makes them."""

from __future__ import annotations

import math

import torch

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk_lab._rows import products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, format_figure
from sqrtdk_lab.intervals import exact, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

ONE_HOT = 0.999


def measure(run: ExperimentRun) -> ExperimentResult:
    """The softmax and the exponentials of the logits, and how often random rows are as sharp."""
    logits = torch.tensor(run["logits"], dtype=torch.float64) * run["factor"]
    row = row_stats(logits[None])
    drawn = products(run.generator("rows"), draws=run["rows"], keys=len(logits), d_k=run["d_k"]) * run["factor"]
    sharp = int((row_stats(drawn).peak > ONE_HOT).sum())
    top, second = logits.sort(descending=True).values[:2].tolist()
    return ExperimentResult(
        [
            exact("peak", float(row.peak)),
            exact("weight_off_peak", float(row.off_peak)),
            exact("gap_of_the_two_largest", top - second),
            exact("exp_of_largest", math.exp(max(logits.tolist()))),
            exact("exp_of_smallest", math.exp(min(logits.tolist()))),
            proportion("random_rows_one_hot", sharp, run["rows"], d_k=run["d_k"]),
        ]
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    off, gap = format_figure(figures("weight_off_peak").value), format_figure(figures("gap_of_the_two_largest").value)
    share = figures("random_rows_one_hot")
    needed, std = math.log(ONE_HOT / (1 - ONE_HOT)), float(share.at["d_k"]) ** 0.5
    more = needed > std
    return WORDS(
        "why",
        gap=gap,
        off=off,
        needed=format_figure(needed),
        one_hot=ONE_HOT,
        more=WORDS("more" if more else "less"),
        d_k=share.at["d_k"],
        std=format_figure(std),
        share=share,
    )


CLAIM = Claim(
    id="onehot-64",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\mathrm{softmax}(z)_i = \frac{e^{z_i}}{\sum_j e^{z_j}}, \qquad "
    r"1 - p_{\max} \approx e^{-(z_{(1)} - z_{(2)})}",
    method=WORDS("method", one_hot=ONE_HOT),
    control=WORDS("control"),
    parameters={"logits": (-24.0, -10.0, 0.0, 10.0, 24.0), "factor": 1.0, "d_k": 64, "rows": 200_000},
    quick={"rows": 10_000},
    flipped={"factor": 0.125},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.one_hot"), (Expect("peak", low=ONE_HOT),)),
        ClaimPart(
            WORDS("part.exponentials"),
            (
                Expect("exp_of_largest", low=2.55e10, high=2.65e10),
                Expect("exp_of_smallest", low=3.75e-11, high=3.85e-11),
            ),
        ),
    ),
    why=why,
)
