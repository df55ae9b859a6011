"""std-512: the standard deviation of the logits at 512 dimensions, without and with the scale."""

from __future__ import annotations

from sqrtdk.lab._products import dot_products, root_mean_square
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text


def measure(run: Run) -> Measured:
    """Standard deviation of scaled and unscaled products over independent pairs."""
    figures = []
    for d_k in run["dims"]:
        product = run["component_std"] ** 2 * dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        figures += [
            root_mean_square("standard_deviation", factor(scale, d_k) * product, d_k=d_k, scale=scale)
            for scale in ("none", "sqrt_dk")
        ]
    return Measured(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    measured = [
        over(label, figures.all("standard_deviation", scale=scale), "d_k", style="points")
        for label, scale in (("unscaled", "none"), (r"scaled by $1/\sqrt{d_k}$", "sqrt_dk"))
    ]
    return Plot(
        "deviation",
        Text(
            "Standard deviation of the logits over d_k, without and with the scale.",
            "有无缩放时 logit 的标准差随 d_k 的变化。",
        ),
        "$d_k$",
        "standard deviation of the logits",
        (*measured, curve(r"$\sqrt{d_k}$", dims, (d**0.5 for d in dims), style="dashed")),
        x_axis="log",
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    none, scaled = (figures("standard_deviation", d_k=512, scale=scale) for scale in ("none", "sqrt_dk"))
    return Text(
        "The variance of a sum of 512 independent terms of variance 1 is 512, and the standard deviation its root, "
        f"{number(512**0.5)}. Measured: {none} without the scale. A factor on the logits multiplies their standard "
        f"deviation, and 1/sqrt(512) takes it to {scaled}.",
        f"512 个方差为 1 的独立项之和，其方差为 512，标准差是它的平方根。实测：不缩放时为 {none}。给 logit "
        f"乘上一个因子，标准差就乘上同一个因子；乘以 1/sqrt(512) 之后为 {scaled}。",
    )


CLAIM = Claim(
    id="std-512",
    group="statistics",
    sources=("S0",),
    statement=Text(
        "At 512 dimensions the unscaled dot products have a standard deviation of about 22.6, the scaled ones of 1.",
        "维度为 512 时，未缩放点积的标准差约为 22.6，缩放后约为 1。",
    ),
    formula=r"\sigma(q \cdot k) = \sqrt{512} \approx 22.63, \qquad "
    r"\sigma\left(\frac{q \cdot k}{\sqrt{512}}\right) = 1",
    method=Text(
        "Independent pairs q, k with components from N(0, 1); root of the mean square of q . k and of q . k / "
        "sqrt(d_k), with the root of its t interval. About means within 3%.",
        "抽取各分量服从 N(0, 1) 的独立 q、k 对，计算 q · k 与 q · k / sqrt(d_k) 的均方根，置信区间取均方的 t "
        "区间的平方根。“约为”指误差在 3% 以内。",
    ),
    control=Text(
        "Components with a standard deviation of 1.5 in place of 1: the numbers hold for unit variance only.",
        "各分量的标准差取 1.5 而不是 1：上述数值只在单位方差下成立。",
    ),
    parameters={"dims": (8, 32, 128, 512, 2048), "pairs": 100_000, "component_std": 1.0},
    quick={"dims": (32, 512), "pairs": 40_000},
    flipped={"component_std": 1.5},
    measure=measure,
    parts=(
        Part(
            Text("unscaled: 22.6, within 3%", "未缩放：22.6（误差 3% 以内）"),
            (Expect("standard_deviation", low=21.92, high=23.28, at={"d_k": 512, "scale": "none"}),),
        ),
        Part(
            Text("scaled: 1, within 3%", "缩放后：1（误差 3% 以内）"),
            (Expect("standard_deviation", low=0.97, high=1.03, at={"d_k": 512, "scale": "sqrt_dk"}),),
        ),
    ),
    why=why,
)
