"""free: what the scale costs in time and memory, by the place where it is applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab._costs import peak_bytes, time_ratio, typical
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

D_K = 64
LITTLE = 0.03  # of the attention's time
PLACES = ("kernel", "query", "logits", "logits in place")
Inputs = tuple[Tensor, Tensor, Tensor]
Factor = Callable[[], float | Tensor]


def measure(run: Run) -> Measured:
    """Time that the scale adds, and peak memory with it over that without it, for each place."""
    length, rng = run["length"], run.generator("inputs")
    query, key, value = (torch.randn(1, 1, length, D_K, generator=rng) for _ in range(3))
    constant = factor("sqrt_dk", D_K)
    scale: Factor = (lambda: _per_pair(constant, length)) if run["per_pair"] else lambda: constant
    figures = []
    for place in PLACES:
        where = "logits" if run["per_pair"] else place  # neither a kernel nor a query can hold a scale of pairs
        bare = "kernel without" if where == "kernel" else "nowhere"
        own, other = (partial(_attend, (query, key, value), one, scale) for one in (where, bare))
        at: dict[str, Any] = {"blocks": run["blocks"], "calls": run["calls"], "place": place}
        if where == "kernel":
            added = _less_one(time_ratio("added_share_of_time", own, other, **at))
        else:
            added = typical("added_share_of_time", own, **at)
        figures += [added, exact("peak_memory_over_unscaled", peak_bytes(own) / peak_bytes(other), place=place)]
    return Measured(figures, (_plot(Figures(figures)),))


def _per_pair(constant: float, length: int) -> Tensor:
    """A factor for each query and key, (length, length), that falls with their distance."""
    steps = torch.arange(length)
    return constant / (1.0 + (steps[:, None] - steps[None, :]).abs() / length)


def _attend(inputs: Inputs, place: str, scale: Factor) -> float:
    """Attention; where it runs in separate operations, the time of the one that scales, over that of the others."""
    query, key, value = inputs
    if place.startswith("kernel"):
        attention(query, key, value, scale=1.0 if place == "kernel without" else scale(), impl="fused")
        return math.nan
    begin = time.thread_time()
    if place == "query":
        query = query * scale()
    ready = time.thread_time()
    logits = query @ key.mT
    del query
    stored = time.thread_time()
    if place == "logits":
        logits = logits * scale()
    elif place == "logits in place":
        logits.mul_(scale())
    scaled = time.thread_time()
    torch.softmax(logits, -1) @ value
    end = time.thread_time()
    step = (ready - begin) + (scaled - stored)
    return step / (end - begin - step)


def _less_one(ratio: Figure) -> Figure:
    return replace(ratio, value=ratio.value - 1.0, low=ratio.low - 1.0, high=ratio.high - 1.0)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "time",
        Text(
            "Time that the scale adds, in percent of the attention's time without it, by the place of the scale.",
            "缩放增加的时间占不缩放时注意力耗时的百分比，按缩放的位置区分。",
        ),
        "place of the scale",
        "added time, percent",
        (over("measured", figures.all("added_share_of_time"), "place", style="bars", factor=100.0),),
        lines=((f"{LITTLE:.0%}", 100.0 * LITTLE),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    kernel, query, logits, in_place = (figures("added_share_of_time", place=place) for place in PLACES)
    seen = query.low > 0.0
    memory = figures("peak_memory_over_unscaled", place="logits")
    return Text(
        "A fused kernel multiplies by some factor in any case, and 1 costs as much as 1/8: the scale adds a share of "
        f"{kernel} of the time. On the query it is L d_k multiplications beside the 2 L S d_k of the two products: "
        f"{query}, {'little, but measurable' if seen else 'too little to measure'}. Written as scores / sqrt(d_k), it "
        f"is one more pass over L x S numbers into a new matrix, which is bound by memory: {logits}; in place it is "
        f"{in_place}. The peak of memory is {memory} times that without the scale even so, since softmax needs room "
        "for a second matrix anyway.",
        f"融合内核无论如何都要乘一个因子，乘 1 与乘 1/8 的代价相同：缩放增加的时间比例为 {kernel}。作用于查询时，只有 "
        f"L d_k 次乘法，而两次矩阵乘法共有 2 L S d_k 次：比例为 {query}，"
        f"{'很小，但可以测出' if seen else '小到测不出'}。若写成 scores / sqrt(d_k)，则要把 L x S "
        f"个数再遍历一遍并写入新矩阵，受内存带宽限制：比例为 {logits}；就地相乘为 {in_place}。即便如此，"
        f"内存峰值也只是不缩放时的 {memory} 倍，因为 softmax 本来就需要第二个矩阵的空间。",
    )


def _time(place: str, en: str, zh: str) -> Part:
    text = Text(f"it adds under {LITTLE:.0%} of time, {en}", f"增加的时间不到 {LITTLE:.0%}：{zh}")
    return Part(text, (Expect("added_share_of_time", high=LITTLE, at={"place": place}),))


CLAIM = Claim(
    id="free",
    group="precision",
    sources=("S2",),
    statement=Text(
        "The scale costs nothing measurable in time or memory.",
        "缩放在时间和内存上都没有可测的开销。",
    ),
    formula=r"\frac{L\,d_k}{2\,L\,S\,d_k} \ll 1, \qquad \mathrm{softmax}\left((s\,Q) K^\top\right) = "
    r"\mathrm{softmax}\left(s\,(Q K^\top)\right)",
    method=Text(
        "Forward pass of one head with d_k = 64 in float32 on one thread, CPU time. As an argument of the fused "
        "kernel: calls with and without the scale take turns, ratio of the two. On the query and on the logits: the "
        "step is timed where it stands, over the time of all others. Each time is the mean over blocks of calls of the "
        f"median of each. Peak of the bytes alive in tensors. The bar is not what a clock can tell apart from nothing, "
        f"but less than {LITTLE:.0%} of the time, and no higher peak (1% is allowed).",
        "单个头，d_k = 64，float32、单线程前向计算，计 CPU 时间。作为融合内核的参数：有无缩放的调用交替进行，"
        "取耗时之比。作用于查询或 logit：就地测量这一步的耗时，除以其余各步之和。每个时间都是各组调用的中位数的平均。"
        f"内存取张量占用的峰值。判断的标准不是时钟能否测出，而是耗时增加不到 {LITTLE:.0%}，且内存峰值不升高（容许 "
        "1%）。",
    ),
    control=Text(
        "A scale of its own for each pair of query and key: no kernel takes it and no query can hold it, so at every "
        "place it needs a matrix and a pass over stored logits, timed over the other steps of the same computation.",
        "每对查询与键各有自己的缩放因子：内核不接受，也无法并入查询，在每个位置都只能另存一个矩阵，并遍历一次已存的 "
        "logit；这一步的耗时除以同一计算中其余各步之和。",
    ),
    parameters={"length": 1024, "blocks": 20, "calls": 15, "per_pair": False},
    quick={"blocks": 10, "calls": 8},
    flipped={"per_pair": True, "blocks": 4, "calls": 2},  # far from the bar: few will do
    measure=measure,
    parts=(
        _time("kernel", "as an argument of the fused kernel", "作为融合内核的参数"),
        _time("query", "multiplied onto the query", "乘到查询上"),
        _time(
            "logits",
            "as scores / sqrt(d_k) on the stored logits",
            "以 scores / sqrt(d_k) 的形式作用于 logit",
        ),
        Part(
            Text("it adds no memory, at any of these places", "不增加内存：在以上每个位置"),
            (Expect("peak_memory_over_unscaled", high=1.01),),
        ),
    ),
    why=why,
    timed=True,
)
