"""batchnorm-analogy: a fixed factor is no normalisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from sqrtdk.lab._random_rows import own_keys
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import bootstrap, mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text

DIVISORS: dict[str, Callable[[Tensor, int], float]] = {
    "sqrt(d_k)": lambda product, d_k: d_k**0.5,
    "own std": lambda product, d_k: float(product.std()),
}


def measure(run: Run) -> Measured:
    """Standard deviation of divided products as the components' standard deviation or mean moves away from (1, 0)."""
    figures = []
    for std in run["stds"]:
        logits = _logits(run, std, 0)
        figures.append(bootstrap("logit_std", logits, np.std, seed=run.seed, component_std=std, component_mean=0))
    for shift in run["means"]:
        logits = _logits(run, 1, shift)
        figures += [
            bootstrap("logit_std", logits, np.std, seed=run.seed, component_std=1, component_mean=shift),
            mean("logit_mean", logits, component_mean=shift),
        ]
    return Measured(figures, (_plot(Figures(figures), run["stds"]),))


def _logits(run: Run, std: float, shift: float) -> Tensor:
    """Independent products, divided."""
    rng = run.generator("pairs", std, shift)
    query, key = own_keys(rng, run["pairs"], 1, run["d_k"], std=std, mean=shift)
    product = (query * key).sum((-1, -2))
    return product / DIVISORS[run["divide_by"]](product, run["d_k"])


def _plot(figures: Figures, stds: tuple[float, ...]) -> Plot:
    return Plot(
        "std",
        Text(
            "Standard deviation of the divided product over that of the components of q and k; a normalisation would "
            "give 1 everywhere.",
            "除以因子之后点积的标准差，随 q、k 分量标准差的变化；真正的归一化处处给出 1。",
        ),
        "standard deviation of the components",
        "standard deviation of the logits",
        (
            over("measured", figures.all("logit_std", component_mean=0), "component_std", style="points"),
            curve("its square", stds, (std**2 for std in stds), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
        lines=(("normalised", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    unit = figures("logit_std", component_std=1, component_mean=0)
    wide = figures.all("logit_std", component_mean=0)[-1]
    shifted, centre = figures.all("logit_std", component_std=1)[-1], figures.all("logit_mean")[-1]
    return Text(
        "Batch normalisation measures the data and divides by what it found, so its output has variance 1 whatever "
        "comes in. sqrt(d_k) is a number fixed before any data is seen. It is the right number for components of mean "
        f"0 and variance 1 ({unit}); for components with a standard deviation of {wide.at['component_std']} the logits "
        f"have {wide}, its square, and for components of mean {shifted.at['component_mean']} they have {shifted} "
        f"around a mean of {centre}. A better comparison is the variance-preserving start of weights, which is a fixed "
        "factor under the same assumption too. What does normalise is a norm of q and k (QK-norm).",
        "批归一化先测量数据，再除以测得的值，所以无论输入如何，输出的方差都是 1。sqrt(d_k) "
        f"则是在看到任何数据之前就固定的数。对均值为 0、方差为 1 的分量，它正合适（实测 {unit}）；分量的标准差为 "
        f"{wide.at['component_std']} 时，logit 的标准差为 {wide}，即其平方；分量的均值为 "
        f"{shifted.at['component_mean']} 时，标准差为 {shifted}，均值为 {centre}。更贴切的比喻是保持方差的权重初始化："
        "它同样是基于同一假设的固定因子。真正起归一化作用的是对 q 与 k 本身的归一化（QK-norm）。",
    )


CLAIM = Claim(
    id="batchnorm-analogy",
    group="gradients",
    sources=("S1", "S4"),
    statement=Text(
        "Dividing by sqrt(d_k) acts like batch normalisation of the logits, without the step that takes off the mean: "
        "it brings their variance to 1.",
        "除以 sqrt(d_k) 相当于对 logit 作不减均值的批归一化：它使方差变为 1。",
    ),
    formula=r"\mathrm{std}\left[ \frac{q \cdot k}{\sqrt{d_k}} \right] = "
    r"\sqrt{\sigma_q^2 \sigma_k^2 + \mu_q^2 \sigma_k^2 + \mu_k^2 \sigma_q^2}",
    method=Text(
        "Independent pairs q, k whose components have other standard deviations or means than 1 and 0: standard "
        "deviation of the products divided by sqrt(d_k). A normalisation would give 1 for all of them.",
        "抽取独立的 q、k 对，其分量的标准差或均值不同于 1 和 0，计算点积除以 sqrt(d_k) 之后的标准差。"
        "若是归一化，则在所有情形下都应为 1。",
    ),
    control=Text(
        "The products are divided by their own measured standard deviation, as batch normalisation does: 1 in every "
        "case.",
        "像批归一化那样，把点积除以它们自身测得的标准差：所有情形下都为 1。",
    ),
    parameters={
        "d_k": 64,
        "pairs": 20_000,
        "stds": (0.25, 0.5, 1, 2, 4),
        "means": (0.5, 1),
        "divide_by": "sqrt(d_k)",
    },
    quick={"pairs": 5_000, "stds": (0.25, 1, 4), "means": (1,)},
    flipped={"divide_by": "own std"},
    measure=measure,
    parts=(
        Part(
            Text(
                "components of mean 0 and standard deviation 1: standard deviation 1 (within 10%)",
                "分量均值为 0、标准差为 1：logit 的标准差为 1（误差 10% 以内）",
            ),
            (Expect("logit_std", low=0.9, high=1.1, at={"component_std": 1, "component_mean": 0}),),
        ),
        Part(
            Text(
                "components with another standard deviation: still 1",
                "分量的标准差为其他值：仍为 1",
            ),
            tuple(Expect("logit_std", low=0.9, high=1.1, at={"component_std": std}) for std in (0.25, 4)),
        ),
        Part(
            Text(
                "components with mean 1: still 1",
                "分量的均值为 1：仍为 1",
            ),
            (Expect("logit_std", low=0.9, high=1.1, at={"component_mean": 1}),),
        ),
    ),
    why=why,
)
