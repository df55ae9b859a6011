"""bilinear-unscaled: can the matrix of a bilinear score learn the range of the logits, and how fast?"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab._run import Run
from sqrtdk.lab._teacher import LEARNED, TEACHER_STD, Start, fit
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import geometric_mean, largest, mean
from sqrtdk.lab.plots import Plot, Series, Style, curve
from sqrtdk.lab.text import Text
from sqrtdk.scores import bilinear, luong_general

SMALL, LARGE = 8, 16
EXACT_DIM = 24  # no square: dividing by its root rounds
AS_FAST = 1.5  # times the steps of the scaled layer
STYLES: dict[str, Style] = {"unscaled": "curve", "scaled": "dashed"}


def measure(run: Run) -> Measured:
    """Difference of the two ways to write the factor, and what gradient descent makes of an unscaled start."""
    figures = [largest("largest_difference", _differences(run))]
    curves: list[Series] = []
    for d_k, steps in run["dims_and_steps"]:
        starts = {
            "unscaled": Start(weight_std=d_k ** run["start_power"], scale=1.0),
            "scaled": Start(weight_std=d_k**-0.5, scale=d_k**-0.5),
        }
        fits = fit(
            run.generator("learners", d_k),
            d_k=d_k,
            starts=starts,
            learners=run["learners"],
            rates=run["rates"],
            steps=steps,
            rows=32,
            keys=8,
        )
        for case, found in fits.items():
            at = {"case": case, "d_k": d_k}
            figures += [
                geometric_mean("error_at_start", found.start, **at),
                geometric_mean("error_at_end", found.end, **at),
                largest("largest_error_at_end", found.end, **at),
                mean("logit_std_at_start", found.start_std, **at),
                mean("logit_std_at_end", found.end_std, **at),
                geometric_mean("steps_until_learned", found.steps, **at),
            ]
            curves.append(curve(f"{case}, $d_k$ = {d_k}", range(steps), found.curve, style=STYLES[case]))
        ratio = fits["unscaled"].steps / fits["scaled"].steps
        figures.append(geometric_mean("steps_over_those_of_the_scaled_layer", ratio, d_k=d_k))
    plot = Plot(
        "error",
        Text(
            "Error of the learners over the steps, as a share of the mean square of the teacher's output, each at the "
            "learning rate that ends best.",
            "学习者的误差（占教师输出均方的比例）随训练步数的变化，各取结果最好的学习率。",
        ),
        "step",
        "error",
        tuple(curves),
        y_axis="log",
    )
    return Measured(figures, (plot,))


def _differences(run: Run) -> Tensor:
    """Of the outputs of scaled attention with W from those of unscaled attention with W / sqrt(d_k)."""
    rng = run.generator("exact")
    query, key, value, weight = (
        torch.randn(EXACT_DIM, EXACT_DIM, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    scaled = attention(query, key, value, score=bilinear(weight))
    absorbed = attention(query, key, value, score=luong_general(weight / EXACT_DIM**0.5))
    assert isinstance(scaled, Tensor)
    assert isinstance(absorbed, Tensor)
    return (scaled - absorbed).abs().flatten()


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(name: str, d_k: int, case: str = "unscaled") -> str:
        return str(figures(name, case=case, d_k=d_k))

    small = figures("steps_over_those_of_the_scaled_layer", d_k=SMALL)
    *_, longest = figures.all("steps_over_those_of_the_scaled_layer")
    last = int(longest.at["d_k"])
    worst = max(figures.all("largest_error_at_end", case="unscaled"), key=lambda f: f.value)
    return Text(
        "The factor can be moved into the matrix, W/sqrt(d_k), and nothing changes: the outputs differ by "
        f"{figures('largest_difference')} at most, rounding and no more. So every range can be expressed, and it can "
        f"be learned: trained long enough, the worst of all layers without a scale ends with an error of {worst}. The "
        "start decides how long that takes. With Xavier's rule, variance 1/d_k, the unscaled logits q^T W k start "
        f"with a standard deviation of sqrt(d_k). At d_k = {SMALL} such a layer has learned its teacher (an error "
        f"below {LEARNED}) in {small} times the steps of a scaled one. At d_k = {last} it starts at "
        f"{found('logit_std_at_start', last)}, where the softmax is sharp and little gradient is left, while the "
        f"teacher's logits have {TEACHER_STD:g}: it takes {found('steps_until_learned', last)} steps and the scaled "
        f"layer {found('steps_until_learned', last, 'scaled')}, a ratio of {longest}, each at the best of several "
        "learning rates. The factor can be left out of the formula if it is in the start of W instead.",
        f"缩放因子可以并入矩阵，即 W/sqrt(d_k)，结果不变：两者的输出最多相差 {figures('largest_difference')}，"
        f"不超出舍入误差。所以任何范围都能表示，也都能学到：训练足够久之后，所有不缩放的层中最大的误差为 {worst}。"
        "起点决定的是需要多久。按 Xavier 规则（方差 1/d_k），不缩放的 logit q^T W k 的初始标准差为 sqrt(d_k)。在 d_k "
        f"= {SMALL} 时，这样的层学会教师（误差低于 {LEARNED}）所用的步数是带缩放的层的 {small} 倍。在 d_k = {last} "
        f"时，它从 {found('logit_std_at_start', last)} 开始，此时 softmax 已很尖锐，所剩的梯度很小，而教师的 logit "
        f"标准差为 {TEACHER_STD:g}：它需要 {found('steps_until_learned', last)} 步，带缩放的层需要 "
        f"{found('steps_until_learned', last, 'scaled')} 步，前者是后者的 {longest} 倍，各取几个学习率中最好的一个。"
        "公式中可以省去这个因子，只要把它放进 W 的初始值。",
    )


def _as_fast(d_k: int) -> Part:
    return Part(
        Text(
            f"at d_k {d_k} that takes at most {AS_FAST} times the steps of a layer with the scale",
            f"d_k 为 {d_k} 时，所需步数不超过带缩放的层的 {AS_FAST} 倍",
        ),
        (Expect("steps_over_those_of_the_scaled_layer", high=AS_FAST, at={"d_k": d_k}),),
    )


CLAIM = Claim(
    id="bilinear-unscaled",
    group="factors",
    sources=("S0",),
    statement=Text(
        "Bilinear attention needs no scale: it can learn its range through its matrix.",
        "双线性注意力不需要缩放：它可以通过自身的矩阵学到合适的范围。",
    ),
    formula=r"\frac{q^\top W k}{\sqrt{d_k}} = q^\top \left( \frac{W}{\sqrt{d_k}} \right) k, \qquad "
    r"\mathrm{std}[q^\top W k] = \Vert W \Vert_F",
    method=Text(
        "Outputs of bilinear attention with the scale against those with W/sqrt(d_k) and none. Then learning: a layer "
        "without a scale, W drawn by Xavier's rule, learns the outputs of a teacher whose logits have a standard "
        f"deviation of {TEACHER_STD:g}, with Adam and a rate that falls to 0; a layer with the scale learns the same "
        "from the same W. The error is a share of the mean square of the teacher's output; each layer has the best of "
        f"several rates, for the end and for the steps until the error is below {LEARNED}. Needs no scale means that "
        "it learns, and about as fast.",
        "比较带缩放的双线性注意力与使用 W/sqrt(d_k) 而不缩放时的输出。然后考察学习：不缩放的层（W 按 Xavier 规则抽取）"
        f"用 Adam 学习一个 logit 标准差为 {TEACHER_STD:g} 的教师的输出，学习率逐渐降到零；带缩放的层从同样的 W 出发，"
        f"学习同样的内容。误差以教师输出均方的比例表示；最终误差与误差降到 {LEARNED} 以下所需的步数，"
        "各取几个学习率中最好的一个。“不需要缩放”指能够学会，而且大致同样快。",
    ),
    control=Text(
        "W starts smaller by 1/sqrt(d_k): then the unscaled layer learns as fast at both dimensions.",
        "W 的初始值再乘以 1/sqrt(d_k)：此时不缩放的层在两种维度下都学得同样快。",
    ),
    parameters={
        "dims_and_steps": ((SMALL, 400), (LARGE, 1000), (32, 2400)),
        "learners": 8,
        "rates": (1e-2, 3e-2),
        "start_power": -0.5,
    },
    quick={"dims_and_steps": ((SMALL, 160), (LARGE, 500)), "learners": 5},
    flipped={"start_power": -1.0},
    measure=measure,
    parts=(
        Part(
            Text(
                "W/sqrt(d_k) without a scale gives what W with the scale gives",
                "不缩放的 W/sqrt(d_k) 与带缩放的 W 给出相同的结果",
            ),
            (Expect("largest_difference", high=1e-12),),
        ),
        Part(
            Text(
                f"from Xavier's start without a scale, gradient descent brings every error below {LEARNED}",
                f"从不缩放的 Xavier 初始值出发，梯度下降能使每个误差都低于 {LEARNED}",
            ),
            (Expect("largest_error_at_end", high=LEARNED, at={"case": "unscaled"}),),
        ),
        _as_fast(SMALL),
        _as_fast(LARGE),
    ),
    why=why,
)
