"""params-single: the parameters of each of the three projections of one head, and of all three."""

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
    """Parameters of the projections of q, k and v in real modules, over 3 d_model d_k."""
    figures = []
    for d_model, d_k in run["sizes"]:
        formula = 3 * d_model * d_k
        for module, matrices in _matrices(d_model, d_k).items():
            counts = {"W_Q, W_K and W_V": sum(matrices.values())} if run["together"] else matrices
            for matrix, count in counts.items():
                place = {"matrix": matrix, "module": module, "d_model": d_model, "d_k": d_k}
                figures += [
                    exact("parameters", count, **place),
                    exact("parameters_over_formula", count / formula, **place),
                ]
    return ExperimentResult(figures)


def _matrices(d_model: int, d_k: int) -> dict[str, dict[str, int]]:
    """Parameters of each matrix by module; our module holds the three as rows of one."""
    layers = {name: nn.Linear(d_model, d_k, bias=False, device="meta").weight for name in ("W_Q", "W_K", "W_V")}
    head = MultiHeadAttention(d_model, 1, bias=False, head_dim=d_k, device="meta")
    assert head.in_proj_weight is not None
    rows = dict(zip(layers, head.in_proj_weight.view(3, d_k, d_model), strict=True))
    modules = {"torch Linear": layers, "sqrtdk MultiHeadAttention": rows}
    return {module: {name: weight.numel() for name, weight in found.items()} for module, found in modules.items()}


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    one = figures.all("parameters")[0]
    d_model, d_k = int(one.at["d_model"]), int(one.at["d_k"])
    share = figures.all("parameters_over_formula")[0]
    return WORDS(
        "why",
        d_model=d_model,
        d_k=d_k,
        parameters=f"{one.value:.0f}",
        three=f"{3 * one.value:.0f}",
        share=share,
        biases=3 * d_k,
    )


CLAIM = Claim(
    id="params-single",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"|W_Q| = |W_K| = |W_V| = d_{model}\,d_k, \qquad |W_Q| + |W_K| + |W_V| = 3\,d_{model}\,d_k",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"sizes": ((512, 64), (768, 64), (512, 512), (4096, 128)), "together": False},
    quick={},
    flipped={"together": True},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.formula"),
            (Expect("parameters_over_formula", low=1.0, high=1.0),),
        ),
    ),
    why=why,
)
