"""var-linear: the variance of a dot product is its dimension."""

from __future__ import annotations

from sqrtdk.lab._products import dot_products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.theory import dot_product_moments


def measure(run: Run) -> Measured:
    """Mean and variance of q . k over independent pairs."""
    figures = []
    for d_k in run["dims"]:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k) * d_k ** -run["power"]
        figures += [
            mean("mean_over_root_d_k", product / d_k**0.5, d_k=d_k),
            mean("variance_over_d_k", product**2 / d_k, d_k=d_k),  # the mean is known to be 0
        ]
    return Measured(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    return Plot(
        "variance",
        Text("Variance of the dot product over its dimension d_k.", "点积的方差除以维度 d_k。"),
        "$d_k$",
        r"variance of $q \cdot k$, over $d_k$",
        (
            over("measured", figures.all("variance_over_d_k"), "d_k", style="points"),
            curve("theory", dims, (dot_product_moments(d).variance / d for d in dims), style="dashed"),
        ),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(figures.all("variance_over_d_k"), key=lambda f: f.at["d_k"])
    return Text(
        "A dot product is a sum of d_k independent terms q_i k_i. Each has mean 0 and variance 1, and variances of "
        f"independent terms add. At d_k = {large.at['d_k']} the measured variance is {large} times d_k.",
        "点积是 d_k 个独立项 q_i k_i 之和。每一项的均值为 0、方差为 1，而独立项的方差可以相加。"
        f"在 d_k = {large.at['d_k']} 时，测得的方差是 d_k 的 {large} 倍。",
    )


CLAIM = Claim(
    id="var-linear",
    group="statistics",
    sources=("S0", "S1", "S2", "S3", "S4"),
    statement=Text(
        "If the components of q and k are independent draws from N(0, 1), their dot product has mean 0 and variance "
        "d_k.",
        "若 q 与 k 的各分量独立且服从 N(0, 1)，则点积的均值为 0，方差为 d_k。",
    ),
    formula=r"\mathrm{E}[q \cdot k] = 0, \qquad \mathrm{Var}[q \cdot k] = \sum_{i=1}^{d_k} \mathrm{Var}[q_i k_i] = d_k",
    method=Text(
        "Draw independent pairs q, k for each d_k; mean and second moment of q . k with Student's t intervals.",
        "对每个 d_k 抽取独立的 q、k 对，计算 q · k 的均值与二阶矩，并给出 t 置信区间。",
    ),
    control=Text(
        "The products are divided by sqrt(d_k) first: their variance is then 1, not d_k.",
        "先把点积除以 sqrt(d_k)：此时方差为 1，而不是 d_k。",
    ),
    parameters={"dims": (1, 4, 16, 64, 256, 1024), "pairs": 200_000, "power": 0.0},
    quick={"dims": (4, 64, 512), "pairs": 40_000},
    flipped={"power": 0.5},
    measure=measure,
    parts=(
        Part(
            Text("the mean is 0", "均值为 0"),
            (Expect("mean_over_root_d_k", low=-0.05, high=0.05),),
        ),
        Part(
            Text("the variance is d_k, within 5%", "方差等于 d_k（误差 5% 以内）"),
            (Expect("variance_over_d_k", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
