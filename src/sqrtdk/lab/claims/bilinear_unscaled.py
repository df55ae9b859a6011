"""bilinear-unscaled: can the matrix of a bilinear score learn the range of the logits?"""

from __future__ import annotations

import torch

from sqrtdk import attention
from sqrtdk.lab._run import Run
from sqrtdk.lab._teacher import TEACHER_STD, fit
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import exact, mean
from sqrtdk.lab.plots import Plot, Series, Style, curve
from sqrtdk.lab.text import Text
from sqrtdk.scores import bilinear, luong_general

SMALL, LARGE = 8, 32
CASES: tuple[tuple[str, float, Style], ...] = (("unscaled", 0.0, "curve"), ("scaled", -0.5, "dashed"))


def measure(run: Run) -> Measured:
    """Difference of the two ways to write the factor, and what gradient descent makes of an unscaled start."""
    figures = [exact("difference", _difference(run))]
    curves: list[Series] = []
    for d_k in run["dims"]:
        for case, power, style in CASES:
            power_of_start = run["start_power"] if case == "unscaled" else -0.5
            found = fit(
                run.generator("learners", d_k),
                d_k=d_k,
                weight_std=d_k**power_of_start,
                scale=d_k**power,
                learners=run["learners"],
                rates=run["rates"],
                steps=run["steps"],
                rows=32,
                keys=8,
            )
            at = {"case": case, "d_k": d_k}
            figures += [
                mean("error_at_start", found.start, **at),
                mean("error_at_end", found.end, **at),
                mean("logit_std_at_start", found.start_std, **at),
                mean("logit_std_at_end", found.end_std, **at),
                exact("learning_rate", found.rate, **at),
            ]
            if d_k in (SMALL, LARGE):
                curves.append(curve(f"{case}, $d_k$ = {d_k}", range(run["steps"]), found.curve, style=style))
    plot = Plot(
        "error",
        Text(
            "Error of the learners over the steps, as a share of the mean square of the teacher's output, at the best "
            "learning rate of each.",
            "学习者的误差（占教师输出均方的比例）随训练步数的变化，各取最佳学习率。",
        ),
        "step",
        "error",
        tuple(curves),
        y_axis="log",
    )
    return Measured(figures, (plot,))


def _difference(run: Run) -> float:
    """Largest difference between scaled attention with W and unscaled attention with W / sqrt(d_k)."""
    rng = run.generator("exact")
    query, key, value, weight = (torch.randn(LARGE, LARGE, generator=rng, dtype=torch.float64) for _ in range(4))
    scaled = attention(query, key, value, score=bilinear(weight))
    absorbed = attention(query, key, value, score=luong_general(weight / LARGE**0.5))
    assert isinstance(scaled, torch.Tensor)
    assert isinstance(absorbed, torch.Tensor)
    return float((scaled - absorbed).abs().max())


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(name: str, d_k: int, case: str = "unscaled") -> str:
        return str(figures(name, case=case, d_k=d_k))

    return Text(
        "The factor can be moved into the matrix, W/sqrt(d_k), and nothing changes: the outputs differ by "
        f"{figures('difference')}. So every range can be expressed. Whether gradient descent finds it depends on the "
        "start. With Xavier's rule, variance 1/d_k, the unscaled logits q^T W k start with a standard deviation of "
        f"sqrt(d_k). At d_k = {SMALL} the layer recovers: an error of {found('error_at_end', SMALL)}. At d_k = {LARGE} "
        f"it starts at {found('logit_std_at_start', LARGE)}, where most rows have settled on one key, and in the "
        f"same number of steps, at the best of several learning rates, it comes to an error of "
        f"{found('error_at_end', LARGE)} with logits of {found('logit_std_at_end', LARGE)} (the teacher's have "
        f"{TEACHER_STD:g}); the scaled layer comes to {found('error_at_end', LARGE, 'scaled')}. The factor can be left "
        "out of the formula if it is in the start of W instead.",
        "缩放因子可以并入矩阵，即 W/sqrt(d_k)，结果完全不变：两者输出之差为 "
        f"{figures('difference')}。所以任何范围都能表示。梯度下降能否找到它，则取决于起点。"
        "按 Xavier 规则（方差 1/d_k），"
        f"不缩放的 logit q^T W k 的初始标准差为 sqrt(d_k)。在 d_k = {SMALL} 时该层能够恢复：误差为 "
        f"{found('error_at_end', SMALL)}。在 d_k = {LARGE} 时，它从 {found('logit_std_at_start', LARGE)} 开始，"
        "此时大多数行"
        f"已集中在单个键上；在相同的步数内、取几个学习率中最好的一个，误差为 {found('error_at_end', LARGE)}，"
        f"logit 的标准差为 {found('logit_std_at_end', LARGE)}（教师为 {TEACHER_STD:g}），而带缩放的层误差为 "
        f"{found('error_at_end', LARGE, 'scaled')}。公式中可以省去这个因子，只要把它放进 W 的初始值。",
    )


def _learns(d_k: int) -> Part:
    return Part(
        Text(
            f"at d_k {d_k}, from Xavier's start without a scale, gradient descent comes "
            "to an error below 0.3 in some hundred steps",
            f"d_k 为 {d_k} 时，从不缩放的 Xavier 初始值出发，梯度下降能在几百步内使误差低于 0.3",
        ),
        (Expect("error_at_end", high=0.3, at={"case": "unscaled", "d_k": d_k}),),
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
        f"deviation of {TEACHER_STD:g}, with Adam at the best of several learning rates; a layer with the scale learns "
        "the same. The error is a share of the mean square of the teacher's output.",
        "比较带缩放的双线性注意力与使用 W/sqrt(d_k) 而不缩放时的输出。然后考察学习："
        "不缩放的层（W 按 Xavier 规则抽取）学习一个 "
        f"logit 标准差为 {TEACHER_STD:g} 的教师的输出，用 Adam，取几个学习率中最好的一个；带缩放的层学习同样的内容。"
        "误差以教师输出均方的比例表示。",
    ),
    control=Text(
        "W starts smaller by 1/sqrt(d_k): then the unscaled layer learns at both dimensions.",
        "W 的初始值再乘以 1/sqrt(d_k)：此时不缩放的层在两种维度下都能学会。",
    ),
    parameters={
        "dims": (SMALL, 16, LARGE),
        "learners": 5,
        "rates": (3e-3, 1e-2, 3e-2),
        "steps": 300,
        "start_power": -0.5,
    },
    quick={"dims": (SMALL, LARGE), "learners": 4, "rates": (1e-2, 3e-2), "steps": 130},
    flipped={"start_power": -1.0},
    measure=measure,
    parts=(
        Part(
            Text(
                "W/sqrt(d_k) without a scale gives what W with the scale gives",
                "不缩放的 W/sqrt(d_k) 与带缩放的 W 给出相同的结果",
            ),
            (Expect("difference", high=1e-12),),
        ),
        _learns(SMALL),
        _learns(LARGE),
    ),
    why=why,
)
