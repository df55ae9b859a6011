"""softmax-overflow: whether unscaled logits at d_k = 64 leave the floating range in the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.lab._random_rows import factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean, proportion
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.theory.ranges import DTYPES

D_K, KEYS = 64, 512


def _as_written(logits: Tensor) -> Tensor:
    powers = logits.exp()
    return powers / powers.sum(-1, keepdim=True)


def _less_maximum(logits: Tensor) -> Tensor:
    return _as_written(logits - logits.amax(-1, keepdim=True))


SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "as written": _as_written,
    "less maximum": _less_maximum,
    "torch": lambda logits: torch.softmax(logits, -1),
}
NARROW = ("float16", "bfloat16", "float32")


def measure(run: Run) -> Measured:
    """Share of rows whose weights are not finite, and of weights that become 0, by softmax and dtype."""
    product = products(run.generator("rows"), draws=run["rows"], keys=KEYS, d_k=D_K)[:, 0]
    logits = (factor(run["scale"], D_K) * product).float()
    figures = [mean("largest_logit", logits.amax(-1))]
    for dtype in NARROW:
        stored = logits.to(DTYPES[dtype])
        for softmax, function in SOFTMAX.items():
            weights, place = function(stored), {"softmax": softmax, "dtype": dtype}
            bad = int((~weights.isfinite()).any(-1).sum())
            figures.append(proportion("rows_not_finite", bad, run["rows"], **place))
            if softmax == "torch":
                figures.append(mean("weights_that_become_0", (weights == 0).double().mean(-1), **place))
    return Measured(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "rows",
        Text(
            "Share of rows of 512 unscaled logits (d_k = 64) whose weights hold infinity or NaN.",
            "未缩放的 512 个 logit（d_k = 64）经 softmax 后出现无穷大或 NaN 的行所占比例。",
        ),
        "dtype of logits and softmax",
        "share of rows not finite",
        tuple(over(name, figures.all("rows_not_finite", softmax=name), "dtype", style="bars") for name in SOFTMAX),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    largest = figures("largest_logit")
    ends = {name: f"{math.log(torch.finfo(DTYPES[name]).max):.1f}" for name in NARROW}
    half, wide = (figures("rows_not_finite", softmax="as written", dtype=name) for name in ("float16", "float32"))
    safe = figures("rows_not_finite", softmax="torch", dtype="float16")
    lost, kept = (figures("weights_that_become_0", dtype=name, softmax="torch") for name in ("float16", "float32"))
    return Text(
        f"The largest of {KEYS} unscaled logits is {largest} on average. e^z passes the range of fp16 at z = "
        f"{ends['float16']} and that of bf16 and fp32 at {ends['float32']}. Computed as written, softmax fails in "
        f"fp16 for a share of {half} of the rows, and in fp32 for {wide}. Every real implementation first takes the "
        f"maximum from the logits: no exponent is then above 0, and {safe} of the rows fail in fp16. What is left is "
        f"underflow: a share of {lost} of the weights become 0 in fp16 ({kept} in fp32). That is harmless to the sum, "
        "and 0 is what the gradient sees there.",
        f"{KEYS} 个未缩放 logit 中的最大值平均为 {largest}。e^z 在 z = {ends['float16']} 时超出 fp16 的范围，在 "
        f"{ends['float32']} 时才超出 bf16 和 fp32 的范围。按定义直接计算 softmax，fp16 下有 {half} 的行出错，fp32 "
        f"下为 {wide}。实际的实现都先从 logit 中减去最大值，此时指数都不大于 0，fp16 下出错的行为 {safe}。"
        f"剩下的是下溢：fp16 下有 {lost} 的权重变为 0（fp32 下为 {kept}）。这对求和没有影响，而这些位置上的梯度就是 "
        "0。",
    )


def _part(softmax: str, dtype: str, en: str, zh: str) -> Part:
    return Part(Text(en, zh), (Expect("rows_not_finite", low=0.01, at={"softmax": softmax, "dtype": dtype}),))


CLAIM = Claim(
    id="softmax-overflow",
    group="precision",
    sources=("S3",),
    statement=Text(
        "At d_k = 64 the unscaled logits may leave the range of floating-point numbers in the softmax.",
        "d_k = 64 时，未缩放的 logit 可能使 softmax 超出浮点数的范围。",
    ),
    formula=r"e^z \le 65504 \Leftrightarrow z \le 11.09, \qquad "
    r"\frac{e^{z_i}}{\sum_j e^{z_j}} = \frac{e^{z_i - m}}{\sum_j e^{z_j - m}}, \; m = \max_j z_j",
    method=Text(
        "Rows of 512 unscaled logits at d_k = 64, each with a query and keys of its own. Softmax as the formula is "
        "written, with the maximum taken off first, and torch's, in fp16, bf16 and fp32; share of rows whose weights "
        "are not all finite. May means in more than one row of a hundred.",
        "d_k = 64，每行 512 个未缩放的 logit，各行有自己的查询和键。分别以 fp16、bf16、fp32 按定义计算 softmax、"
        "先减去最大值再计算、以及调用 torch 的实现；统计权重出现非有限值的行所占比例。“可能”指一百行中多于一行。",
    ),
    control=Text(
        "Scaled logits: no softmax leaves the range in any dtype.",
        "换成缩放后的 logit：任何 softmax、任何精度都不会超出范围。",
    ),
    parameters={"rows": 4000, "scale": "none"},
    quick={"rows": 800},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        _part("as written", "float16", "fp16, as written", "fp16，按定义计算"),
        _part("as written", "bfloat16", "bf16, as written", "bf16，按定义计算"),
        _part("as written", "float32", "fp32, as written", "fp32，按定义计算"),
        _part("less maximum", "float16", "fp16, the maximum taken off first", "fp16，先减去最大值"),
        _part("torch", "float16", "fp16, torch's softmax", "fp16，torch 的 softmax"),
    ),
    why=why,
)
