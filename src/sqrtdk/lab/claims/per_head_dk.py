"""per-head-dk: the dimension under the root is that of one head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sqrtdk import AuxRequest
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.nn import MultiHeadAttention

WIDTH = 768


def measure(run: Run) -> Measured:
    """Standard deviation of the logits of real multi-head attention, with the root of one dimension or the other."""
    figures = [
        mean("logit_std", _logit_std(run, heads, run[case]), heads=heads, scale=case)
        for heads in run["heads"]
        for case in ("head", "model")
    ]
    return Measured(figures, (_plot(Figures(figures), run["heads"]),))


def _logit_std(run: Run, heads: int, dimension: str) -> Tensor:
    """Root mean square over rows and heads, one for each fresh layer with unit-variance q and k."""
    rng, found = run.generator("layers", heads), []
    scale = {"head": None, "model": WIDTH**-0.5}[dimension]  # None: the library's own rule
    layer = MultiHeadAttention(WIDTH, heads, bias=False, batch_first=True, scale=scale)
    assert layer.in_proj_weight is not None
    for _ in range(run["layers"]):
        nn.init.normal_(layer.in_proj_weight, std=WIDTH**-0.5, generator=rng)
        query, key = (
            nn.functional.layer_norm(torch.randn(1, run["tokens"], WIDTH, generator=rng), (WIDTH,)) for _ in range(2)
        )
        wanted = AuxRequest(variance=True)
        with torch.no_grad():
            *_, aux = layer(query, key, key, need_weights=False, return_aux=wanted)
        unbiased = run["tokens"] / (run["tokens"] - 1)
        found.append((aux.variance.double().mean() * unbiased).sqrt())
    return torch.stack(found)


def _plot(figures: Figures, heads: tuple[int, ...]) -> Plot:
    return Plot(
        "std",
        Text(
            f"Standard deviation of the logits of multi-head attention of width {WIDTH}.",
            f"宽度为 {WIDTH} 的多头注意力中 logit 的标准差。",
        ),
        "heads $h$",
        "standard deviation of the logits",
        (
            over(r"divided by $\sqrt{d_k}$", figures.all("logit_std", scale="head"), "heads"),
            over(r"divided by $\sqrt{d_{model}}$", figures.all("logit_std", scale="model"), "heads"),
            curve(r"$1/\sqrt{h}$", heads, (h**-0.5 for h in heads), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    right, wrong = (figures.all("logit_std", scale=case)[-1] for case in ("head", "model"))
    heads = right.at["heads"]
    return Text(
        "A head's logit is a sum over the d_k = d_model / h components of that head, so its variance is d_k; the other "
        "components belong to other heads' sums. Dividing by sqrt(d_model) divides by sqrt(h) too much: with "
        f"{heads} heads the standard deviation is {wrong}, against {right} with the root of the head's dimension.",
        "每个头的 logit 是对该头自己的 d_k = d_model / h 个分量求和，所以方差是 d_k；其余分量属于其他头的求和。"
        f"若除以 sqrt(d_model)，就多除了 sqrt(h)：共 {heads} 个头时，标准差为 {wrong}，"
        f"而用单个头的维度时为 {right}。",
    )


CLAIM = Claim(
    id="per-head-dk",
    group="factors",
    sources=("S2",),
    statement=Text(
        "In multi-head attention the right dimension under the root is that of one head, not d_model.",
        "在多头注意力中，根号下应是单个头的维度，而不是 d_model。",
    ),
    formula=r"\mathrm{std}\left[ \frac{q_h \cdot k_h}{\sqrt{d_k}} \right] = 1, \qquad "
    r"\mathrm{std}\left[ \frac{q_h \cdot k_h}{\sqrt{d_{\mathrm{model}}}} \right] = \frac{1}{\sqrt{h}}",
    method=Text(
        f"Multi-head attention of width {WIDTH} with fresh weights that give q and k components of variance 1, and "
        "normalised inputs: standard deviation of the logits over the keys of a row, for several numbers of heads and "
        "both dimensions.",
        f"宽度为 {WIDTH} 的多头注意力，新初始化的权重使 q、k 的分量方差为 1，输入已归一化。对若干头数和两种维度，"
        "测量一行之内 logit 的标准差。",
    ),
    control=Text(
        "The two dimensions are exchanged.",
        "交换两种维度。",
    ),
    parameters={"heads": (2, 4, 8, 12, 24, 48), "layers": 20, "tokens": 64, "head": "head", "model": "model"},
    quick={"heads": (4, 12), "layers": 6, "tokens": 32},
    flipped={"head": "model", "model": "head"},
    measure=measure,
    parts=(
        Part(
            Text(
                "with the head's dimension the standard deviation is 1 (within 15%), with d_model it is below 0.8",
                "用单个头的维度时标准差为 1（误差 15% 以内），用 d_model 时低于 0.8",
            ),
            (
                Expect("logit_std", low=0.85, high=1.15, at={"scale": "head"}),
                Expect("logit_std", high=0.8, at={"scale": "model"}),
            ),
        ),
    ),
    why=why,
)
