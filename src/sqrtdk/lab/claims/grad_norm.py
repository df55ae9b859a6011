"""grad-norm: how the gradient of the queries grows with the dimension, with and without the scale."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention
from sqrtdk.lab._random_rows import own_keys
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import bootstrap, mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.scales import SCALES

VALUE_DIM = 64  # the same at every d_k, so that the value's path does not grow with it
QUANTITIES = ("gradient_norm", "jacobian_norm")


def measure(run: Run) -> Measured:
    """Gradients through real attention, and the norm of the softmax Jacobian beside them."""
    figures = []
    for case in ("unscaled", "scaled"):
        norms = [_norms(run, d_k, run[case]) for d_k in run["dims"]]
        for name, samples in zip(QUANTITIES, zip(*norms, strict=True), strict=True):
            rms = torch.stack([one.unflatten(0, (run["blocks"], -1)).square().mean(1).sqrt() for one in samples])
            figures += [mean(f"rms_{name}", block, case=case, d_k=d) for d, block in zip(run["dims"], rms, strict=True)]
            figures.append(mean(f"slope_of_rms_{name}", _slopes(run["dims"], rms), case=case))
        medians = zip(run["dims"], norms, strict=True)
        figures += [
            bootstrap("median_gradient_norm", norm[0], np.median, seed=run.seed, case=case, d_k=d)
            for d, norm in medians
        ]
    return Measured(figures, (_plot(Figures(figures)),))


def _norms(run: Run, d_k: int, scale: str) -> tuple[Tensor, Tensor]:
    """Norms of dL/dq and of the softmax Jacobian, one a row, for L = output . g with a random g of length 1."""
    rng, norms = run.generator("rows", d_k), []
    for _ in range(run["blocks"]):
        query, key = own_keys(rng, run["rows"], run["keys"], d_k)
        value, direction = (torch.randn(run["rows"], n, VALUE_DIM, generator=rng).double() for n in (run["keys"], 1))
        wanted = AuxRequest(jacobian_norm=True)
        output, aux = attention(query.requires_grad_(), key, value, scale=SCALES[scale](), return_aux=wanted)
        (output * torch.nn.functional.normalize(direction, dim=-1)).sum().backward()  # type: ignore[no-untyped-call]
        assert query.grad is not None
        assert aux.jacobian_norm is not None
        norms.append((query.grad.flatten(1).norm(dim=1), aux.jacobian_norm.flatten()))
    gradients, jacobians = (torch.cat(parts) for parts in zip(*norms, strict=True))
    return gradients, jacobians


def _slopes(dims: tuple[int, ...], rms: Tensor) -> Tensor:
    """Least-squares slope of log rms (dims, blocks) against log d_k, one a block."""
    x = torch.tensor(dims, dtype=torch.float64).log()
    x = x - x.mean()
    return x @ rms.log() / (x @ x)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "gradient",
        Text(
            "Length of the gradient of a query, over the dimension: root mean square over the rows, and the median "
            "row.",
            "查询梯度的长度随维度的变化：各行的均方根，以及中位数所在的行。",
        ),
        "$d_k$",
        r"$\Vert \partial L / \partial q \Vert$",
        tuple(
            over(f"{case}, {label}", figures.all(name, case=case), "d_k")
            for case in ("unscaled", "scaled")
            for label, name in (("rms", "rms_gradient_norm"), ("median", "median_gradient_norm"))
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    jacobian, plain = (figures(f"slope_of_rms_{name}", case="unscaled") for name in reversed(QUANTITIES))
    scaled = figures("slope_of_rms_gradient_norm", case="scaled")
    medians = figures.all("median_gradient_norm", case="unscaled")
    return Text(
        "dL/dq = scale * K^T J u, with J the softmax Jacobian and u the gradient of the weights. Without the scale J "
        f"does shrink, as d_k to the power {jacobian}. But K^T makes up for it: the difference of two keys has a "
        "length of sqrt(2 d_k), and the few rows whose two largest logits are close have a large J and carry "
        f"the norm. Together the norm goes as d_k to the power {plain}: it grows, and is not proportional to 1/d_k. "
        f"What dies is the usual row: the median goes from {medians[0]} at d_k = {medians[0].at['d_k']} to "
        f"{medians[-1]} at d_k = {medians[-1].at['d_k']}. With the scale J does not depend on d_k, the factor "
        "1/sqrt(d_k) cancels the length of the keys, and the norm goes as d_k to the power "
        f"{scaled}: constant. (The values have the same width at every d_k; were they as wide as the keys, and the "
        "upstream gradient not of length 1, both cases would grow by a further factor.)",
        "dL/dq = 缩放因子 · K^T J u，其中 J 是 softmax 的雅可比矩阵，u 是损失对权重的梯度。不缩放时 J 的确变小，按 "
        f"d_k 的 {jacobian} 次幂变化；但 K^T 把它补了回来：两个键之差的长度为 sqrt(2 d_k)，而最大的两个 logit "
        f"相近的少数行仍有较大的 J，范数主要来自这些行。合起来，梯度范数按 d_k 的 {plain} 次幂变化：它在增大，并不与 "
        f"1/d_k 成正比。真正消失的是普通行的梯度：中位数从 d_k = {medians[0].at['d_k']} 时的 {medians[0]} 变为 d_k = "
        f"{medians[-1].at['d_k']} 时的 {medians[-1]}。缩放之后，J 与 d_k 无关，1/sqrt(d_k) 正好抵消键的长度，范数按 "
        f"d_k 的 {scaled} 次幂变化，即保持不变。（这里值的宽度不随 d_k 改变；如果值与键同宽，"
        "而上游梯度的长度又不固定为 1，那么两种情形都会再多出一个增长因子。）",
    )


CLAIM = Claim(
    id="grad-norm",
    group="gradients",
    sources=("S1",),
    statement=Text(
        "Without the scale the softmax saturates and the norm of dL/dQ is proportional to 1/d_k; with the scale it is "
        "constant.",
        "不缩放时 softmax 饱和，dL/dQ 的范数与 1/d_k 成正比；缩放后该范数保持不变。",
    ),
    formula=r"\frac{\partial L}{\partial q} = \beta \, K^\top J \, V \frac{\partial L}{\partial o}, \qquad "
    r"J = \mathrm{diag}(p) - p\,p^\top, \quad \beta = 1 \text{ or } \frac{1}{\sqrt{d_k}}",
    method=Text(
        "Random rows of attention with keys and values of their own, and a random upstream gradient of length 1; "
        "automatic differentiation gives dL/dq. Slope of the log of its root mean square against log d_k, fitted in "
        "independent blocks of rows; the same for the norm of the softmax Jacobian, which is the part that saturates.",
        "随机生成注意力的各行（每行有自己的键和值）与长度为 1 的随机上游梯度，用自动微分得到 dL/dq。"
        "在相互独立的行块中，拟合其均方根的对数对 log d_k 的斜率；对 softmax 雅可比矩阵的范数（即发生饱和的部分）"
        "也作同样的拟合。",
    ),
    control=Text(
        "The two cases are exchanged: the one called unscaled has the scale, the other has none.",
        "交换两种情形：称为“不缩放”的一方带缩放，另一方不缩放。",
    ),
    parameters={
        "dims": (16, 32, 64, 128, 256, 512, 1024),
        "blocks": 24,
        "rows": 64,
        "keys": 32,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"dims": (16, 64, 256), "blocks": 12},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        Part(
            Text(
                "without the scale the norm of the softmax Jacobian falls with d_k",
                "不缩放时，softmax 雅可比矩阵的范数随 d_k 下降",
            ),
            (Expect("slope_of_rms_jacobian_norm", high=-0.05, at={"case": "unscaled"}),),
        ),
        Part(
            Text(
                "without the scale the norm of dL/dQ is proportional to 1/d_k (exponent -0.8 to -1.2)",
                "不缩放时，dL/dQ 的范数与 1/d_k 成正比（指数在 -0.8 到 -1.2 之间）",
            ),
            (Expect("slope_of_rms_gradient_norm", low=-1.2, high=-0.8, at={"case": "unscaled"}),),
        ),
        Part(
            Text(
                "with the scale the norm of dL/dQ is constant (exponent within 0.1 of 0)",
                "缩放后，dL/dQ 的范数不变（指数与 0 相差不超过 0.1）",
            ),
            (Expect("slope_of_rms_gradient_norm", low=-0.1, high=0.1, at={"case": "scaled"}),),
        ),
    ),
    why=why,
)
