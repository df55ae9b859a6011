"""seed-code-shapes: what an example with 18 logits prints, over many seeds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk.lab._products import normal_pairs
from sqrtdk.lab._random_rows import factor, weights
from sqrtdk.lab._run import Run, stable_seed
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import bootstrap, exact, mean, proportion
from sqrtdk.lab.plots import Plot, Series, curve
from sqrtdk.lab.text import Text

BATCH, D_K = 2, 512
TOLERANCE = 0.05  # of what the example is said to print
STEPS = 200  # points of the plot


def measure(run: Run) -> Measured:
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
        sums = weights(query, key, one).sum(-1)
        whole = ((sums - 1.0).abs() <= 1e-5).flatten(1).all(-1)
        seed = stable_seed(["scatter", run.seed, scale])
        figures += [
            mean("printed_deviation", printed[scale], scale=scale),
            bootstrap("scatter_of_printed_deviation", off, np.std, seed=seed, scale=scale),
            proportion("runs_within_5_percent", int((off.abs() <= TOLERANCE).sum()), runs, scale=scale),
            proportion("runs_whose_rows_sum_to_1", int(whole.sum()), runs, scale=scale),
        ]
    return Measured(figures, (_plot(printed["none"]),))


def _plot(printed: Tensor) -> Plot:
    shares = torch.linspace(0.0, 1.0, STEPS, dtype=torch.float64)
    series: Series = curve("runs", torch.quantile(printed, shares).tolist(), shares.tolist())
    return Plot(
        "scatter",
        Text(
            "Share of runs that print at most this standard deviation of the unscaled logits.",
            "打印出的未缩放 logit 标准差不超过横轴数值的运行所占比例。",
        ),
        "printed standard deviation",
        "share of runs",
        (series, curve(r"$\sqrt{512}$", (D_K**0.5, D_K**0.5), (0.0, 1.0), style="dashed")),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    none, scaled = (figures("printed_deviation", scale=scale) for scale in ("none", "sqrt_dk"))
    scatter = figures("scatter_of_printed_deviation", scale="none")
    near = figures("runs_within_5_percent", scale="none")
    logits = number(figures("logits_of_a_run").value)
    low, high = (number(round(D_K**0.5 * (1 + side * 2 * scatter.value))) for side in (-1, 1))
    return Text(
        f"Averaged over seeds the example prints {none} and {scaled}. A sample's standard deviation is a little low "
        f"on average, since the root bends and the mean is taken from the same few numbers. One run has {logits} "
        f"logits, and from so few the standard deviation scatters by a share of {scatter} of its value: a share of "
        f"{near} of the runs comes within {TOLERANCE:.0%} of {number(D_K**0.5)}. Two such scatters below or above, a "
        f"printed {low} or {high}, are no sign of a mistake. The rows sum to 1 with or without the scale, as softmax "
        "rows do; this shows nothing about the scale.",
        f"对许多随机种子取平均，示例打印出 {none} 和 {scaled}。样本标准差平均略微偏低，因为开方是非线性的，"
        f"而且均值取自同样少的几个数。一次运行只有 {logits} 个 logit，如此小的样本，其标准差的相对波动为 {scatter}："
        f"与 {number(D_K**0.5)} 相差不到 {TOLERANCE:.0%} 的运行占 {near}。上下偏离两倍这样的波动，即打印出 {low} 或 "
        f"{high}，并不说明代码有错。无论是否缩放，每行之和都是 1，这是 softmax 的性质，并不能说明缩放的作用。",
    )


CLAIM = Claim(
    id="seed-code-shapes",
    group="statistics",
    sources=("S0",),
    statement=Text(
        "The example with batch 2, length 3 and 512 dimensions prints standard deviations of about 22.6 and 1.0, and "
        "rows of weights that sum to 1.",
        "批大小为 2、长度为 3、维度为 512 的示例打印出约 22.6 和 1.0 的标准差，并且每行权重之和为 1。",
    ),
    formula=r"s = \sqrt{\frac{1}{17} \sum_{i=1}^{18} (z_i - \bar{z})^2}, \qquad \sum_j p_{ij} = 1",
    method=Text(
        "The example as it stands, in float32, with many seeds: sample standard deviation of the 18 logits with and "
        "without the scale, and sums of the rows of weights. About means within 5%.",
        "按原样（float32）以许多随机种子运行该示例：有无缩放时 18 个 logit 的样本标准差，以及每行权重之和。“约”"
        "指误差在 5% 以内。",
    ),
    control=Text(
        "A length of 24 in place of 3: with 1152 logits a single run prints the numbers too.",
        "长度取 24 而不是 3：有 1152 个 logit 时，单次运行也会打印出这些数值。",
    ),
    parameters={"runs": 5000, "length": 3},
    quick={"runs": 1500},
    flipped={"length": 24},
    measure=measure,
    parts=(
        Part(
            Text("on average over seeds it prints 22.6 and 1.0", "对随机种子取平均，打印出 22.6 和 1.0"),
            (
                Expect("printed_deviation", low=21.5, high=23.75, at={"scale": "none"}),
                Expect("printed_deviation", low=0.95, high=1.05, at={"scale": "sqrt_dk"}),
            ),
        ),
        Part(
            Text("a single run prints them, nine times out of ten", "单次运行十有八九打印出这些数值"),
            (Expect("runs_within_5_percent", low=0.9),),
        ),
        Part(
            Text("the rows of weights sum to 1", "每行权重之和为 1"),
            (Expect("runs_whose_rows_sum_to_1", low=0.99),),
        ),
    ),
    why=why,
)
