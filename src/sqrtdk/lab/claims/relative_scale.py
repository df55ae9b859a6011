"""relative-scale: which position scores add to the variance that the scale has to undo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sqrtdk
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.positions import alibi, deberta, rope, shaw, t5_bias
from sqrtdk.scales import disentangled

HEADS, HEAD_DIM = 4, 64
WIDTH = HEADS * HEAD_DIM
FRESH_STD = 0.02  # with which published code starts these tables


def _deberta(length: int, std: float, rng: torch.Generator) -> Any:
    term = deberta(HEADS, HEAD_DIM, max_distance=length)
    nn.init.normal_(term.embedding, std=std, generator=rng)
    for projection in (term.key_proj, term.query_proj):
        assert isinstance(projection, nn.Linear)
        nn.init.normal_(projection.weight, std=WIDTH**-0.5, generator=rng)
    return term.double()


def _shaw(length: int, std: float, rng: torch.Generator) -> Any:
    term = shaw(HEAD_DIM, max_distance=length, heads=HEADS)
    nn.init.normal_(term.table, std=std, generator=rng)
    return term.double()


def _t5(length: int, std: float, rng: torch.Generator) -> Any:
    term = t5_bias(HEADS)
    nn.init.normal_(term.embedding.weight, std=std, generator=rng)
    return term.double()


def _alibi(length: int, std: float, rng: torch.Generator) -> Any:
    return alibi(HEADS, symmetric=True)


TERMS: dict[str, Callable[[int, float, torch.Generator], Any]] = {
    "none": lambda length, std, rng: None,
    "DeBERTa": _deberta,
    "DeBERTa, fresh": lambda length, std, rng: _deberta(length, FRESH_STD * std, rng),
    "Shaw": _shaw,
    "RoPE": lambda length, std, rng: None,
    "T5": _t5,
    "ALiBi": _alibi,
}
ROTATED = {"RoPE"}
OWN_SCALES: dict[str, Any] = {"DeBERTa": disentangled(3), "T5": 1.0}  # of the papers, where not 1/sqrt(d_k)


def measure(run: Run) -> Measured:
    """Variance over the keys of a row of all that the scale multiplies, over d_k, one number for each fresh layer."""
    figures = []
    for kind in TERMS:
        layers = [_layer(run, kind, draw) for draw in range(run["draws"])]
        figures.append(
            mean("scaled_variance_over_d_k", [(one(1.0) - one(0.0)) / HEAD_DIM for one in layers], kind=kind)
        )
        if kind in OWN_SCALES:
            stds = [math.sqrt(one(OWN_SCALES[kind])) for one in layers]
            figures.append(mean("logit_std_at_its_own_scale", stds, kind=kind))
    return Measured(figures, (_plot(Figures(figures)),))


def _layer(run: Run, kind: str, draw: int) -> Callable[[Any], float]:
    """A fresh layer: the variance of its logits over the keys of a row, as a function of the scale."""
    rng, length = run.generator(kind, draw), run["length"]
    query, key = (torch.randn(HEADS, length, HEAD_DIM, generator=rng, dtype=torch.float64) for _ in range(2))
    if kind in ROTATED:
        query, key = rope(query, key)
    with torch.no_grad():
        term = TERMS[kind](length, run["table_std"], rng)

    def variance(scale: Any) -> float:
        return float(sqrtdk.measure(query, key, scale=scale, bias=term).variance.mean() * length / (length - 1))

    return variance


def _plot(figures: Figures) -> Plot:
    return Plot(
        "variance",
        Text(
            "Variance of what the scale multiplies, over d_k: the number that belongs under the root beside d_k.",
            "缩放所乘部分的方差除以 d_k：即根号下除 d_k 之外应有的数。",
        ),
        "position term",
        "variance / $d_k$",
        (over("measured", figures.all("scaled_variance_over_d_k"), "kind", style="bars"),),
        lines=(("product alone", 1.0), ("three terms", 3.0)),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(kind: str) -> str:
        return str(figures("scaled_variance_over_d_k", kind=kind))

    std, bare = (figures("logit_std_at_its_own_scale", kind=kind) for kind in OWN_SCALES)
    return Text(
        "The scale has to undo the variance of what it multiplies. DeBERTa adds two more products of d_k terms to "
        "q . k, content to position and position to content; if the position vectors are as large as the contents', "
        f"the three variances add to {found('DeBERTa')} d_k, and 1/sqrt(3 d_k) gives logits of standard deviation "
        f"{std}. Shaw's relative keys add one product: {found('Shaw')} d_k (the paper keeps 1/sqrt(d_k)). The "
        f"tables' size matters: with tables of standard deviation {FRESH_STD} DeBERTa's sum is "
        f"{found('DeBERTa, fresh')} d_k. A rotation changes no length: RoPE leaves {found('RoPE')}. The biases of T5 "
        f"and ALiBi are added to the finished scores, and no scale multiplies them: {found('T5')} and "
        f"{found('ALiBi')}. T5 has no scale at all: from queries and keys of variance 1 its logits have a standard "
        f"deviation of {bare}, and it is the start of W_q, smaller by 1/sqrt(d_k), that makes up for it.",
        "缩放要抵消的，是它所乘部分的方差。DeBERTa 在 q · k 之外又加上两个各含 d_k 项的点积：内容对位置与位置对内容。"
        f"若位置向量与内容向量一样大，三个方差之和为 {found('DeBERTa')} d_k，此时用 1/sqrt(3 d_k) 得到的 logit "
        f"标准差为 {std}。Shaw 的相对键增加一个点积：{found('Shaw')} d_k（论文仍用 1/sqrt(d_k)）。"
        f"结果也取决于位置表的大小：当位置表的标准差为 {FRESH_STD} 时，DeBERTa 的总方差为 {found('DeBERTa, fresh')} "
        f"d_k。旋转不改变长度：RoPE 为 {found('RoPE')}。T5 与 ALiBi 的偏置加在算好的得分上，没有任何缩放乘它们："
        f"分别为 {found('T5')} 与 {found('ALiBi')}。T5 根本没有缩放：查询与键的方差为 1 时，其 logit 的标准差为 "
        f"{bare}；补偿来自 W_q 的初始值，它小了 1/sqrt(d_k) 倍。",
    )


def _changes(kind: str, en: str, zh: str, low: float = 1.5, high: float = 4.0) -> Part:
    expect = Expect("scaled_variance_over_d_k", low=low, high=high, at={"kind": kind})
    return Part(Text(en, zh), (expect,))


CLAIM = Claim(
    id="relative-scale",
    group="factors",
    sources=("S0", "arXiv:2006.03654", "arXiv:1803.02155"),
    statement=Text(
        "Relative position scores change the factor; DeBERTa's is 1/sqrt(3 d).",
        "相对位置得分会改变缩放因子；DeBERTa 的因子是 1/sqrt(3 d)。",
    ),
    formula=r"\mathrm{Var}[ q_i \cdot k_j + q_i \cdot r_{ij} + s_{ij} \cdot k_j ] = 3 d_k",
    method=Text(
        "Random queries and keys of variance 1 with each kind of position term, tables and projections fresh for each "
        "draw and of variance 1 unless said otherwise. Variance of the logits over the keys of a row at a scale of 1, "
        "less that at a scale of 0: what the scale multiplies. It changes the factor where this is at least 1.5 d_k. "
        "DeBERTa's and T5's logits also at the scales of their papers, 1/sqrt(3 d_k) and 1.",
        "方差为 1 的随机查询与键，配以各种位置项；每次都重新抽取位置表与投影，除另有说明外方差为 1。"
        "取缩放为 1 时一行之内 logit 的方差，减去缩放为 0 时的方差，得到缩放所乘的部分；若它不小于 1.5 d_k，"
        "就算改变了因子。DeBERTa 与 T5 的 logit 还按各自论文的缩放（1/sqrt(3 d_k) 与 1）测量。",
    ),
    control=Text(
        "The tables of positions are zero: nothing changes the factor.",
        "位置表全部为零：没有任何一种改变因子。",
    ),
    parameters={"draws": 40, "length": 64, "table_std": 1.0},
    quick={"draws": 8, "length": 48},
    flipped={"table_std": 0.0},
    measure=measure,
    parts=(
        _changes(
            "DeBERTa",
            "DeBERTa's two terms make it 3 (within 10%)",
            "DeBERTa 的两项使它变为 3（误差 10% 以内）",
            2.7,
            3.3,
        ),
        _changes("DeBERTa, fresh", "DeBERTa's terms while their tables are small", "DeBERTa 的两项，位置表尚小时"),
        _changes("Shaw", "Shaw's relative keys change it", "Shaw 的相对键会改变它"),
        _changes("RoPE", "a rotation changes it", "旋转会改变它"),
        _changes("T5", "T5's bias changes it", "T5 的偏置会改变它"),
        _changes("ALiBi", "ALiBi changes it", "ALiBi 会改变它"),
    ),
    why=why,
)
