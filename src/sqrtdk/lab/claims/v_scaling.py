"""v-scaling: a factor on the values in place of one on the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import bootstrap, largest, mean, ratio_of_means
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.stats.request import AuxOutput, AuxRequest

WANTED = AuxRequest(entropy=True, peak=True, jacobian_norm=True)


def measure(run: Run) -> Measured:
    """The same rows without any factor, and with 1/sqrt(d_k) on the values or on the logits."""
    figures = []
    for d_k in run["dims"]:
        rng = run.generator("rows", d_k)
        query, key, value, upstream = (
            torch.randn(run["rows"], 1, n, d_k, generator=rng, dtype=torch.float64)
            for n in (1, run["keys"], run["keys"], 1)
        )
        factors = {"nothing": 1.0, run["on"]: d_k**-0.5}
        found = {}
        for on in ("nothing", run["on"]):
            of_logits, of_values = (factors[on] if on == place else 1.0 for place in ("logits", "values"))
            found[on] = _rows(query, key, value * of_values, upstream, of_logits)
        (plain, plain_gradient), (changed, gradient) = found["nothing"], found[run["on"]]
        for name in ("peak", "entropy", "jacobian_norm"):
            before, after = (getattr(rows, name).detach().flatten() for rows in (plain, changed))
            figures += [mean(name, before, d_k=d_k, factor="none"), mean(name, after, d_k=d_k, factor="1/sqrt(d_k)")]
            figures.append(largest(f"largest_change_of_{name}", (after - before).abs(), d_k=d_k))
        pair = (gradient * d_k**0.5, plain_gradient)
        figures.append(bootstrap("gradient_of_q_ratio_times_root_d_k", pair, ratio_of_means, seed=run.seed, d_k=d_k))
    return Measured(figures, (_plot(Figures(figures)),))


def _rows(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, scale: float) -> tuple[AuxOutput, Tensor]:
    query = query.clone().requires_grad_()
    out, rows = attention(query, key, value, scale=scale, return_aux=WANTED)
    (gradient,) = torch.autograd.grad((out * upstream).sum(), query)
    return rows, gradient.norm(dim=-1).flatten()


def _plot(figures: Figures) -> Plot:
    labels = {"none": "no factor", "1/sqrt(d_k)": r"$1/\sqrt{d_k}$ on the values"}
    return Plot(
        "peak",
        Text(
            "Mean largest weight, unscaled logits, without and with a factor on the values: the points coincide.",
            "未缩放的 logits 的最大权重的均值，值上有无因子：两组点重合。",
        ),
        "$d_k$",
        "largest weight",
        tuple(over(labels[name], figures.all("peak", factor=name), "d_k") for name in labels),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(figure.at["d_k"] for figure in figures.all("peak"))
    peak = figures("peak", d_k=d_k, factor="1/sqrt(d_k)")
    change = figures("largest_change_of_peak", d_k=d_k)
    ratio = figures("gradient_of_q_ratio_times_root_d_k", d_k=d_k)
    return Text(
        "The weights are a function of the logits, and the values are not in it. A factor c on V multiplies the "
        f"output by c and touches neither the weights nor the softmax Jacobian: at d_k = {d_k} the largest change of "
        f"any row's largest weight is {change}, and its mean stays at {peak}. The gradient of q passes through the "
        f"values and is multiplied by c as well (times sqrt(d_k), the ratio is {ratio}), in flat and in saturated "
        "rows alike, so that no row comes back to life relative to the others.",
        "权重是 logits 的函数，其中没有值。在 V 上乘以因子 c 只会使输出乘以 c，既不改变权重，也不改变 softmax 的"
        f"雅可比矩阵：在 d_k = {d_k} 时，各行最大权重的变化至多为 {change}，其均值仍为 {peak}。"
        f"q 的梯度经过值，因此也乘以 c（比值乘以 sqrt(d_k) 为 {ratio}），平坦的行与饱和的行都是如此，"
        "没有哪一行相对于其他行恢复过来。",
    )


CLAIM = Claim(
    id="v-scaling",
    group="saturation",
    sources=("S2",),
    statement=Text(
        "Scaling V instead of the logits does not cure the saturation of the softmax.",
        "用缩放 V 来代替缩放 logits，不能消除 softmax 的饱和。",
    ),
    formula=r"\mathrm{softmax}(Q K^{T}) \, (c V) = c \, \mathrm{softmax}(Q K^{T}) \, V, \qquad "
    r"\frac{\partial p}{\partial z} = \mathrm{diag}(p) - p p^{T}",
    method=Text(
        "The same random rows twice: without any factor, and with 1/sqrt(d_k) on the values; largest weight, entropy "
        "and Jacobian norm of every row, and the gradient of q by automatic differentiation.",
        "同一批随机行计算两次：不加任何因子，以及在值上乘以 1/sqrt(d_k)；比较每一行的最大权重、熵与雅可比矩阵的范数，"
        "并用自动微分求 q 的梯度。",
    ),
    control=Text(
        "The same factor is put on the logits: the weights change, and the saturation is gone.",
        "把同一个因子放在 logits 上：权重改变，饱和随之消失。",
    ),
    parameters={"dims": (16, 64, 256, 512), "keys": 10, "rows": 4000, "on": "values"},
    quick={"dims": (64, 512), "rows": 600},
    flipped={"on": "logits"},
    measure=measure,
    parts=(
        Part(
            Text(
                "the factor changes neither weights nor Jacobian of any row",
                "该因子不改变任何一行的权重，也不改变雅可比矩阵",
            ),
            (
                Expect("largest_change_of_peak", high=1e-12),
                Expect("largest_change_of_entropy", high=1e-12),
                Expect("largest_change_of_jacobian_norm", high=1e-12),
            ),
        ),
        Part(
            Text("the largest weight is still above 0.9 at d_k = 512", "在 d_k = 512 时最大权重仍超过 0.9"),
            (Expect("peak", low=0.9, at={"d_k": 512, "factor": "1/sqrt(d_k)"}),),
        ),
    ),
    why=why,
)
