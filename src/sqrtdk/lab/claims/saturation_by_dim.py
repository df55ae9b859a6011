"""saturation-by-dim: the largest weight of a row as the dimension grows, without and with the scale."""

from __future__ import annotations

from itertools import pairwise

from sqrtdk.lab._random_rows import SIDES, factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_peak


def measure(run: Run) -> Measured:
    """The mean largest weight of independent rows at each dimension; both sides see the same queries and keys."""
    dims, off = run["dims"], {}
    for d_k in dims:
        product = products(run.generator("rows", d_k), draws=run["rows"], keys=run["keys"], d_k=d_k)
        for side in SIDES:
            off[side, d_k] = row_stats(product * factor(run[side], d_k)).off_peak.flatten()
    figures = []
    for side in SIDES:
        figures += [mean("peak", 1 - off[side, d_k], d_k=d_k, side=side) for d_k in dims]
        figures += [mean("peak_rise", off[side, a] - off[side, b], d_k=b, side=side) for a, b in pairwise(dims)]
        figures.append(mean("peak_at_the_largest", 1 - off[side, dims[-1]], side=side))
        figures.append(mean("peak_change_over_all", off[side, dims[0]] - off[side, dims[-1]], side=side))
        figures.append(mean("off_peak_times_root_d_k", off[side, dims[-1]] * dims[-1] ** 0.5, d_k=dims[-1], side=side))
    return Measured(figures, (_plot(Figures(figures), run),))


def _plot(figures: Figures, run: Run) -> Plot:
    dims, keys = run["dims"], run["keys"]
    series = []
    for side in SIDES:
        sigmas = [factor(run[side], d_k) * d_k**0.5 for d_k in dims]
        series.append(over(side, figures.all("peak", side=side), "d_k", style="points"))
        series.append(curve(f"{side}, theory", dims, expected_peak(keys, sigmas), style="dashed"))
    return Plot(
        "peak",
        Text(
            f"Mean largest weight over {keys} random keys; theory: Gaussian logits.",
            f"{keys} 个随机键的最大权重的均值；理论曲线取高斯 logits。",
        ),
        "$d_k$",
        "largest weight",
        tuple(series),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    fall = figures("off_peak_times_root_d_k", side="unscaled")
    large = figures("peak_at_the_largest", side="unscaled")
    scaled = figures("peak_change_over_all", side="scaled")
    return Text(
        "Without the scale the logits spread like sqrt(d_k), and so does the gap between the largest and the second. "
        f"The largest weight reaches {large} at d_k = {fall.at['d_k']}. It tends to 1 slowly: only the rows whose two "
        "largest logits lie within about one unit are still undecided, and their share falls like 1/sqrt(d_k); what "
        f"the largest weight lacks to 1, times sqrt(d_k), is {fall}. With the scale the standard deviation is 1 at "
        f"every d_k, and the largest weight moves by {scaled} over the whole range. How sharp a row is also depends on "
        "the number of keys: the threshold for the standard deviation grows like sqrt(2 log n).",
        "没有缩放时，logits 的离散程度随 sqrt(d_k) 增大，最大值与次大值之差也是如此。"
        f"在 d_k = {fall.at['d_k']} 时最大权重达到 {large}。它趋于 1 的速度很慢：只有最大的两个 logits 相差约 1 以内的"
        f"行尚未分出高下，这样的行所占比例按 1/sqrt(d_k) 下降；最大权重与 1 之差乘以 sqrt(d_k) 等于 {fall}。"
        f"有缩放时，标准差在任何 d_k 下都是 1，最大权重在整个范围内只变化 {scaled}。"
        "一行有多尖锐还取决于键的个数：标准差的临界值按 sqrt(2 log n) 增长。",
    )


CLAIM = Claim(
    id="saturation-by-dim",
    group="saturation",
    sources=("S1", "S2"),
    statement=Text(
        "Without the scale the largest attention weight tends to 1 as d_k grows; with the scale it does not move.",
        "没有缩放时，最大的注意力权重随 d_k 增大而趋于 1；有缩放时它保持不变。",
    ),
    formula=r"z_j = \beta \, q \cdot k_j, \qquad \sigma_z = \beta \sqrt{d_k}, \qquad "
    r"1 - \mathrm{E}[p_{\max}] \propto \frac{1}{\sigma_z} \quad (\sigma_z \gg \sqrt{2 \log n})",
    method=Text(
        "Independent rows of random queries and keys with N(0, 1) components for each d_k; the mean largest weight "
        "with beta = 1 and with beta = 1/sqrt(d_k) on the same draws.",
        "对每个 d_k，抽取分量服从 N(0, 1) 的独立的查询与键；在同一批样本上，分别取 beta = 1 与 beta = 1/sqrt(d_k)，"
        "计算最大权重的均值。",
    ),
    control=Text(
        "The two scales change places: what is called unscaled is then divided by sqrt(d_k).",
        "两种缩放互换：称为“未缩放”的一侧改为除以 sqrt(d_k)。",
    ),
    parameters={
        "dims": (16, 64, 256, 1024, 4096),
        "keys": 10,
        "rows": 2500,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"dims": (16, 128, 1024), "rows": 1500},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        Part(
            Text(
                "without the scale it grows with d_k and is above 0.95 at the largest",
                "没有缩放时，它随 d_k 增大，在最大的 d_k 处超过 0.95",
            ),
            (
                Expect("peak_rise", low=0.0, at={"side": "unscaled"}),
                Expect("peak_at_the_largest", low=0.95, at={"side": "unscaled"}),
            ),
        ),
        Part(
            Text("with the scale it moves by less than 0.04", "有缩放时，它的变化小于 0.04"),
            (Expect("peak_change_over_all", low=-0.04, high=0.04, at={"side": "scaled"}),),
        ),
    ),
    why=why,
)
