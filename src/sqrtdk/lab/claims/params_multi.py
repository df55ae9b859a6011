"""params-multi: the parameters of multi-head attention, and of one head of full width."""

from __future__ import annotations

from torch import nn

from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.text import Text
from sqrtdk.nn import MultiHeadAttention


def measure(run: Run) -> Measured:
    """Parameters of real modules over 3 h d_model d_k + d_model^2, and over those of one full-width head."""
    figures = []
    for d_model, heads in run["sizes"]:
        place = {"d_model": d_model, "heads": heads}
        many = _module(d_model, heads, max(1, int(heads * run["kv_share"])))
        one = nn.MultiheadAttention(d_model, 1, bias=False, device="meta")
        count, single = (sum(p.numel() for p in module.parameters()) for module in (many, one))
        formula = 3 * heads * d_model * (d_model // heads) + d_model**2
        figures += [
            exact("parameters", count, **place),
            exact("parameters_over_formula", count / formula, **place),
            exact("parameters_over_one_head", count / single, **place),
        ]
    return Measured(figures)


def _module(d_model: int, heads: int, kv_heads: int) -> nn.Module:
    return MultiHeadAttention(d_model, heads, bias=False, kv_heads=kv_heads, device="meta")


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    one = figures.all("parameters")[0]
    d_model, heads = int(one.at["d_model"]), int(one.at["heads"])
    return Text(
        "h matrices of d_model x d_k stand side by side as one of d_model x h d_k, and h d_k = d_model: three such "
        "matrices for q, k and v, and one for the output, make 4 d_model^2 whatever h. "
        f"At d_model = {d_model} with {heads} heads the module holds {one.value:.0f}, as many as torch's with one head "
        f"of width {d_model}. Heads divide the width and add nothing; what changes with h is d_k, and with it the "
        "right "
        "scale. Biases add 4 d_model; fewer key and value heads take parameters away.",
        "h 个 d_model x d_k 的矩阵并排起来就是一个 d_model x h d_k 的矩阵，而 h d_k = d_model："
        "查询、键、值各一个，再加上输出投影，共 4 d_model^2，与 h 无关。"
        f"d_model = {d_model}、{heads} 个头时，模块共有 {one.value:.0f} 个参数，与 torch 中宽度为 {d_model} "
        "的单头模块相同。"
        "多头只是把宽度分开，并不增加参数；随 h 改变的是 d_k，正确的缩放因子也随之改变。偏置会增加 4 d_model 个参数，"
        "减少键值头数则会减少参数。",
    )


CLAIM = Claim(
    id="params-multi",
    group="structure",
    sources=("S4",),
    statement=Text(
        "h heads with d_k = d_model / h and the output projection hold 3 h d_model d_k + d_model^2 parameters, as many "
        "as one head of full width.",
        "h 个 d_k = d_model / h 的头连同输出投影共有 3 h d_model d_k + d_model^2 个参数，与一个全宽度的头相同。",
    ),
    formula=r"3\,h\,d_{model}\,d_k + d_{model}^2 = 4\,d_{model}^2, \qquad d_k = \frac{d_{model}}{h}",
    method=Text(
        "Count the parameters of real modules without biases, for several widths and numbers of heads, and those of "
        "torch's module with one head.",
        "对若干宽度和头数，统计不带偏置的真实模块的参数个数，并与 torch 的单头模块比较。",
    ),
    control=Text(
        "A quarter of the key and value heads (grouped-query attention): fewer parameters.",
        "键和值的头数减为四分之一（分组查询注意力）：参数变少。",
    ),
    parameters={"sizes": ((512, 8), (512, 4), (768, 12), (1024, 16), (4096, 32)), "kv_share": 1.0},
    quick={},
    flipped={"kv_share": 0.25},
    measure=measure,
    parts=(
        Part(
            Text("the number is the formula's, exactly", "个数恰好等于公式值"),
            (Expect("parameters_over_formula", low=1.0, high=1.0),),
        ),
        Part(
            Text("it is that of one head of full width", "与一个全宽度的头相同"),
            (Expect("parameters_over_one_head", low=1.0, high=1.0),),
        ),
    ),
    why=why,
)
