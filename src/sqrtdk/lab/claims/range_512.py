"""range-512: how far the logits reach at 512 dimensions, without and with the scale."""

from __future__ import annotations

import math

from sqrtdk.lab._products import product_matrices
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures, number
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.theory import logit_distribution

D_K = 512
FAR = 100.0
NEAR = 3.0


def measure(run: Run) -> Measured:
    """Largest logits of one row and of whole matrices, and the share of logits near 0, a draw of q and k at a time."""
    length = run["length"]
    without, scaled = (factor(run[name], D_K) for name in ("without", "scaled"))
    largest: dict[int, list[float]] = {}
    rows, beyond, within = [], [], []
    for product in product_matrices(run, run["draws"], length, D_K):
        size = product.abs()
        rows.append(float(size.amax(-1).mean()) * without)
        beyond.append(float((size * without >= FAR).double().mean()))
        within.append(float((size * scaled <= NEAR).double().mean()))
        for side in run["sides"]:
            largest.setdefault(side, []).append(float(size[:side, :side].max()) * without)
    figures = [
        mean("largest_logit_of_a_row", rows, keys=length),
        *(mean("largest_logit", values, logits=side * side) for side, values in largest.items()),
        mean("share_beyond_100", beyond),
        mean("share_within_3_scaled", within),
    ]
    return Measured(figures, (_plot(Figures(figures), without),))


def _plot(figures: Figures, scale: float) -> Plot:
    theory = logit_distribution(D_K, scale)
    numbers = [int(figure.at["logits"]) for figure in figures.all("largest_logit")]
    medians = (theory.quantile(1.0 - math.log(2.0) / (2 * n)) for n in numbers)  # of the largest of n independent ones
    return Plot(
        "largest",
        Text(
            "Largest magnitude among the unscaled logits at d_k = 512, over the number of logits.",
            "d_k = 512 时未缩放 logit 的最大绝对值随 logit 个数的变化。",
        ),
        "number of logits",
        "largest magnitude",
        (
            over("unscaled", figures.all("largest_logit"), "logits", style="points"),
            curve("median in theory", numbers, medians, style="dashed"),
        ),
        x_axis="log",
        lines=(("100", FAR),),
    )


def _side(largest: Figure, below: str, beyond: str) -> str:
    return below if largest.value < FAR else beyond


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    row, share = figures("largest_logit_of_a_row"), figures("share_beyond_100")
    matrix = max(figures.all("largest_logit"), key=lambda f: f.at["logits"])
    within = figures("share_within_3_scaled")
    rule = math.erf(NEAR / math.sqrt(2.0))
    return Text(
        f"{FAR:g} is {number(FAR / D_K**0.5)} standard deviations of {number(D_K**0.5)}: far out in the tail. How far "
        f"a sample reaches depends on its size. Among the {row.at['keys']} logits of one row the largest magnitude is "
        f"{row} on average; among the {matrix.at['logits']} logits of a matrix it is {matrix}. A share of {share} of "
        f"all logits lies beyond {FAR:g}. So a typical row of this length ends {_side(row, 'below', 'beyond')} "
        f"+-{FAR:g} and a typical matrix {_side(matrix, 'below', 'beyond')} it: what one softmax gets to see is the "
        f"row. After the scale a share of {within} lies within +-{NEAR:g}; the three-sigma rule of a normal "
        f"distribution gives {number(rule)}.",
        f"{FAR:g} 相当于标准差 {number(D_K**0.5)} 的 {number(FAR / D_K**0.5)} 倍，处在分布很远的尾部。"
        f"样本能达到多远取决于样本的大小：一行 {row.at['keys']} 个 logit 中，最大绝对值平均为 {row}；整个矩阵的 "
        f"{matrix.at['logits']} 个 logit 中则为 {matrix}。绝对值超过 {FAR:g} 的 logit 所占比例为 {share}。可见，"
        f"这样长的一行的最大值通常{_side(row, '不到', '超过')} ±{FAR:g}，"
        f"整个矩阵的最大值则通常{_side(matrix, '不到', '超过')} ±{FAR:g}；而一次 softmax 只看到一行。缩放之后，落在 "
        f"±{NEAR:g} 之内的比例为 {within}；正态分布的三倍标准差法则给出 {number(rule)}。",
    )


CLAIM = Claim(
    id="range-512",
    group="statistics",
    sources=("S0",),
    statement=Text(
        "At 512 dimensions the unscaled inputs of the softmax reach values such as +-100; the scaled ones stay within "
        "+-3 for 99.7%.",
        "维度为 512 时，未缩放的 softmax 输入可达 ±100 这样的数值；缩放之后，99.7% 落在 ±3 之内。",
    ),
    formula=r"P(|q \cdot k| > 100) \approx 2\,\Phi\left(-\frac{100}{\sqrt{512}}\right) \approx 10^{-5}, \qquad "
    r"P(|z| \le 3) \approx 0.997",
    method=Text(
        "Matrices of logits of fresh Gaussian queries and keys. Largest magnitude of a row, of squares of growing size "
        "and of the whole; share of the scaled logits within +-3. The matrices are the independent samples.",
        "每次重新抽取高斯分布的查询和键，计算 logit 矩阵；记录一行、逐渐变大的方块以及整个矩阵中的最大绝对值，"
        "以及缩放后落在 ±3 之内的比例。独立样本是各个矩阵。",
    ),
    control=Text(
        "The scale is exchanged: the logits called unscaled are scaled, and the other way round.",
        "把缩放对调：称为未缩放的 logit 被缩放，反之亦然。",
    ),
    parameters={
        "draws": 60,
        "length": 1024,
        "sides": (8, 16, 32, 64, 128, 256, 512, 1024),
        "without": "none",
        "scaled": "sqrt_dk",
    },
    quick={"draws": 10, "sides": (8, 64, 1024)},
    flipped={"without": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        Part(
            Text("unscaled, +-100 is reached in a row of 1024 keys", "未缩放时，一行 1024 个键中会达到 ±100"),
            (Expect("largest_logit_of_a_row", low=FAR),),
        ),
        Part(
            Text(
                "unscaled, +-100 is reached among the million logits of 1024 queries and keys",
                "未缩放时，1024 个查询与 1024 个键的一百万个 logit 中会达到 ±100",
            ),
            (Expect("largest_logit", low=FAR, at={"logits": 1024 * 1024}),),
        ),
        Part(
            Text("scaled, 99.7% lie within +-3", "缩放之后，99.7% 落在 ±3 之内"),
            (Expect("share_within_3_scaled", low=0.9965, high=0.9975),),
        ),
    ),
    why=why,
)
