"""minmax-by-dim: the largest and the smallest of eight weights at three dimensions."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.lab._random_rows import SIDES, factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats


def measure(run: Run) -> Measured:
    """Both ends of the weights of independent rows; both sides see the same queries and keys."""
    dims = run["dims"]
    largest: dict[tuple[str, int], Tensor] = {}
    smallest: dict[tuple[str, int], Tensor] = {}  # its logarithm: the weight itself is all tail
    for d_k in dims:
        product = products(run.generator("rows", d_k), draws=run["rows"], keys=run["keys"], d_k=d_k)
        for side in SIDES:
            rows = row_stats(product * factor(run[side], d_k))
            largest[side, d_k], smallest[side, d_k] = rows.peak.flatten(), (rows.min - rows.lse).flatten()
    figures = []
    for side in SIDES:
        for name, weights in (("largest_weight", largest), ("log_smallest_weight", smallest)):
            figures += [mean(name, weights[side, d_k], d_k=d_k, side=side) for d_k in dims]
            change = weights[side, dims[-1]] - weights[side, dims[0]]
            figures.append(mean(f"{name}_change", change, side=side))
    return Measured(figures, _plots(Figures(figures), run["keys"]))


def _plots(figures: Figures, keys: int) -> tuple[Plot, ...]:
    uniform = {"largest_weight": 1 / keys, "log_smallest_weight": -math.log(keys)}
    words = {
        "largest_weight": ("largest", "最大权重"),
        "log_smallest_weight": ("logarithm of the smallest", "最小权重的对数"),
    }
    return tuple(
        Plot(
            name.replace("_", "-"),
            Text(
                f"Mean of the {words[name][0]} weight over {keys} random keys.",
                f"{keys} 个随机键的{words[name][1]}的均值。",
            ),
            "$d_k$",
            name.replace("_", " "),
            tuple(over(side, figures.all(name, side=side), "d_k") for side in SIDES),
            x_axis="log",
            lines=(("uniform", uniform[name]),),
        )
        for name in uniform
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(figure.at["d_k"] for figure in figures.all("largest_weight"))
    largest = {side: str(figures("largest_weight", d_k=d_k, side=side)) for side in SIDES}
    smallest = {side: number(math.exp(figures("log_smallest_weight", d_k=d_k, side=side).value)) for side in SIDES}
    return Text(
        "The ratio of two weights is e to the difference of their logits, and without the scale all differences grow "
        f"like sqrt(d_k). At d_k = {d_k} the largest of eight weights is {largest['unscaled']} and the smallest, "
        f"in the geometric mean, {smallest['unscaled']}. Divided by sqrt(d_k), the differences have nearly the same "
        f"distribution at every d_k: {largest['scaled']} and {smallest['scaled']} at the same dimension, hardly other "
        "than at the smallest dimension. The smallest weight vanishes long before the largest is near 1: the former "
        "falls exponentially in sqrt(d_k), what the latter lacks to 1 only like 1/sqrt(d_k).",
        "两个权重之比等于以 e 为底、以 logits 之差为指数的幂；没有缩放时，所有的差都随 sqrt(d_k) 增大。"
        f"在 d_k = {d_k} 时，八个权重中最大的是 {largest['unscaled']}，最小的（几何平均）是 {smallest['unscaled']}。"
        "除以 sqrt(d_k) 之后，这些差在任何 d_k 下的分布都几乎相同："
        f"在同一维度下分别是 {largest['scaled']} 和 {smallest['scaled']}，与最小的维度几乎没有差别。"
        "最小权重早在最大权重接近 1 之前就已消失：前者随 sqrt(d_k) 按指数下降，后者与 1 之差只按 1/sqrt(d_k) 下降。",
    )


CLAIM = Claim(
    id="minmax-by-dim",
    group="saturation",
    sources=("S2",),
    statement=Text(
        "Over 8 keys at d 32, 128 and 512 the largest unscaled weight goes to 1 and the smallest to 0 as d grows; "
        "scaled, both stay where they are.",
        "对 8 个键，当 d 取 32、128、512 时，未缩放的最大权重随 d 增大趋于 1，最小权重趋于 0；缩放后两者都保持不变。",
    ),
    formula=r"\frac{p_i}{p_j} = e^{z_i - z_j}, \qquad z_i - z_j \sim \beta \sqrt{2 d_k}",
    method=Text(
        "Independent rows of one random query and 8 random keys; the mean of the largest weight and of the "
        "logarithm of the smallest on either side.",
        "独立地抽取由一个随机查询与 8 个随机键构成的行，计算两侧的最大权重的均值，以及最小权重的对数的均值。",
    ),
    control=Text(
        "The two scales change places: what is called unscaled is then divided by sqrt(d_k).",
        "两种缩放互换：称为“未缩放”的一侧改为除以 sqrt(d_k)。",
    ),
    parameters={"dims": (32, 128, 512), "keys": 8, "rows": 20_000, "unscaled": "none", "scaled": "sqrt_dk"},
    quick={"rows": 3000},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        Part(
            Text(
                "unscaled, the largest grows by more than 0.08 and is above 0.9 at the largest d",
                "未缩放时，最大权重的增量超过 0.08，在最大的 d 处超过 0.9",
            ),
            (
                Expect("largest_weight_change", low=0.08, at={"side": "unscaled"}),
                Expect("largest_weight", low=0.9, at={"side": "unscaled", "d_k": 512}),
            ),
        ),
        Part(
            Text(
                "unscaled, the smallest falls by more than a factor e^10 and is below e^-20 at the largest d",
                "未缩放时，最小权重下降到不足原来的 e^-10，在最大的 d 处小于 e^-20",
            ),
            (
                Expect("log_smallest_weight_change", high=-10.0, at={"side": "unscaled"}),
                Expect("log_smallest_weight", high=-20.0, at={"side": "unscaled", "d_k": 512}),
            ),
        ),
        Part(
            Text(
                "scaled, the largest moves by less than 0.03 and the logarithm of the smallest by less than 0.3",
                "缩放后，最大权重的变化小于 0.03，最小权重的对数的变化小于 0.3",
            ),
            (
                Expect("largest_weight_change", low=-0.03, high=0.03, at={"side": "scaled"}),
                Expect("log_smallest_weight_change", low=-0.3, high=0.3, at={"side": "scaled"}),
            ),
        ),
    ),
    why=why,
)
