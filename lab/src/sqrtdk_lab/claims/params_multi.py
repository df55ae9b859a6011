"""params-multi: the parameters of multi-head attention, and of one head of full width."""

from __future__ import annotations

from torch import nn

from sqrtdk.messages import Text
from sqrtdk.nn import MultiHeadAttention
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
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
    return ExperimentResult(figures)


def _module(d_model: int, heads: int, kv_heads: int) -> nn.Module:
    return MultiHeadAttention(d_model, heads, bias=False, kv_heads=kv_heads, device="meta")


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    one = figures.all("parameters")[0]
    d_model, heads = int(one.at["d_model"]), int(one.at["heads"])
    return WORDS("why", d_model=d_model, heads=heads, parameters=f"{one.value:.0f}")


CLAIM = Claim(
    id="params-multi",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"3\,h\,d_{model}\,d_k + d_{model}^2 = 4\,d_{model}^2, \qquad d_k = \frac{d_{model}}{h}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"sizes": ((512, 8), (512, 4), (768, 12), (1024, 16), (4096, 32)), "kv_share": 1.0},
    quick={},
    flipped={"kv_share": 0.25},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.formula"),
            (Expect("parameters_over_formula", low=1.0, high=1.0),),
        ),
        ClaimPart(
            WORDS("part.one_head"),
            (Expect("parameters_over_one_head", low=1.0, high=1.0),),
        ),
    ),
    why=why,
)
