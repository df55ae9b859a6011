"""range-64: the three-sigma range of the logits at 64 dimensions."""

from __future__ import annotations

import numpy as np

from sqrtdk.lab._products import product_matrices
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import bootstrap, mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

D_K = 64
LIMIT = 24.0  # 3 once the product is divided by 8


def measure(run: Run) -> Measured:
    """Share of logits within the range, and of rows of growing length that lie in it as a whole."""
    within: list[float] = []
    whole: dict[int, list[float]] = {}
    for product in product_matrices(run, run["draws"], run["length"], D_K, run["component_std"]):
        inside = product.abs() <= LIMIT
        within.append(float(inside.double().mean()))
        for keys in run["row_keys"]:
            whole.setdefault(keys, []).append(float(inside[:, :keys].all(-1).double().mean()))
    figures = [mean("share_within", within)]
    figures += [bootstrap("rows_within", values, np.mean, seed=run.seed, keys=keys) for keys, values in whole.items()]
    return Measured(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "rows",
        Text(
            "Share of rows whose logits all lie within three standard deviations, over the number of keys (d_k = 64).",
            "所有 logit 都落在三倍标准差之内的行所占比例，随键数的变化（d_k = 64）。",
        ),
        "keys",
        r"share of rows within $\pm 3\sigma$",
        (over("measured", figures.all("rows_within"), "keys"),),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    share = figures("share_within")
    row = max(figures.all("rows_within"), key=lambda f: f.at["keys"])
    return Text(
        "sqrt(64) = 8, and three standard deviations of 8 are 24; the scale divides range and logits alike, so that "
        f"the two ranges hold the same pairs. A share of {share} of them lies within. The range is that of one "
        "typical logit, not a bound: a softmax over many keys is decided by its largest logits, and only a share of "
        f"{row} of the rows of {row.at['keys']} keys has none beyond three standard deviations.",
        f"sqrt(64) = 8，三倍标准差就是 24；缩放把区间和 logit 同时除以 8。落在区间内的 logit 所占比例为 {share}。"
        f"这是单个典型 logit 的范围，而不是上界：键很多时，softmax 由最大的几个 logit 决定，在 {row.at['keys']} "
        f"个键的行中，没有任何 logit 超出三倍标准差的行只占 {row}。",
    )


CLAIM = Claim(
    id="range-64",
    group="statistics",
    sources=("S1",),
    statement=Text(
        "At d_k = 64 the dot products lie in [-24, 24], and in [-3, 3] once they are scaled: three standard deviations "
        "to either side, 99.7% of them.",
        "d_k = 64 时，点积落在 [-24, 24] 之内，缩放后落在 [-3, 3] 之内：左右各三倍标准差，占 99.7%。",
    ),
    formula=r"3\,\sqrt{64} = 24, \qquad P(|q \cdot k| \le 24) = P\left(\frac{|q \cdot k|}{8} \le 3\right)",
    method=Text(
        "Matrices of logits of fresh Gaussian queries and keys; share of the logits within the range, and of rows that "
        "lie in it as a whole. The matrices are the independent samples.",
        "每次重新抽取高斯分布的查询和键，计算 logit 矩阵；统计落在区间内的 logit 的比例，"
        "以及整行都落在区间内的行的比例。独立样本是各个矩阵。",
    ),
    control=Text(
        "Components with a standard deviation of 1.5 in place of 1: the range is then too narrow.",
        "各分量的标准差取 1.5 而不是 1：此时区间太窄。",
    ),
    parameters={"draws": 100, "length": 1024, "row_keys": (8, 16, 32, 64, 128, 256, 512, 1024), "component_std": 1.0},
    quick={"draws": 20, "row_keys": (8, 64, 512)},
    flipped={"component_std": 1.5},
    measure=measure,
    parts=(
        Part(
            Text(
                "99.7% of the dot products lie in [-24, 24], which are the logits in [-3, 3]",
                "99.7% 的点积落在 [-24, 24] 之内，也就是 logit 落在 [-3, 3] 之内",
            ),
            (Expect("share_within", low=0.9965, high=0.9975),),
        ),
    ),
    why=why,
)
