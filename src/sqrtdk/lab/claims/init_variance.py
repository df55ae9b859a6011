"""init-variance: which standard deviation of the logits each initialisation gives."""

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

WIDTH, HEADS = 768, 12
HEAD_DIM = WIDTH // HEADS
PACKED = {"Xavier packed"}  # one matrix of 3 * WIDTH rows, as in torch.nn.MultiheadAttention

INITS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "Xavier uniform": lambda w, rng: nn.init.xavier_uniform_(w, generator=rng),
    "Xavier normal": lambda w, rng: nn.init.xavier_normal_(w, generator=rng),
    "orthogonal": lambda w, rng: nn.init.orthogonal_(w, generator=rng),
    "LeCun normal": lambda w, rng: nn.init.normal_(w, std=WIDTH**-0.5, generator=rng),  # variance 1 / fan_in
    "Xavier packed": lambda w, rng: nn.init.xavier_uniform_(w, generator=rng),
    "Kaiming normal": lambda w, rng: nn.init.kaiming_normal_(w, generator=rng),
    "nn.Linear": lambda w, rng: nn.init.kaiming_uniform_(w, a=5**0.5, generator=rng),
    "N(0, 0.02)": lambda w, rng: nn.init.normal_(w, std=0.02, generator=rng),
}


def measure(run: Run) -> Measured:
    """Standard deviation of the logits of fresh layers on normalised inputs."""
    figures = []
    for name in INITS:
        products = _product_std(run, name)
        for case in ("with the scale", "without"):
            figures.append(mean("logit_std", factor(run[case], HEAD_DIM) * products, init=name, case=case))
    return Measured(figures, (_plot(Figures(figures)),))


def _product_std(run: Run, name: str) -> Tensor:
    """Root mean square of q . k in the first head, one number for each freshly initialised layer."""
    rng, found = run.generator("layers", name), []
    rows = WIDTH * (3 if name in PACKED else 1)
    for _ in range(run["layers"]):
        x = nn.functional.layer_norm(torch.randn(run["tokens"], WIDTH, generator=rng), (WIDTH,))
        packed = INITS[name](torch.empty(rows, WIDTH), rng)
        other = packed[WIDTH:] if name in PACKED else INITS[name](torch.empty(rows, WIDTH), rng)
        query, key = (x @ weight[:HEAD_DIM].T for weight in (packed, other))
        product = query @ key.T
        away = ~torch.eye(len(x), dtype=torch.bool)  # a token with itself is another distribution
        found.append(product[away].double().square().mean().sqrt())
    return torch.stack(found)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "std",
        Text(
            "Standard deviation of the logits of a fresh layer, by initialisation.",
            "新建层的 logit 标准差，按初始化方法分列。",
        ),
        "initialisation",
        "standard deviation of the logits",
        tuple(
            over(case, figures.all("logit_std", case=case), "init", style="bars")
            for case in ("with the scale", "without")
        ),
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def scaled(name: str) -> str:
        return str(figures("logit_std", init=name, case="with the scale"))

    plain = figures("logit_std", init="Xavier uniform", case="without")
    return Text(
        "For normalised inputs the components of q and k have the variance d_model Var(W), and the scaled logits have "
        "just that as their standard deviation. It is 1 for Xavier's rule on square matrices (variance "
        f"2/(2 d_model)): {scaled('Xavier uniform')}. But the same rule on the packed matrix of q, k and v, 3 d_model "
        f"rows, has half the variance: {scaled('Xavier packed')}; Kaiming's rule compensates a ReLU that is not "
        f"there: {scaled('Kaiming normal')}; nn.Linear's own start gives {scaled('nn.Linear')}, and N(0, 0.02) "
        f"{scaled('N(0, 0.02)')} at this width, since it does not depend on the width. All are of order 1, and only "
        "some are 1. None of them replaces the scale: they set the variance of the components of q and k, and without "
        f"the scale the sum over d_k of them gives {plain} with Xavier's rule.",
        "对归一化的输入，q 与 k 的分量方差为 d_model Var(W)，而缩放后 logit 的标准差恰好等于这个值。"
        "Xavier 规则用于方阵时"
        f"（方差 2/(2 d_model)）它等于 1：实测 {scaled('Xavier uniform')}。但同一规则用于把 q、k、v 合在一起、"
        f"共 3 d_model 行的矩阵时，方差只有一半：{scaled('Xavier packed')}；"
        "Kaiming 规则补偿的是这里并不存在的 "
        f"ReLU：{scaled('Kaiming normal')}；nn.Linear 的默认初始化给出 {scaled('nn.Linear')}；"
        "N(0, 0.02) 不随宽度调整，"
        f"在此宽度下为 {scaled('N(0, 0.02)')}。它们都在 1 的量级，但只有一部分等于 1。没有一种初始化能代替缩放："
        f"它们只决定 q 与 k 各分量的方差，而不缩放时对 d_k 个分量求和，即使用 Xavier 规则，标准差也达到 {plain}。",
    )


def _part(name: str) -> Part:
    return Part(
        Text(
            f"{name}, with the scale: standard deviation 1 (within 15%)",
            f"{name}，带缩放：标准差为 1（误差 15% 以内）",
        ),
        (Expect("logit_std", low=0.85, high=1.15, at={"init": name, "case": "with the scale"}),),
    )


CLAIM = Claim(
    id="init-variance",
    group="gradients",
    sources=("S1",),
    statement=Text(
        "Initialising the projections by Xavier's or Kaiming's rule controls the variance that reaches the logits.",
        "用 Xavier 或 Kaiming 规则初始化投影矩阵，就能控制传到 logit 的方差。",
    ),
    formula=r"\mathrm{std}\left[ \frac{q \cdot k}{\sqrt{d_k}} \right] = d_{\mathrm{model}} \, \mathrm{Var}[W]",
    method=Text(
        f"Layer-normalised inputs of width {WIDTH}, fresh projections by each initialisation, the first of {HEADS} "
        f"heads with d_k = {HEAD_DIM}: root mean square of the logits between different tokens, with the scale and "
        "without, over independent layers. Controlled means a standard deviation of 1.",
        f"输入经层归一化、宽度为 {WIDTH}，投影矩阵按各种方法初始化，取 {HEADS} 个头中的第一个，d_k = {HEAD_DIM}。"
        "在相互独立的层上，计算不同词元之间 logit 的均方根，分别带缩放与不带缩放。“得到控制”指标准差为 1。",
    ),
    control=Text(
        "The case with the scale has none either: no initialisation gives 1.",
        "原本带缩放的情形也不缩放：没有一种初始化给出 1。",
    ),
    parameters={"layers": 40, "tokens": 128, "with the scale": "sqrt_dk", "without": "none"},
    quick={"layers": 8, "tokens": 64},
    flipped={"with the scale": "none"},
    measure=measure,
    parts=(
        *map(_part, INITS),
        Part(
            Text(
                "any of them, without the scale: standard deviation 1 (within 15%)",
                "任何一种，不带缩放：标准差为 1（误差 15% 以内）",
            ),
            (Expect("logit_std", low=0.85, high=1.15, at={"case": "without"}),),
        ),
    ),
    why=why,
)
