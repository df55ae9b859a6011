"""init-scaling: whether an initialisation of q and k can take the place of the scale."""

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
    """Variance of unscaled products, for both readings of N(0, 1/sqrt(d)): component variance d^-power."""
    figures = []
    for d_k in run["dims"]:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        for reading, power in run["powers"].items():
            variance = d_k**-power
            figures.append(mean("variance", (variance * product) ** 2, d_k=d_k, reading=reading))
    return Measured(figures, (_plot(Figures(figures), run["dims"], run["powers"]),))


def _plot(figures: Figures, dims: tuple[int, ...], powers: dict[str, float]) -> Plot:
    series = []
    for reading, power in powers.items():
        theory = (dot_product_moments(d, query_variance=d**-power, key_variance=d**-power).variance for d in dims)
        series += [
            over(reading, figures.all("variance", reading=reading), "d_k", style="points"),
            curve(f"{reading}, theory", dims, theory, style="dashed"),
        ]
    return Plot(
        "variance",
        Text(
            r"Variance of the unscaled dot product, if 1/sqrt(d) is the variance or the standard deviation of each "
            "component.",
            "未缩放点积的方差：把 1/sqrt(d) 读作每个分量的方差或标准差。",
        ),
        "$d$",
        r"variance of $q \cdot k$",
        tuple(series),
        x_axis="log",
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    large = max(float(figure.at["d_k"]) for figure in figures)
    as_variance = figures("variance", reading="variance", d_k=large)
    as_deviation = figures("variance", reading="deviation", d_k=large)
    return Text(
        "If each component has variance v, the product has variance d v^2. It is 1 for v = 1/sqrt(d): the second "
        f"argument must be the variance, which gives {as_variance} at d = {large:g}. In code it is the "
        "standard deviation (torch.nn.init.normal_, numpy.random.normal, randn() * s): then v = 1/d and the variance "
        f"of the product is 1/d, measured {as_deviation}. The logits are then nearly equal and the softmax nearly "
        "uniform. The standard deviation to pass is d^(-1/4), and it holds for the first step only.",
        "若每个分量的方差为 v，点积的方差就是 d v^2，当 v = 1/sqrt(d) 时等于 1：第二个参数必须是方差，"
        f"d = {large:g} 时实测为 {as_variance}。而代码里这个参数是标准差（torch.nn.init.normal_、numpy.random.normal、"
        "randn() * s）："
        f"此时 v = 1/d，点积的方差为 1/d，实测为 {as_deviation}，各 logit 几乎相等，softmax 接近均匀分布。"
        "应当传入的标准差是 d^(-1/4)，而且只在训练的第一步有效。",
    )


CLAIM = Claim(
    id="init-scaling",
    group="statistics",
    sources=("S0",),
    statement=Text(
        "If q and k are drawn from N(0, 1/sqrt(d)), the variance of their product is 1 without any scale.",
        "若 q 与 k 取自 N(0, 1/sqrt(d))，则不加缩放，点积的方差就是 1。",
    ),
    formula=r"\mathrm{Var}[q \cdot k] = d\,v^2 = 1 \quad\Leftrightarrow\quad v = \frac{1}{\sqrt{d}}, \qquad "
    r"\sqrt{v} = d^{-1/4}",
    method=Text(
        "Independent unscaled products of components whose variance is 1/sqrt(d), and of components whose standard "
        "deviation is: the two readings of N(0, 1/sqrt(d)). Second moment with t intervals.",
        "分别取方差为 1/sqrt(d) 与标准差为 1/sqrt(d) 的分量，即 N(0, 1/sqrt(d)) 的两种读法；计算未缩放点积的二阶矩及其 "
        "t "
        "置信区间。",
    ),
    control=Text(
        "Components of variance 1 under either reading: the variance is then d.",
        "两种读法下分量的方差都取 1：此时方差为 d。",
    ),
    parameters={
        "dims": (16, 64, 256, 1024),
        "pairs": 100_000,
        "powers": {"variance": 0.5, "deviation": 1.0},
    },
    quick={"dims": (16, 64, 256), "pairs": 40_000},
    flipped={"powers": {"variance": 0.0, "deviation": 0.0}},
    measure=measure,
    parts=(
        Part(
            Text("where 1/sqrt(d) is the variance of a component", "1/sqrt(d) 是分量的方差时"),
            (Expect("variance", low=0.95, high=1.05, at={"reading": "variance"}),),
        ),
        Part(
            Text(
                "where 1/sqrt(d) is its standard deviation, as in torch and numpy",
                "1/sqrt(d) 是分量的标准差时（torch 与 numpy 的约定）",
            ),
            (Expect("variance", low=0.95, high=1.05, at={"reading": "deviation"}),),
        ),
    ),
    why=why,
)
