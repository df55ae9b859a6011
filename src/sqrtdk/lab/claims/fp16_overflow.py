"""fp16-overflow: whether the scale keeps half precision from overflowing, by the place where it is applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean, proportion
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.theory import largest_finite, spacing
from sqrtdk.theory.ranges import DTYPES

D_K, LENGTH = 64, 64
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _on_query(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax((query * scale) @ key.mT, -1) @ value


def _on_product(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax((query @ key.mT) * scale, -1) @ value


def _in_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Torch's fused kernel: products are summed, scaled and exponentiated in float32, and never stored."""
    result = attention(query, key, value, scale=scale, impl="fused")
    assert isinstance(result, Tensor)
    return result


PLACES: dict[str, Attend] = {"query": _on_query, "product": _on_product, "kernel": _in_kernel}


def measure(run: Run) -> Measured:
    """Share of calls whose output is not finite, with and without the scale, at three places."""
    dtype = DTYPES[run["dtype"]]
    query, key, value = _inputs(run, dtype)
    largest = (query.double() @ key.double().mT).abs().flatten(1).amax(-1)
    scaled = factor("sqrt_dk", D_K) * largest
    figures = [
        mean("largest_product", largest, scale="none"),
        mean("largest_product", scaled, scale="sqrt_dk"),
        mean("step_of_a_stored_logit_nats", [spacing(float(logit), dtype) for logit in scaled]),
    ]
    for place, attend in PLACES.items():
        for scale in ("none", "sqrt_dk"):
            output = attend(query, key, value, factor(scale, D_K))
            bad = int((~output.isfinite()).flatten(1).any(-1).sum())
            figures.append(proportion("calls_not_finite", bad, run["calls"], place=place, scale=scale))
    return Measured(figures, (_plot(Figures(figures)),))


def _inputs(run: Run, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gaussian q, k, v (calls, 1, length, d_k); one channel of q and k is an outlier, as trained models have them."""
    rng = run.generator("inputs")
    query, key, value = (torch.randn(run["calls"], 1, LENGTH, D_K, generator=rng) for _ in range(3))
    query[..., 0] += run["outlier"]
    key[..., 0] += run["outlier"]
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "places",
        Text(
            "Share of calls whose output holds infinity or NaN, by the place of the scale.",
            "输出中出现无穷大或 NaN 的调用所占比例，按缩放的位置区分。",
        ),
        "place of the scale",
        "share of calls not finite",
        tuple(
            over(label, figures.all("calls_not_finite", scale=scale), "place", style="bars")
            for label, scale in (("unscaled", "none"), ("scaled", "sqrt_dk"))
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    product, scaled = (figures("largest_product", scale=scale) for scale in ("none", "sqrt_dk"))
    shares = {
        place: [figures("calls_not_finite", place=place, scale=scale).value for scale in ("none", "sqrt_dk")]
        for place in PLACES
    }
    step = figures("step_of_a_stored_logit_nats")
    limit = largest_finite(torch.float16)
    return Text(
        f"The largest number of fp16 is {limit:.0f}. Here products reach {product} and, scaled, {scaled}. What counts "
        "is the largest number that is stored. With the scale on q the product is born small: "
        f"{shares['query'][0]:.0%} of the calls fail without it, {shares['query'][1]:.0%} with it. With the scale on "
        f"the stored product it comes too late: {shares['product'][1]:.0%} fail all the same. A fused kernel sums in "
        f"float32 and stores no product: {shares['kernel'][0]:.0%} fail even without a scale. And finite is not "
        f"exact: a logit of that size, stored in fp16, moves in steps of {step} nats.",
        f"fp16 的最大值是 {limit:.0f}。这里点积达到 {product}，缩放后为 {scaled}。关键在于被存储的最大数是多少。"
        f"缩放作用于 q 时，点积一产生就是小的：不缩放有 {shares['query'][0]:.0%} 的调用出错，缩放后为 "
        f"{shares['query'][1]:.0%}。"
        f"缩放作用于已存储的点积时为时已晚：仍有 {shares['product'][1]:.0%} 出错。"
        f"融合内核以 float32 累加，并不存储点积：即使不缩放，出错的也只有 {shares['kernel'][0]:.0%}。"
        f"而且有限并不等于精确：这么大的 logit 若以 fp16 存储，相邻两数相差 {step} nat。",
    )


def _part(place: str, en: str, zh: str) -> Part:
    """The scale prevents overflow: without it calls fail, with it none does."""
    return Part(
        Text(en, zh),
        (
            Expect("calls_not_finite", low=0.9, at={"place": place, "scale": "none"}),
            Expect("calls_not_finite", high=0.1, at={"place": place, "scale": "sqrt_dk"}),
        ),
    )


CLAIM = Claim(
    id="fp16-overflow",
    group="precision",
    sources=("S2", "S3"),
    statement=Text(
        "The scale prevents overflow in fp16.",
        "缩放可以防止 fp16 溢出。",
    ),
    formula=r"\left|\sum_i (s\,q_i)\,k_i\right| \le 65504 \quad\text{or}\quad s \cdot \left|\sum_i q_i k_i\right|, "
    r"\; \left|\sum_i q_i k_i\right| > 65504",
    method=Text(
        "Calls with d_k = 64 whose q and k have one outlier channel, so that the products leave the range of fp16 and "
        "the scaled ones do not. The scale goes on q, on the stored product, or into torch's fused kernel; share of "
        "calls with an output that is not finite, with the interval of Clopper and Pearson. It prevents overflow where "
        "calls fail without it and do not with it.",
        "d_k = 64，q 和 k 各有一个异常通道，使点积超出 fp16 的范围，而缩放后不超出。缩放分别作用于 q、"
        "作用于已存储的点积、"
        "或放进 torch 的融合内核；统计输出含有非有限值的调用比例（Clopper-Pearson 区间）。"
        "不缩放就出错、缩放后不出错，才算“防止溢出”。",
    ),
    control=Text(
        "The same in bfloat16, which has the exponents of float32: nothing overflows, and the scale prevents nothing.",
        "改用 bfloat16，其指数范围与 float32 相同：什么都不会溢出，缩放也就无可防止。",
    ),
    parameters={"calls": 200, "outlier": 300.0, "dtype": "float16"},
    quick={"calls": 80},
    flipped={"dtype": "bfloat16"},
    measure=measure,
    parts=(
        _part("query", "applied to q, before the product", "作用于 q，在求点积之前"),
        _part("product", "applied to the product, which is stored in fp16", "作用于以 fp16 存储的点积"),
        _part("kernel", "inside a kernel that accumulates in fp32", "在以 fp32 累加的内核之中"),
    ),
    why=why,
)
