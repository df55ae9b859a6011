"""params-single: the parameters of the three projections of one head."""

from __future__ import annotations

from torch import nn

from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import exact
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.nn import MultiHeadAttention

WORDS = words_of(__name__)

OUTPUT = "out_proj"


def measure(run: ExperimentRun) -> ExperimentResult:
    """Parameters of the projections of q, k and v in real modules, over 3 d_model d_k."""
    figures = []
    for d_model, d_k in run["sizes"]:
        place = {"d_model": d_model, "d_k": d_k}
        formula = 3 * d_model * d_k
        for module, count in _counts(d_model, d_k, run["bias"]).items():
            figures += [
                exact("parameters", count, module=module, **place),
                exact("parameters_over_formula", count / formula, module=module, **place),
            ]
    return ExperimentResult(figures)


def _counts(d_model: int, d_k: int, bias: bool) -> dict[str, int]:
    layers = nn.ModuleList(nn.Linear(d_model, d_k, bias=bias, device="meta") for _ in range(3))
    head = MultiHeadAttention(d_model, 1, bias=bias, head_dim=d_k, device="meta")
    modules = {"torch Linear": layers, "sqrtdk MultiHeadAttention": head}
    return {
        name: sum(p.numel() for path, p in module.named_parameters() if not path.startswith(OUTPUT))
        for name, module in modules.items()
    }


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    one = figures.all("parameters")[0]
    d_model, d_k = int(one.at["d_model"]), int(one.at["d_k"])
    return WORDS("why", d_model=d_model, d_k=d_k, parameters=f"{one.value:.0f}", biases=3 * d_k)


CLAIM = Claim(
    id="params-single",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"|W_Q| + |W_K| + |W_V| = 3\,d_{model}\,d_k",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"sizes": ((512, 64), (768, 64), (512, 512), (4096, 128)), "bias": False},
    quick={},
    flipped={"bias": True},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.formula"),
            (Expect("parameters_over_formula", low=1.0, high=1.0),),
        ),
    ),
    why=why,
)
