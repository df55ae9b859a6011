"""additive-bounded: how additive scores grow with the width of the hidden layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import sqrtdk
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import largest, mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.scales import none
from sqrtdk.scores import additive
from sqrtdk.stats import RowStats

INPUT_DIM = 64
STARTS: dict[str, Callable[[int], float]] = {  # standard deviation of v
    "Xavier": lambda width: math.sqrt(2.0 / (width + 1)),
    "variance 1": lambda width: 1.0,
}


def measure(run: Run) -> Measured:
    """Scores of fresh additive attention, one set of weights a draw, over the width and the start of v."""
    figures = []
    for start, std in STARTS.items():
        for width in run["widths"]:
            v, rows = _scores(run, width, std(width))
            bound = v.abs().sum(-1)
            extreme = torch.maximum(rows.max.amax(-1), -rows.min.amin(-1))
            unbiased = run["keys"] / (run["keys"] - 1)
            figures += [
                largest("largest_score_over_bound", extreme / bound, start=start, width=width),
                mean("score_std", (rows.variance.mean(-1) * unbiased).sqrt(), start=start, width=width),
                mean("bound", bound, start=start, width=width),
            ]
    return Measured(figures, (_plot(Figures(figures), run["widths"]),))


def _scores(run: Run, width: int, std: float) -> tuple[Tensor, RowStats]:
    """The vector v (draws, width), and the rows of each draw's scores."""
    rng, draws = run.generator("weights", width), run["draws"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    query, key = normal(draws, run["queries"], INPUT_DIM), normal(draws, run["keys"], INPUT_DIM)
    query_weight, key_weight = (normal(draws, INPUT_DIM, width) / INPUT_DIM**0.5 for _ in range(2))
    v = std * normal(draws, width)
    if run["score"] == "dot":
        return v, sqrtdk.measure(query @ query_weight, key @ key_weight, scale=none())
    return v, sqrtdk.measure(query, key, score=additive(v, query_weight, key_weight))


def _plot(figures: Figures, widths: tuple[int, ...]) -> Plot:
    base = figures("score_std", start="variance 1", width=widths[0]).value
    return Plot(
        "std",
        Text(
            "Standard deviation of additive scores over the width of the hidden layer.",
            "加性注意力得分的标准差随隐藏层宽度的变化。",
        ),
        "width $A$",
        "standard deviation of the scores",
        (
            *(over(f"v: {start}", figures.all("score_std", start=start), "width") for start in STARTS),
            curve(r"$\propto \sqrt{A}$", widths, (base * (w / widths[0]) ** 0.5 for w in widths), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    fresh, unit = (figures.all("score_std", start=start)[-1] for start in STARTS)
    bound = figures.all("bound", start="Xavier")[-1]
    nearest = max(figures.all("largest_score_over_bound"), key=lambda figure: figure.value)
    return Text(
        "tanh is bounded by 1, so the score v . tanh(...) is bounded by the sum of the magnitudes of v; the score "
        f"that came nearest to it was {nearest} of it. But that bound grows with the width, and it is not what the "
        "softmax sees. The score is a sum of A terms, as a dot product is, and its variance is A Var(v) times the "
        "mean square of the part of tanh that differs between keys. With v drawn by Xavier's rule, of variance 2/(A + "
        f"1), the width drops out: a standard deviation of {fresh} at a width of {fresh.at['width']}, although the "
        f"bound there is {bound}. With components of v of variance 1 it grows as the root of the width, to {unit}. "
        "What keeps additive attention in range is the start of v, which is a 1/sqrt(width) under another name, and v "
        "can grow in training.",
        f"tanh 的绝对值不超过 1，所以得分 v · tanh(...) 不超过 v 各分量绝对值之和；最接近上界的得分是上界的 {nearest} "
        "倍。但这个上界随宽度增大，而且 softmax 看到的并不是上界。与点积一样，得分是 A 项之和，其方差是 A Var(v) 乘以 "
        "tanh 中随键变化部分的均方。若 v 按 Xavier 规则抽取（方差 2/(A + 1)），宽度正好约掉：宽度为 "
        f"{fresh.at['width']} 时标准差为 {fresh}，而上界为 {bound}。若 v 的分量方差为 1，标准差按宽度的平方根增长，"
        f"达到 {unit}。真正使加性注意力保持在合适范围内的，是 v 的初始化，它等于换了名字的 1/sqrt(宽度)；而 v "
        "在训练中仍可能增大。",
    )


CLAIM = Claim(
    id="additive-bounded",
    group="factors",
    sources=("S1",),
    statement=Text(
        "Additive attention needs no scale, since tanh is bounded.",
        "加性注意力不需要缩放，因为 tanh 有界。",
    ),
    formula=r"\left| v^\top \tanh(W_q q + W_k k) \right| \le \Vert v \Vert_1, \qquad "
    r"\mathrm{Var} \propto A \, \mathrm{Var}[v]",
    method=Text(
        "Fresh weights of additive attention for several widths of its hidden layer, with v drawn by Xavier's rule or "
        "with components of variance 1, on random queries and keys of variance 1: the largest of all scores against "
        "its bound, and standard deviation over the keys of a row. No scale needed means a standard deviation of at "
        "most 2 at every width.",
        "对若干隐藏层宽度，新抽取加性注意力的权重，其中 v 按 Xavier 规则抽取，或取方差为 1 的分量；查询与键为方差为 1 "
        "的随机向量。比较所有得分中的最大者与上界，并计算一行之内得分的标准差。“不需要缩放”"
        "指在每种宽度下标准差都不超过 2。",
    ),
    control=Text(
        "The dot product of the two hidden layers, without tanh and without a scale: neither bounded nor in range.",
        "改用两个隐藏层的点积，既无 tanh 也不缩放：既超出上界，也不在合适的范围内。",
    ),
    parameters={"widths": (16, 64, 256, 1024), "draws": 32, "queries": 32, "keys": 64, "score": "additive"},
    quick={"widths": (64, 512), "draws": 12, "queries": 16, "keys": 32},
    flipped={"score": "dot"},
    measure=measure,
    parts=(
        Part(
            Text("no score exceeds the sum of the magnitudes of v", "得分不超过 v 各分量绝对值之和"),
            (Expect("largest_score_over_bound", high=1.0),),
        ),
        Part(
            Text(
                "with v by Xavier's rule the standard deviation is at most 2 at every width",
                "v 按 Xavier 规则初始化时，每种宽度下标准差都不超过 2",
            ),
            (Expect("score_std", high=2.0, at={"start": "Xavier"}),),
        ),
        Part(
            Text(
                "with components of v of variance 1 the standard deviation is at most 2 at every width",
                "v 的分量方差为 1 时，每种宽度下标准差都不超过 2",
            ),
            (Expect("score_std", high=2.0, at={"start": "variance 1"}),),
        ),
    ),
    why=why,
)
