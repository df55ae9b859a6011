"""dot-faster: time and memory of dot-product attention beside additive attention."""

from __future__ import annotations

from functools import partial

import torch

from sqrtdk.lab._costs import peak_bytes, time_ratio
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.nn import AdditiveAttention, ScaledDotProductAttention


def measure(run: Run) -> Measured:
    """Time and peak memory of the dot product's attention over those of the additive one."""
    figures = []
    for d_k in run["dims"]:
        rng, hidden = run.generator("inputs", d_k), run["hidden"] or d_k
        query, key, value = (torch.randn(1, 1, run["length"], d_k, generator=rng) for _ in range(3))
        for impl in ("dense", "auto"):
            dot = ScaledDotProductAttention(d_k, impl=impl)
            additive = AdditiveAttention(d_k, hidden=hidden, impl=impl)
            calls = [partial(module, query, key, value) for module in (dot, additive)]
            place = {"d_k": d_k, "impl": impl}
            peaks = [peak_bytes(call) for call in calls]
            figures += [
                time_ratio("time_over_additive", *calls, blocks=run["blocks"], calls=run["calls"], **place),
                exact("peak_memory_over_additive", peaks[0] / peaks[1], **place),
            ]
    return Measured(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "ratios",
        Text(
            "Time and peak memory of dot-product attention over those of additive attention.",
            "点积注意力的耗时与内存峰值，与加性注意力之比。",
        ),
        "$d_k$",
        "dot product over additive",
        tuple(
            over(f"{label}, {impl}", figures.all(name, impl=impl), "d_k")
            for label, name in (("time", "time_over_additive"), ("memory", "peak_memory_over_additive"))
            for impl in ("dense", "auto")
        ),
        x_axis="log",
        y_axis="log",
        lines=(("equal", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(int(figure.at["d_k"]) for figure in figures)
    times = [figures("time_over_additive", d_k=d_k, impl=impl) for impl in ("dense", "auto")]
    peaks = [figures("peak_memory_over_additive", d_k=d_k, impl=impl) for impl in ("dense", "auto")]
    return Text(
        "Both scores take of the order of L S d_k operations. But the dot products of all pairs are one matrix "
        "product, which multiplies and adds at the full rate of the machine and stores one number a pair; the "
        "additive score needs a tanh for each of the hidden units of each pair, and a tensor of L x S x d_k to hold "
        f"them. At d_k = {d_k} dot-product attention takes {times[0]} of the additive one's time and {peaks[0]} of "
        f"its memory where both hold all pairs, and {times[1]} and {peaks[1]} where each runs as well as it can: only "
        "the dot product has a fused kernel, which keeps no matrix at all. The factor 1/sqrt(d_k) has no part in this.",
        "两种打分的运算量都是 L S d_k 的量级。但所有点积合起来就是一次矩阵乘法，能以机器的全速做乘加，每对只存一个数；"
        f"加性打分则要为每一对的每个隐藏单元计算 tanh，并用 L x S x d_k 的张量存放。d_k = {d_k} 时，"
        f"若二者都保存所有查询-键对，点积注意力的耗时是加性注意力的 {times[0]}，内存是其 {peaks[0]}；"
        f"若各用最好的实现，则为 {times[1]} 和 {peaks[1]}：只有点积有融合内核，根本不保存矩阵。因子 1/sqrt(d_k) "
        "与此无关。",
    )


CLAIM = Claim(
    id="dot-faster",
    group="precision",
    sources=("S1",),
    statement=Text(
        "Scaled dot-product attention is faster and needs less memory than additive attention.",
        "缩放点积注意力比加性注意力更快，占用的内存也更少。",
    ),
    formula=r"q \cdot k : \; L S\,d_k \text{ products}, \qquad v^\top \tanh(W_q q + W_k k) : \; L S\,A \text{ tanh}",
    method=Text(
        "The library's modules on equal inputs in float32, the hidden width of the additive one equal to d_k, forward "
        "pass on one thread: both with all pairs held at once (dense), and each as it runs by default (auto). Calls "
        "take turns; the ratio of CPU times is the mean over blocks of the median of each, and ratio of the most "
        "bytes alive at once in tensors; what a kernel takes and gives back inside one operation is not seen.",
        "在相同输入上（float32）运行本库的两种模块，加性注意力的隐藏宽度等于 d_k，单线程前向计算："
        "一种情形是两者都一次保存所有查询-键对（dense），另一种是各用默认实现（auto）。两者交替运行，CPU "
        "时间之比分组取中位数，再求各组的平均，以及张量内存峰值之比；内核在一次操作内部临时占用的内存不计。",
    ),
    control=Text(
        "An additive score with a single hidden unit against dot products of 1024 dimensions: the advantage is gone.",
        "加性打分只用一个隐藏单元，与 1024 维的点积相比：优势消失。",
    ),
    parameters={"dims": (16, 64, 128), "hidden": None, "length": 384, "blocks": 8, "calls": 5},
    quick={"dims": (16, 64), "length": 192, "blocks": 5, "calls": 3},
    flipped={"dims": (1024,), "hidden": 1},
    measure=measure,
    parts=(
        Part(Text("it is faster", "更快"), (Expect("time_over_additive", high=0.8),)),
        Part(Text("it needs less memory", "占用内存更少"), (Expect("peak_memory_over_additive", high=0.8),)),
    ),
    why=why,
    timed=True,
)
