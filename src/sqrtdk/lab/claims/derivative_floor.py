"""derivative-floor: p (1 - p), the derivative of a weight by its own logit, for five scaled logits."""

from __future__ import annotations

import torch

from sqrtdk.lab._printed import LOGITS, WEIGHTS
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

FLOOR = 0.01


def measure(run: Run) -> Measured:
    """The diagonal of the Jacobian, by automatic differentiation, of the logits and of the logits without a scale."""
    logits = torch.tensor(run["logits"], dtype=torch.float64) * run["factor"]
    figures = []
    for side, inputs in (("scaled", logits), ("unscaled", logits * run["d_k"] ** 0.5)):
        jacobian = torch.autograd.functional.jacobian(lambda z: z.softmax(0), inputs)  # type: ignore[no-untyped-call]
        diagonal = jacobian.diagonal().tolist()
        for logit, derivative in zip(run["logits"], diagonal, strict=True):
            figures.append(exact("derivative", derivative, side=side, logit=logit))
        figures.append(exact("smallest_derivative", min(diagonal), side=side))
        figures.append(exact("largest_derivative", max(diagonal), side=side))
    figures.append(exact("smallest_from_printed_weights", min(p * (1 - p) for p in WEIGHTS)))
    return Measured(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "derivatives",
        Text(
            "p (1 - p) of each weight for the scaled logits, and for the same logits times sqrt(64).",
            "各权重的 p (1 - p)：缩放后的 logits，以及同一组 logits 乘以 sqrt(64) 之后。",
        ),
        "scaled logit",
        "$p (1 - p)$",
        tuple(
            over(side, figures.all("derivative", side=side), "logit", style="bars") for side in ("scaled", "unscaled")
        ),
        y_axis="log",
        lines=((f"{FLOOR}", FLOOR),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    least, most = (number(figures(f"{end}_derivative", side="scaled").value) for end in ("smallest", "largest"))
    unscaled = number(figures("largest_derivative", side="unscaled").value)
    above = sum(figure.value > FLOOR for figure in figures.all("derivative", side="scaled"))
    of_printed = number(figures("smallest_from_printed_weights").value)
    return Text(
        f"p (1 - p) is small at both ends. {above} of the five derivatives are above {FLOOR}, up to {most}, but the "
        f"smallest logit has a weight near 0 and a derivative of {least}. The printed weights do not save the claim: "
        f"their largest gives {of_printed}. The comparison itself is right: times sqrt(64), the largest derivative of "
        f"the row is {unscaled}. No scale gives a floor: a key far below the largest has a derivative near its own "
        "weight, and that is what attention is for.",
        f"p 接近 0 或 1 时，p (1 - p) 都很小。五个导数中有 {above} 个大于 {FLOOR}，最大为 {most}；但最小的 logit "
        f"权重接近 0，导数只有 {least}。用原文给出的权重也不成立：其中最大的权重给出 {of_printed}。"
        f"这一比较的方向是对的：logits 乘以 sqrt(64) 之后，整行最大的导数只有 {unscaled}。"
        "任何缩放都不能保证下界：远低于最大值的键，其导数约等于它自己的权重，而这正是注意力的作用。",
    )


CLAIM = Claim(
    id="derivative-floor",
    group="saturation",
    sources=("S1",),
    statement=Text(
        f"For the scaled logits [-3, -1, 0, 1, 3] the softmax derivative p (1 - p) stays above {FLOOR}.",
        f"对缩放后的 logits [-3, -1, 0, 1, 3]，softmax 的导数 p (1 - p) 始终大于 {FLOOR}。",
    ),
    formula=r"\frac{\partial p_i}{\partial z_i} = p_i (1 - p_i), \qquad \frac{\partial p_i}{\partial z_j} = -p_i p_j",
    method=Text(
        "The diagonal of the softmax Jacobian by automatic differentiation in float64, all five entries.",
        "用自动微分以 float64 计算 softmax 雅可比矩阵的对角线，五个元素逐一检验。",
    ),
    control=Text(
        "The logits are halved first: the weights are then even enough for every derivative to pass.",
        "先把 logits 减半：权重变得足够均匀，每个导数都应通过检验。",
    ),
    parameters={"logits": LOGITS, "factor": 1.0, "d_k": 64},
    quick={},
    flipped={"factor": 0.5},
    measure=measure,
    parts=(
        Part(
            Text(f"all five derivatives are above {FLOOR}", f"五个导数都大于 {FLOOR}"),
            (Expect("derivative", low=FLOOR, at={"side": "scaled"}),),
        ),
    ),
    why=why,
)
