"""var-general: the variance of a product of components with any means and variances."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.lab._products import dot_products, standard_pairs
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.theory import dot_product_moments

# mean and variance of a component of q, then of k
SETTINGS = {
    "A": (0.0, 1.0, 0.0, 1.0),
    "B": (1.0, 1.0, 0.0, 1.0),
    "C": (0.0, 4.0, 0.0, 0.25),
    "D": (2.0, 0.5, -1.0, 3.0),
    "E": (3.0, 1.0, 3.0, 1.0),
}


def measure(run: Run) -> Measured:
    """Variance of the product of independent components over the formula's, for each setting and distribution."""
    figures = []
    for setting in SETTINGS:
        for components in run["components"]:
            for d_k in run["dims"]:
                place = {"setting": setting, "components": components, "d_k": d_k}
                figures.append(mean("variance_over_formula", _ratios(run, setting, components, d_k), **place))
    return Measured(figures, (_plot(Figures(figures), run["components"]),))


def _ratios(run: Run, setting: str, components: str, d_k: int) -> Tensor:
    """Squared deviations of the products, over the variance that the formula gives."""
    query_mean, query_variance, key_mean, key_variance = SETTINGS[setting]
    standard = standard_pairs(components, run["shared"])

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = standard(rng, pairs, d_k)
        return query_mean + query_variance**0.5 * query, key_mean + key_variance**0.5 * key

    product = dot_products(run.generator(setting, components, d_k), run["pairs"], d_k, draw)
    formula = dot_product_moments(
        d_k, query_mean=query_mean, query_variance=query_variance, key_mean=key_mean, key_variance=key_variance
    )
    return (product - product.mean()) ** 2 / formula.variance


def _plot(figures: Figures, distributions: tuple[str, ...]) -> Plot:
    return Plot(
        "variance",
        Text(
            "Variance of the product of two components over the formula's, for five settings of means and variances.",
            "两个分量之积的方差除以公式给出的值，共五组均值与方差。",
        ),
        "setting",
        "variance over the formula's",
        tuple(
            over(name, figures.all("variance_over_formula", components=name, d_k=1), "setting", style="bars")
            for name in distributions
        ),
        lines=(("formula", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    far = figures("variance_over_formula", setting="E", components="normal", d_k=1)
    mean_part = SETTINGS["E"][0] ** 2 * SETTINGS["E"][3] + SETTINGS["E"][2] ** 2 * SETTINGS["E"][1]
    return Text(
        "With q = mq + a and k = mk + b, where a and b have mean 0, the product is mq mk + mq b + mk a + a b. The last "
        "three terms are uncorrelated if q and k are independent, so their variances add: mq^2 vk, mk^2 vq and vq vk. "
        "Only means and variances enter, whatever the distribution, and a dot product of d_k such terms has d_k times "
        f"the variance. With means of 3 and variances of 1 the means alone bring {mean_part:g} of "
        f"{mean_part + 1:g}, and the measured variance is {far} times the formula's. The scale of 1/sqrt(d_k) "
        "gives variance 1 only where the means are 0 and the variances 1.",
        "设 q = mq + a、k = mk + b，其中 a、b 的均值为 0，则乘积为 mq mk + mq b + mk a + a b。若 q 与 k 独立，"
        "后三项互不相关，"
        "方差可以相加：mq^2 vk、mk^2 vq 与 vq vk。公式只用到均值和方差，与分布的形状无关；d_k "
        "个这样的项之和，方差是单项的 "
        "d_k 倍。"
        f"当均值为 3、方差为 1 时，总方差 {mean_part + 1:g} 中有 {mean_part:g} 来自均值，实测方差是公式值的 {far} 倍。"
        "可见只有在均值为 0、方差为 1 时，1/sqrt(d_k) 才使方差等于 1。",
    )


CLAIM = Claim(
    id="var-general",
    group="statistics",
    sources=("S3",),
    statement=Text(
        "If the components have means mq, mk and variances vq, vk, the product of two of them has the variance vq vk + "
        "mq^2 vk + mk^2 vq.",
        "若分量的均值为 mq、mk，方差为 vq、vk，则两个分量之积的方差为 vq vk + mq^2 vk + mk^2 vq。",
    ),
    formula=r"\mathrm{Var}[q_i k_i] = \sigma_q^2 \sigma_k^2 + \mu_q^2 \sigma_k^2 + \mu_k^2 \sigma_q^2",
    method=Text(
        "Five settings of (mq, vq, mk, vk): A (0, 1, 0, 1), B (1, 1, 0, 1), C (0, 4, 0, 0.25), D (2, 0.5, -1, 3), E "
        "(3, "
        "1, 3, 1), with normal and with uniform components. Mean squared deviation of the product, and of sums of d_k "
        "of them, over d_k times the formula, with t intervals.",
        "五组 (mq, vq, mk, vk)：A (0, 1, 0, 1)、B (1, 1, 0, 1)、C (0, 4, 0, 0.25)、D (2, 0.5, -1, 3)、E (3, 1, 3, 1)，"
        "分量分别取正态分布和均匀分布。计算乘积以及 d_k 个乘积之和的均方偏差，除以公式值的 d_k 倍，并给出 t 置信区间。",
    ),
    control=Text(
        "Half of the components of k are equal to those of q: they are no longer independent, and the formula is off.",
        "k 的一半分量与 q 的相同：二者不再独立，公式不再成立。",
    ),
    parameters={"dims": (1, 16, 64), "components": ("normal", "uniform"), "pairs": 400_000, "shared": 0.0},
    quick={"dims": (1, 8), "pairs": 200_000},
    flipped={"shared": 0.5},
    measure=measure,
    parts=(
        Part(
            Text("the variance is the formula's, within 5%", "方差等于公式值（误差 5% 以内）"),
            (Expect("variance_over_formula", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
