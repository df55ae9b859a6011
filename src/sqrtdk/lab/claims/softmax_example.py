"""softmax-example: five printed weights against the softmax of their logits."""

from __future__ import annotations

import math

import torch

from sqrtdk.lab._printed import LOGITS, WEIGHTS
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.plots import Plot, Series
from sqrtdk.lab.text import Text

TO_THREE_DIGITS = tuple(round(math.exp(z) / sum(map(math.exp, LOGITS)), 3) for z in LOGITS)


def measure(run: Run) -> Measured:
    """The softmax of all five logits, and of the first four alone."""
    logits = torch.tensor(run["logits"], dtype=torch.float64)
    printed = torch.tensor(run["printed"], dtype=torch.float64)
    weights, first_four = logits.softmax(0), logits[:-1].softmax(0)
    figures = [exact("sum_of_printed", float(printed.sum()))]
    for logit, weight, given in zip(run["logits"], weights.tolist(), run["printed"], strict=True):
        figures += [exact("weight", weight, logit=logit), exact("printed_minus_weight", given - weight, logit=logit)]
    away = (printed[:-1] - first_four).abs().max()
    figures.append(exact("largest_error_against_first_four", float(away)))
    return Measured(figures, (_plot(run["printed"], weights.tolist(), run["logits"]),))


def _plot(printed: tuple[float, ...], weights: list[float], logits: tuple[float, ...]) -> Plot:
    names = tuple(f"{logit:g}" for logit in logits)
    return Plot(
        "weights",
        Text("The printed weights and the softmax of the same logits.", "原文给出的权重与同一组 logits 的 softmax。"),
        "logit",
        "weight",
        (Series("printed", names, printed, style="bars"), Series("softmax", names, tuple(weights), style="bars")),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    weights = ", ".join(number(figure.value) for figure in figures.all("weight"))
    total = number(figures("sum_of_printed").value)
    away = number(figures("largest_error_against_first_four").value)
    return Text(
        f"Weights of a softmax sum to 1; the printed ones sum to {total}. The softmax is [{weights}]. The first four "
        "printed numbers stand to one another about as e^-3 : e^-1 : e^0 : e^1: they are, within "
        f"{away}, the softmax of the first four logits without the fifth. The fifth number belongs to no such sum. "
        "The point that the example wants to make survives: the largest weight is not 1, and the others are not 0.",
        f"softmax 的权重之和为 1，而原文给出的各数之和为 {total}。正确的结果是 [{weights}]。前四个原文给出的数之比约为 "
        f"e^-3 : e^-1 : e^0 : e^1：在误差 {away} 以内，它们是去掉第五个 logit 之后前四个 logits 的 softmax；"
        "第五个数则不属于这样的和。这个例子想说明的道理仍然成立：最大的权重不是 1，其余的权重也不是 0。",
    )


CLAIM = Claim(
    id="softmax-example",
    group="saturation",
    sources=("S1",),
    statement=Text(
        f"The softmax of the logits [-3, -1, 0, 1, 3] is {list(WEIGHTS)}.",
        f"logits [-3, -1, 0, 1, 3] 的 softmax 为 {list(WEIGHTS)}。",
    ),
    formula=r"\mathrm{softmax}(z)_i = \frac{e^{z_i}}{\sum_j e^{z_j}}, \qquad \sum_i \mathrm{softmax}(z)_i = 1",
    method=Text(
        "The softmax in float64, against the printed weights; they may be off by half of their last digit.",
        "用 float64 计算 softmax，与原文给出的权重比较；允许的误差是末位的一半。",
    ),
    control=Text(
        "In place of the printed weights stand those of the exponentials, to three digits: they pass.",
        "把原文给出的权重换成由指数函数算出、保留三位小数的权重：它们应当通过检验。",
    ),
    parameters={"logits": LOGITS, "printed": WEIGHTS},
    quick={},
    flipped={"printed": TO_THREE_DIGITS},
    measure=measure,
    parts=(
        Part(
            Text("every weight is right to three digits", "每个权重在三位小数内正确"),
            (Expect("printed_minus_weight", low=-0.000501, high=0.000501),),
        ),
        Part(
            Text("the weights sum to 1, within their rounding", "在舍入误差内，权重之和为 1"),
            (Expect("sum_of_printed", low=0.997, high=1.003),),
        ),
    ),
    why=why,
)
