"""temperature: softmax(z / T), and the scale that is the same thing."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from sqrtdk.lab._random_rows import own_keys, weights
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import largest, mean, proportion
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_entropy_nats, expected_jacobian_norm


def measure(run: Run) -> Measured:
    """Weights at each temperature by the formula, against attention with the scale that should be the same."""
    d_k, keys, temperatures = run["d_k"], run["keys"], run["temperatures"]
    rng = run.generator("rows")
    query, key = own_keys(rng, run["rows"], keys, d_k)
    textbook = query @ key.mT / math.sqrt(d_k)
    figures, entropies = [], []
    for t in temperatures:
        by_scale = weights(query, key, 1 / (math.sqrt(d_k) * t))
        logits = textbook * t ** run["power"]
        rows = row_stats(logits)
        entropies.append(rows.entropy_nats.flatten())
        difference = (by_scale - logits.softmax(-1)).abs().amax(-1).flatten()
        figures += [
            largest("largest_difference_of_weights", difference, t=t),
            mean("peak", rows.peak.flatten(), t=t),
            mean("entropy_nats", entropies[-1], t=t),
            mean("squared_jacobian_norm", rows.jacobian_norm.flatten() ** 2, t=t),
        ]
    for (low, high), (cold, warm) in zip(pairwise(temperatures), pairwise(entropies), strict=True):
        figures.append(proportion("rows_flatter_when_warmer", int((warm > cold).sum()), run["rows"], t=high, below=low))
    figures.append(mean("peak_at_the_lowest", row_stats(textbook * temperatures[0] ** run["power"]).peak.flatten()))
    figures.append(largest("largest_entropy_slope_error", _slope_error(textbook)))
    return Measured(figures, _plots(Figures(figures), run))


def _slope_error(logits: Tensor) -> Tensor:
    """Difference of dH/dT at T = 1, by automatic differentiation, from the variance of z under the weights."""
    t = torch.ones(len(logits), 1, 1, dtype=torch.float64, requires_grad=True)
    log_weights = (logits / t).log_softmax(-1)
    (slope,) = torch.autograd.grad(-(log_weights.exp() * log_weights).sum(), t)
    shares = logits.softmax(-1)
    mean_logit = (shares * logits).sum(-1, keepdim=True)
    variance = (shares * (logits - mean_logit) ** 2).sum(-1)
    return (slope.flatten() - variance.flatten()).abs()


def _plots(figures: Figures, run: Run) -> tuple[Plot, Plot]:
    keys, temperatures = run["keys"], run["temperatures"]
    sigmas = [t ** run["power"] for t in temperatures]
    return (
        Plot(
            "entropy",
            Text(
                f"Mean entropy of rows of {keys} random keys over the temperature; theory: Gaussian logits.",
                f"{keys} 个随机键构成的行的平均熵随温度的变化；理论曲线取高斯 logits。",
            ),
            "temperature",
            "entropy, nats",
            (
                over("measured", figures.all("entropy_nats"), "t", style="points"),
                curve("theory", temperatures, expected_entropy_nats(keys, sigmas), style="dashed"),
            ),
            x_axis="log",
            lines=(("uniform", math.log(keys)),),
        ),
        Plot(
            "jacobian",
            Text(
                "Mean squared Frobenius norm of the softmax Jacobian over the temperature: it vanishes where "
                "the weights are too sharp.",
                "softmax 雅可比矩阵的 Frobenius 范数平方的均值随温度的变化：权重过于尖锐时趋于零。",
            ),
            "temperature",
            "squared norm of the Jacobian",
            (
                over("measured", figures.all("squared_jacobian_norm"), "t", style="points"),
                curve(
                    "theory", temperatures, [norm**2 for norm in expected_jacobian_norm(keys, sigmas)], style="dashed"
                ),
            ),
            x_axis="log",
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    away = max(figure.value for figure in figures.all("largest_difference_of_weights"))
    peaks = figures.all("peak")
    cold = figures("peak_at_the_lowest")
    slope = figures("largest_entropy_slope_error")
    return Text(
        "Both are one factor on the logits: a softmax of temperature T over scaled logits is attention with the scale "
        f"1/(T sqrt(d_k)); the weights differ by {number(away)} at most, which is rounding. Leaving the scale out is a "
        "temperature of 1/sqrt(d_k). The entropy can only rise with T: its slope is the variance of the logits under "
        f"the weights over T^3, which is never negative (largest error of this formula: {slope}). At T = "
        f"{peaks[0].at['t']} the largest weight is {cold}, at T = {peaks[-1].at['t']} it is {peaks[-1]}.",
        "两者都是 logits 上的同一个因子：对缩放后的 logits 取温度 T 的 softmax，就是缩放为 1/(T sqrt(d_k)) 的注意力；"
        f"两者的权重最多相差 {number(away)}，即舍入误差。不用缩放相当于温度为 1/sqrt(d_k)。"
        f"熵只会随 T 上升：其斜率是 logits 在权重下的方差除以 T^3，不会为负（该公式的最大误差为 {slope}）。"
        f"在 T = {peaks[0].at['t']} 时最大权重为 {cold}，在 T = {peaks[-1].at['t']} 时为 {peaks[-1]}。",
    )


CLAIM = Claim(
    id="temperature",
    group="saturation",
    sources=("S2", "arXiv:1503.02531"),
    statement=Text(
        "Too low a temperature makes the weights too sharp; temperature and scale are the same knob.",
        "温度过低会使权重过于尖锐；温度与缩放是同一个旋钮。",
    ),
    formula=r"\mathrm{softmax}\left(\frac{q \cdot k}{T \sqrt{d_k}}\right), \qquad \beta = \frac{1}{T \sqrt{d_k}}, "
    r"\qquad \frac{dH}{dT} = \frac{\mathrm{Var}_p(z)}{T^{3}} \ge 0",
    method=Text(
        "Random rows at temperatures far apart: the weights of softmax(z / T) against those of attention with the "
        "scale 1/(T sqrt(d_k)), and the entropy of every row from one temperature to the next.",
        "在相差很大的几个温度下取随机行：比较 softmax(z / T) 的权重与缩放为 1/(T sqrt(d_k)) 的注意力的权重，"
        "并逐行比较相邻两个温度下的熵。",
    ),
    control=Text(
        "The logits are multiplied by T in place of divided: the weights are others, and low temperatures are flat.",
        "把 logits 乘以 T 而不是除以 T：权重不再相同，低温时反而平坦。",
    ),
    parameters={
        "d_k": 64,
        "keys": 10,
        "rows": 20_000,
        "temperatures": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        "power": -1,
    },
    quick={"rows": 3000},
    flipped={"power": 1},
    measure=measure,
    parts=(
        Part(
            Text(
                "a temperature T and the scale 1/(T sqrt(d_k)) give the same weights",
                "温度 T 与缩放 1/(T sqrt(d_k)) 给出相同的权重",
            ),
            (Expect("largest_difference_of_weights", high=1e-12),),
        ),
        Part(
            Text("every row is flatter at the higher temperature", "在较高的温度下，每一行都更平坦"),
            (Expect("rows_flatter_when_warmer", low=0.99),),
        ),
        Part(
            Text("at the lowest temperature the largest weight is above 0.9", "在最低的温度下，最大权重超过 0.9"),
            (Expect("peak_at_the_lowest", low=0.9),),
        ),
    ),
    why=why,
)
