"""paper-footnote: the footnote of the paper, for components that are not Gaussian."""

from __future__ import annotations

from sqrtdk.lab._products import dot_products, standard_pairs
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text


def measure(run: Run) -> Measured:
    """Mean and variance of q . k for components of several distributions."""
    figures = []
    for components in run["components"]:
        for d_k in run["dims"]:
            rng, place = run.generator(components, d_k), {"components": components, "d_k": d_k}
            product = dot_products(rng, run["pairs"], d_k, standard_pairs(components, run["shared"]))
            figures += [
                mean("mean_over_root_d_k", product / d_k**0.5, **place),
                mean("variance_over_d_k", (product - product.mean()) ** 2 / d_k, **place),
            ]
    return Measured(figures, (_plot(Figures(figures), run["dims"]),))


def _plot(figures: Figures, dims: tuple[int, ...]) -> Plot:
    return Plot(
        "variance",
        Text(
            "Variance of the dot product over d_k, for four distributions of the components with mean 0 and variance "
            "1.",
            "点积的方差除以 d_k：四种均值为 0、方差为 1 的分量分布。",
        ),
        "components",
        r"variance of $q \cdot k$, over $d_k$",
        tuple(
            over(f"$d_k = {d_k}$", figures.all("variance_over_d_k", d_k=d_k), "components", style="bars")
            for d_k in dims
        ),
        lines=(("footnote", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(float(figure.at["d_k"]) for figure in figures)
    normal, signs, laplace = (
        figures("variance_over_d_k", components=name, d_k=large) for name in ("normal", "signs", "Laplace")
    )
    return Text(
        "The proof uses no distribution: independence gives E[q_i k_i] = E[q_i] E[k_i] = 0 and E[q_i^2 k_i^2] = 1, and "
        f"uncorrelated terms add their variances. At d_k = {large:g} the variance over d_k is {normal} for normal "
        f"components, {signs} for +-1 and {laplace} for heavy-tailed Laplace components. What the footnote needs is "
        "independence, and a trained model does not grant it: as soon as queries and keys point the same way, the mean "
        "of the product grows like d_k, and 1/sqrt(d_k) no longer keeps up with it.",
        "证明并不依赖分布的形状：由独立性得 E[q_i k_i] = E[q_i] E[k_i] = 0，E[q_i^2 k_i^2] = 1，互不相关的项方差相加。"
        f"d_k = {large:g} 时，方差除以 d_k 对正态分量为 {normal}，对取 ±1 的分量为 {signs}，对重尾的拉普拉斯分量为 "
        f"{laplace}。"
        "脚注真正需要的是独立性，而训练好的模型并不保证这一点：一旦查询和键朝向相近，点积的均值就随 d_k "
        "线性增长，1/sqrt(d_k) 便跟不上了。",
    )


CLAIM = Claim(
    id="paper-footnote",
    group="structure",
    sources=("S1", "arXiv:1706.03762"),
    statement=Text(
        "The paper's footnote: if the components of q and k are independent with mean 0 and variance 1, the dot "
        "product "
        "has mean 0 and variance d_k.",
        "论文脚注：若 q 与 k 的各分量相互独立，均值为 0、方差为 1，则点积的均值为 0、方差为 d_k。",
    ),
    formula=r"\mathrm{Var}\left[\sum_{i=1}^{d_k} q_i k_i\right] = "
    r"\sum_{i=1}^{d_k} \mathrm{E}[q_i^2]\,\mathrm{E}[k_i^2] = d_k",
    method=Text(
        "Independent pairs with normal, uniform, +-1 and Laplace components of mean 0 and variance 1; mean and "
        "variance "
        "of q . k with t intervals.",
        "抽取独立的 q、k 对，分量分别取正态、均匀、±1 和拉普拉斯分布，均值为 0、方差为 1；计算 q · k 的均值和方差及其 "
        "t "
        "置信区间。",
    ),
    control=Text(
        "Half of the components of k are equal to those of q. Means and variances of the components stay 0 and 1, but "
        "q "
        "and k are dependent: mean and variance of the product are off.",
        "k 的一半分量与 q 的相同。各分量的均值和方差仍为 0 和 1，但 q 与 k 不再独立：点积的均值和方差都不再符合脚注。",
    ),
    parameters={
        "components": ("normal", "uniform", "signs", "Laplace"),
        "dims": (16, 64, 256),
        "pairs": 150_000,
        "shared": 0.0,
    },
    quick={"dims": (16, 64), "pairs": 60_000},
    flipped={"shared": 0.5},
    measure=measure,
    parts=(
        Part(Text("the mean is 0", "均值为 0"), (Expect("mean_over_root_d_k", low=-0.05, high=0.05),)),
        Part(
            Text("the variance is d_k, within 5%", "方差等于 d_k（误差 5% 以内）"),
            (Expect("variance_over_d_k", low=0.95, high=1.05),),
        ),
    ),
    why=why,
)
