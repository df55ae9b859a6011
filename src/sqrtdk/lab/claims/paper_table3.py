"""paper-table3: what row (B) of the paper's third table varies, and what it shows."""

from __future__ import annotations

from typing import NamedTuple

from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.theory.parameters import multi_head_terms

D_MODEL, HEADS, D_V = 512, 8, 64
ATTENTIONS = 18  # 6 in the encoder, 12 in the decoder


class Row(NamedTuple):
    """A row of Table 3 in which only d_k differs from the base model.

    Attributes:
        name: of the row.
        d_k: of one head.
        scaled: whether the dot products are divided by sqrt(d_k), as equation 1 has it.
        perplexity: per word piece, newstest2013.
        bleu: newstest2013.
        millions: parameters of the model.
    """

    name: str
    d_k: int
    scaled: bool
    perplexity: float
    bleu: float
    millions: int


# arXiv:1706.03762, table 3. "Unlisted values are identical to those of the base model", and no row lists the scale.
PAPER = (
    Row("base", 64, True, 4.92, 25.8, 65),
    Row("B", 32, True, 5.01, 25.4, 60),
    Row("B", 16, True, 5.16, 25.1, 58),
)
INVENTED = (PAPER[0], Row("B", 32, False, 4.85, 26.1, 60), Row("B", 16, False, 5.16, 25.1, 58))  # for the control
FROM, TO = 64, 32


def measure(run: Run) -> Measured:
    """Read the rows: BLEU by d_k, rows without the scale, and the parameters that the change of d_k explains."""
    table = [Row(*row) for row in run["table"]]
    rows = {row.d_k: row for row in table}
    first, second = rows[FROM], rows[TO]
    unscaled = [row for row in table if not row.scaled]
    figures = [
        exact("rows_without_scale", len(unscaled)),
        exact("bleu_change", round(second.bleu - first.bleu, 1)),
        exact("perplexity_change", round(second.perplexity - first.perplexity, 2)),
    ]
    for row in table:
        fewer = _attention_millions(D_V) - _attention_millions(row.d_k)
        figures += [
            exact("bleu", row.bleu, d_k=row.d_k),
            exact("perplexity", row.perplexity, d_k=row.d_k),
            exact("millions_of_parameters", row.millions, d_k=row.d_k),
            exact("millions_if_only_d_k_changes", table[0].millions - fewer, d_k=row.d_k),
        ]
    return Measured(figures, (_plot(Figures(figures)),))


def _attention_millions(d_k: int) -> float:
    terms = multi_head_terms(D_MODEL, HEADS, head_dim=d_k, value_head_dim=D_V, in_bias=False, out_bias=False)
    return ATTENTIONS * terms.total / 1e6


def _plot(figures: Figures) -> Plot:
    return Plot(
        "bleu",
        Text(
            "BLEU of the base model and of row (B), all with the scale; the paper gives no intervals.",
            "基准模型与 (B) 行的 BLEU，均带缩放；论文没有给出置信区间。",
        ),
        "$d_k$",
        "BLEU (newstest2013)",
        (over("Table 3", figures.all("bleu"), "d_k"),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    base, half, quarter = (figures("bleu", d_k=d_k) for d_k in (64, 32, 16))
    printed = [figures("millions_of_parameters", d_k=d_k) for d_k in (32, 16)]
    formula = [figures("millions_if_only_d_k_changes", d_k=d_k) for d_k in (32, 16)]
    unscaled = number(figures("rows_without_scale").value)
    worse = figures("bleu_change").value < 0
    return Text(
        f"Row (B) makes the keys of the base model smaller and leaves all else, the scale included: {base} BLEU at "
        f"d_k = 64, {half} at 32, {quarter} at 16. It gets {'worse, not better' if worse else 'no worse'}, and the "
        "paper concludes that smaller keys hurt model quality and that compatibility is not easy to determine. That "
        f"only d_k changes can be seen from the table's last column: {printed[0]} and {printed[1]} million "
        f"parameters, where the formula for W_Q and W_K gives {formula[0]} and {formula[1]}. The number of rows "
        f"without the scale is {unscaled}. The comparison without it that the paper speaks of is that of Britz et al. "
        "2017 (arXiv:1703.03906). The numbers are printed without intervals, so differences of a few tenths are weak "
        "evidence either way.",
        f"(B) 行只缩小基准模型的键，其余一律不变，缩放也不变：d_k = 64 时 BLEU 为 {base}，32 时为 {half}，16 时为 "
        f"{quarter}。结果{'变差而不是变好' if worse else '没有变差'}；论文的结论是减小键的维度会损害模型质量，"
        f"说明相容性并不容易判断。只有 d_k 改变这一点可以从表的最后一列看出：参数为 {printed[0]} 和 {printed[1]} "
        f"百万，而按 W_Q、W_K 的公式计算得 {formula[0]} 和 {formula[1]} 百万。表中去掉缩放的行数为 {unscaled}；"
        "论文提到的不带缩放的比较出自 Britz 等人 2017（arXiv:1703.03906）。这些数字都没有置信区间，"
        "零点几的差别本身并不是有力的证据。",
    )


CLAIM = Claim(
    id="paper-table3",
    group="structure",
    sources=("S1", "arXiv:1706.03762"),
    statement=Text(
        "Row (B) of the paper's Table 3 shows that without the scale BLEU improves when d_k goes from 64 to 32.",
        "论文表 3 的 (B) 行表明：不加缩放时，d_k 从 64 减到 32，BLEU 会提高。",
    ),
    formula=r"\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",
    method=Text(
        "A claim about a paper is answered with the paper: the base row and the two rows (B) as printed, and the "
        "number of parameters that a change of d_k alone explains. The paper gives no intervals.",
        "关于论文的论断用论文来回答：照录基准行和 (B) 的两行，并计算单独改变 d_k 所能解释的参数个数。"
        "论文没有给出置信区间。",
    ),
    control=Text(
        "An invented table, in which the rows (B) have no scale and 32 is better than 64: it is read as such.",
        "换成一张虚构的表，其中 (B) 的两行不加缩放，且 32 优于 64：应当读出这两点。",
    ),
    parameters={"table": PAPER},
    quick={},
    flipped={"table": INVENTED},
    measure=measure,
    parts=(
        Part(
            Text("a row of the table leaves out the scale", "表中有一行去掉了缩放"),
            (Expect("rows_without_scale", low=1.0),),
        ),
        Part(
            Text(f"BLEU improves when d_k goes from {FROM} to {TO}", f"d_k 从 {FROM} 减到 {TO} 时，BLEU 提高"),
            (Expect("bleu_change", low=0.1),),
        ),
    ),
    why=why,
)
