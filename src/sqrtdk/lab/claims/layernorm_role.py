"""layernorm-role: what layer normalisation before the projections does to the logits, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sqrtdk.lab._random_rows import factor
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

WIDTH = 512
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda x: nn.functional.layer_norm(x, (WIDTH,)),
    "none": lambda x: x,
}


def measure(run: Run) -> Measured:
    """Standard deviation of the logits as the inputs, the weights or d_k grow, each against the same layer before."""
    figures = []
    start = _logit_std(run, 64, 1.0, 1.0, "sqrt_dk")
    for times in run["times"]:
        inputs = _logit_std(run, 64, times, 1.0, "sqrt_dk")
        weights = _logit_std(run, 64, 1.0, times, "sqrt_dk")
        figures += [
            mean("std_ratio", inputs / start, grown="inputs", times=times),
            mean("std_ratio", weights / start, grown="weights", times=times),
        ]
    figures += [mean("unscaled_logit_std", _logit_std(run, d, 1.0, 1.0, "none"), d_k=d) for d in run["dims"]]
    return Measured(figures, (_plot(Figures(figures)),))


def _logit_std(run: Run, d_k: int, input_factor: float, weight_factor: float, scale: str) -> Tensor:
    """Standard deviation of the logits, one for each fresh layer; the same layers for every factor."""
    rng, found = run.generator("layers", d_k), []
    for _ in range(run["layers"]):
        tokens = [torch.randn(run["tokens"], WIDTH, generator=rng, dtype=torch.float64) for _ in range(2)]
        weights = [torch.randn(d_k, WIDTH, generator=rng, dtype=torch.float64) / WIDTH**0.5 for _ in range(2)]
        query, key = (
            NORMS[run["norm"]](input_factor * x) @ (weight_factor * w).T for x, w in zip(tokens, weights, strict=True)
        )
        found.append((factor(scale, d_k) * query @ key.T).std())
    return torch.stack(found)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "growth",
        Text(
            "Standard deviation of the logits behind layer normalisation, over that at the start, as inputs or weights "
            "grow.",
            "层归一化之后 logit 的标准差与初始值之比，随输入或权重的放大而变化。",
        ),
        "factor on inputs or weights",
        "standard deviation, over the start",
        tuple(over(grown, figures.all("std_ratio", grown=grown), "times") for grown in ("inputs", "weights")),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    inputs, weights = (figures.all("std_ratio", grown=grown)[-1] for grown in ("inputs", "weights"))
    plain = figures.all("unscaled_logit_std")[-1]
    times = inputs.at["times"]
    return Text(
        "Layer normalisation divides every token by its own standard deviation, so a factor on the inputs cancels: "
        f"inputs {times} times as large change the standard deviation of the logits by a factor of {inputs}. It comes "
        "before the projections, so it sees neither their weights nor d_k. W_q and W_k both "
        f"{times} times as large give logits {weights} times as large, the square; its own learned gain acts in the "
        "same way. And the sum over d_k components comes after it: without 1/sqrt(d_k) the logits behind it have a "
        f"standard deviation of {plain} at d_k = {plain.at['d_k']}. What bounds the logits in spite of grown weights "
        "is a normalisation of q and k themselves, after the projections.",
        "层归一化把每个词元除以它自身的标准差，所以输入的倍数会被约掉：输入放大到 "
        f"{times} 倍时，logit 的标准差变为原来的 {inputs} 倍。但它位于投影之前，既看不到投影的权重，也看不到 d_k。"
        f"W_q 与 W_k 都放大到 {times} 倍时，logit 变为原来的 {weights} 倍，即平方关系；"
        "层归一化自身可学习的增益也是如此。"
        f"对 d_k 个分量的求和也发生在它之后：不除以 sqrt(d_k) 时，在 d_k = {plain.at['d_k']} 处 logit 的标准差为 "
        f"{plain}。要在权重增大后仍能约束 logit，需要在投影之后对 q 与 k 本身作归一化。",
    )


CLAIM = Claim(
    id="layernorm-role",
    group="gradients",
    sources=("S1",),
    statement=Text(
        "Layer normalisation before the projections has an effect similar to that of the scale: it keeps the logits in "
        "range.",
        "投影之前的层归一化与缩放的作用类似：它使 logit 保持在合适的范围内。",
    ),
    formula=r"\mathrm{LN}(c\,x) = \mathrm{LN}(x), \qquad \mathrm{Var}[q \cdot k] = d_k \, "
    r"(d_{\mathrm{model}} \mathrm{Var}[W_q]) (d_{\mathrm{model}} \mathrm{Var}[W_k])",
    method=Text(
        "Fresh layers with d_k = 64 and the scale: standard deviation of the logits after the inputs, or both weight "
        "matrices, are multiplied, over that of the same layer before. The same layers without the scale, for several "
        "d_k.",
        "新建若干 d_k = 64 且带缩放的层：把输入或两个权重矩阵乘以一个倍数，计算 logit 的标准差与同一层原值之比。"
        "另外在不缩放的情况下，对几个 d_k 测量 logit 的标准差。",
    ),
    control=Text(
        "The layer normalisation is taken out: the inputs' factor comes through squared as well.",
        "去掉层归一化：输入的倍数也会以平方的形式传到 logit。",
    ),
    parameters={"layers": 40, "tokens": 128, "times": (2, 4, 8), "dims": (16, 64, 256), "norm": "layer"},
    quick={"layers": 10, "tokens": 64, "times": (2, 8), "dims": (16, 64)},
    flipped={"norm": "none"},
    measure=measure,
    parts=(
        Part(
            Text(
                "larger inputs leave the standard deviation of the logits as it was (within 2%)",
                "输入放大后，logit 的标准差不变（误差 2% 以内）",
            ),
            (Expect("std_ratio", low=0.98, high=1.02, at={"grown": "inputs"}),),
        ),
        Part(
            Text(
                "larger weights leave the standard deviation of the logits as it was (within 2%)",
                "权重放大后，logit 的标准差不变（误差 2% 以内）",
            ),
            (Expect("std_ratio", low=0.98, high=1.02, at={"grown": "weights"}),),
        ),
        Part(
            Text(
                "without the scale the standard deviation of the logits is at most 2, whatever d_k",
                "不缩放时，无论 d_k 多大，logit 的标准差都不超过 2",
            ),
            (Expect("unscaled_logit_std", high=2.0),),
        ),
    ),
    why=why,
)
