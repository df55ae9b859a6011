"""normal: how normal the scaled dot product is."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.lab._products import dot_products
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import LEVEL, Figure, Figures
from sqrtdk.lab.intervals import exact, mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.theory import dot_product_moments, logit_distribution

DIMS = (1, 4, 16, 64, 128)
FAR = 4.0  # standard deviations


def measure(run: Run) -> Measured:
    """Distance of the scaled product's distribution from N(0, 1), and its excess kurtosis."""
    figures = []
    for d_k in DIMS:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        unit = product / d_k**0.5
        figures += [
            _distance(factor(run["scale"], d_k) * product, d_k),
            mean("excess_kurtosis", unit**4 - 6.0 * unit**2 + 3.0, d_k=d_k),  # variance known to be 1: less noise
            exact("tail_beyond_4_over_normal", _tail(d_k), d_k=d_k),
        ]
    return Measured(figures, _plots(Figures(figures)))


def _distance(logits: Tensor, d_k: int) -> Figure:
    """Kolmogorov's distance from N(0, 1); the interval is that of Dvoretzky, Kiefer and Wolfowitz (Massart 1990)."""
    from scipy import stats

    distance = float(stats.kstest(logits.numpy(), "norm").statistic)
    reach = math.sqrt(math.log(2.0 / (1.0 - LEVEL)) / (2 * len(logits)))
    ends = max(0.0, distance - reach), min(1.0, distance + reach)
    return Figure("kolmogorov_distance", distance, *ends, "DKW", len(logits), {"d_k": d_k})


def _tail(d_k: int) -> float:
    """P(z > 4) of the scaled product over that of a normal, from the exact distribution."""
    return math.exp(logit_distribution(d_k).log_above(FAR)) / (0.5 * math.erfc(FAR / math.sqrt(2.0)))


def _plots(figures: Figures) -> tuple[Plot, Plot]:
    kurtosis = Plot(
        "kurtosis",
        Text("Excess kurtosis of the dot product over d_k.", "点积的超额峰度随 d_k 的变化。"),
        "$d_k$",
        "excess kurtosis",
        (
            over("measured", figures.all("excess_kurtosis"), "d_k", style="points"),
            curve("$6/d_k$", DIMS, (dot_product_moments(d).excess_kurtosis for d in DIMS), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )
    tail = Plot(
        "tail",
        Text(
            "Probability of a scaled logit beyond 4, over that of a normal variable (exact distribution).",
            "缩放后的 logit 超过 4 的概率与正态分布相应概率之比（精确分布）。",
        ),
        "$d_k$",
        r"$P(z > 4)$ over the normal's",
        (over("exact", figures.all("tail_beyond_4_over_normal"), "d_k"),),
        x_axis="log",
        y_axis="log",
        lines=(("normal", 1.0),),
    )
    return kurtosis, tail


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    few, many = figures("excess_kurtosis", d_k=4), figures("excess_kurtosis", d_k=64)
    distance = figures("kolmogorov_distance", d_k=64)
    tails = figures("tail_beyond_4_over_normal", d_k=4), figures("tail_beyond_4_over_normal", d_k=64)
    return Text(
        "Mean 0 and variance 1 are exact for every d_k, the shape is not. A product of two normal variables is peaked "
        "and heavy-tailed, with excess kurtosis 6, and a sum of d_k of them keeps 6/d_k. By the central limit theorem "
        f"the sum tends to a normal variable: the excess kurtosis is {few} at d_k = 4 and {many} at d_k = 64, where "
        "the "
        f"distribution functions differ by {distance} at most. The tail comes last: beyond 4 the true probability is "
        f"{tails[0]} times the normal's at d_k = 4 and still {tails[1]} times at d_k = 64. For a single query things "
        "are simpler: given q, the logits of Gaussian keys are exactly normal, with standard deviation "
        "|q|/sqrt(d_k).",
        "均值 0、方差 1 对任何 d_k 都精确成立，分布的形状却不然。两个正态变量之积中间尖、尾部重，超额峰度为 6，d_k "
        "项之和还剩 6/d_k。"
        f"由中心极限定理，和趋于正态分布：d_k = 4 时超额峰度为 {few}，d_k = 64 时为 {many}，此时两个分布函数最多相差 "
        f"{distance}。"
        f"最后收敛的是尾部：超过 4 的真实概率在 d_k = 4 时是正态分布的 {tails[0]} 倍，d_k = 64 时仍是 {tails[1]} 倍。"
        "对单个查询则更简单：给定 q 时，高斯分布的键所对应的 logit 严格服从正态分布，标准差为 |q|/sqrt(d_k)。",
    )


def _part(d_k: int) -> Part:
    at = {"d_k": d_k}
    return Part(
        Text(f"normal at d_k = {d_k}", f"d_k = {d_k} 时服从正态分布"),
        (Expect("kolmogorov_distance", high=0.02, at=at), Expect("excess_kurtosis", low=-0.2, high=0.2, at=at)),
    )


CLAIM = Claim(
    id="normal",
    group="statistics",
    sources=("S1", "S3"),
    statement=Text(
        "The scaled dot product of q and k with components from N(0, 1) is itself distributed as N(0, 1).",
        "各分量服从 N(0, 1) 的 q 与 k，其缩放后的点积也服从 N(0, 1)。",
    ),
    formula=r"z = \frac{q \cdot k}{\sqrt{d_k}}, \qquad \frac{\mathrm{E}[z^4]}{\mathrm{E}[z^2]^2} - 3 = \frac{6}{d_k}",
    method=Text(
        "Independent pairs for each d_k. Kolmogorov's distance of the scaled products from N(0, 1), with the interval "
        "of Dvoretzky, Kiefer and Wolfowitz, and their excess kurtosis with a t interval. Called normal: a distance of "
        "at most 0.02 and an excess kurtosis of at most 0.2.",
        "对每个 d_k 抽取独立的 q、k 对，计算缩放后的点积与 N(0, 1) 之间的 Kolmogorov 距离（置信区间由 "
        "Dvoretzky-Kiefer-Wolfowitz "
        "不等式给出）以及超额峰度（t 置信区间）。距离不超过 0.02 且超额峰度不超过 0.2 时，称为正态。",
    ),
    control=Text(
        "The products are not scaled: whatever d_k, they are not N(0, 1).",
        "不缩放点积：无论 d_k 是多少，都不服从 N(0, 1)。",
    ),
    parameters={"pairs": 500_000, "scale": "sqrt_dk"},
    quick={"pairs": 150_000},
    flipped={"scale": "none"},
    measure=measure,
    parts=tuple(_part(d_k) for d_k in DIMS),
    why=why,
)
