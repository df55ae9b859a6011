"""paper-table3: what row (B) of the paper's third table varies, and what it shows."""

from __future__ import annotations

from typing import NamedTuple

from sqrtdk.messages import Text
from sqrtdk.theory.parameters import multi_head_terms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Place, Plot, format_figure, series_over
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_MODEL, HEADS, D_V = 512, 8, 64
ATTENTION_LAYERS = 18  # 6 in the encoder, 12 in the decoder


class HeadSizeRow(NamedTuple):
    """A row of Table 3 in which only d_k differs from the base model.

    Attributes:
        name: of the row.
        d_k: of one head.
        scaled: whether the dot products are divided by sqrt(d_k), as in equation 1.
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
    HeadSizeRow("base", 64, True, 4.92, 25.8, 65),
    HeadSizeRow("B", 32, True, 5.01, 25.4, 60),
    HeadSizeRow("B", 16, True, 5.16, 25.1, 58),
)
INVENTED = (
    PAPER[0],
    HeadSizeRow("scaled", 32, True, 4.93, 25.8, 60),
    HeadSizeRow("scaled", 16, True, 4.94, 25.7, 58),
    HeadSizeRow("B", 64, False, 5.01, 25.4, 65),
    HeadSizeRow("B", 32, False, 4.85, 26.1, 60),
)  # for the control
FROM, TO = 64, 32
STABLE = 0.1  # BLEU: the paper calls 25.7 of row (E) "nearly identical" to the base model's 25.8


def measure(run: ExperimentRun) -> ExperimentResult:
    """Read the rows: BLEU by d_k, rows without the scale, and the parameters that the change of d_k explains."""
    table = [HeadSizeRow(*row) for row in run["table"]]
    scaled, unscaled = ([row for row in table if row.scaled is with_scale] for with_scale in (True, False))
    # Of the rows without the scale if there are any, else of those that are said to be without it.
    rows = {row.d_k: row for row in unscaled or table}
    first, second = rows[FROM], rows[TO]
    figures = [
        exact("rows_without_scale", len(unscaled)),
        exact("bleu_change", round(second.bleu - first.bleu, 1)),
        exact("perplexity_change", round(second.perplexity - first.perplexity, 2)),
        exact("bleu_range_with_scale", round(max(row.bleu for row in scaled) - min(row.bleu for row in scaled), 1)),
    ]
    for row in table:
        place: dict[str, Place] = {"d_k": row.d_k, "scale": "sqrt_dk" if row.scaled else "none"}
        fewer = _attention_millions(D_V) - _attention_millions(row.d_k)
        figures += [
            exact("bleu", row.bleu, **place),
            exact("perplexity", row.perplexity, **place),
            exact("millions_of_parameters", row.millions, **place),
            exact("millions_if_only_d_k_changes", table[0].millions - fewer, **place),
        ]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _attention_millions(d_k: int) -> float:
    terms = multi_head_terms(D_MODEL, HEADS, head_dim=d_k, value_head_dim=D_V, in_bias=False, out_bias=False)
    return ATTENTION_LAYERS * terms.total / 1e6


def _plot(figures: Figures) -> Plot:
    return Plot(
        "bleu",
        WORDS("plot.bleu"),
        "$d_k$",
        "BLEU (newstest2013)",
        (series_over("Table 3", figures.all("bleu", scale="sqrt_dk"), "d_k"),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    base, half, quarter = (figures("bleu", d_k=d_k, scale="sqrt_dk") for d_k in (64, 32, 16))
    printed = [figures("millions_of_parameters", d_k=d_k, scale="sqrt_dk") for d_k in (32, 16)]
    formula = [figures("millions_if_only_d_k_changes", d_k=d_k, scale="sqrt_dk") for d_k in (32, 16)]
    unscaled = format_figure(figures("rows_without_scale").value)
    worse = figures("bleu_change").value < 0
    return WORDS(
        "why",
        base=base,
        half=half,
        quarter=quarter,
        worse=WORDS("worse" if worse else "no_worse"),
        printed_half=printed[0],
        printed_quarter=printed[1],
        formula_half=formula[0],
        formula_quarter=formula[1],
        unscaled=unscaled,
        spread=figures("bleu_range_with_scale"),
        stable=STABLE,
    )


CLAIM = Claim(
    id="paper-table3",
    group="structure",
    sources=("S1", "arXiv:1706.03762"),
    statement=WORDS("statement"),
    formula=r"\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",
    method=WORDS("method", stable=STABLE),
    control=WORDS("control"),
    parameters={"table": PAPER},
    quick={},
    flipped={"table": INVENTED},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.row"),
            (Expect("rows_without_scale", low=1.0),),
        ),
        ClaimPart(
            WORDS("part.improves", before=FROM, after=TO),
            (Expect("bleu_change", low=0.1),),
        ),
        ClaimPart(
            WORDS("part.stable", stable=STABLE),
            (Expect("bleu_range_with_scale", high=STABLE),),
        ),
    ),
    why=why,
)
