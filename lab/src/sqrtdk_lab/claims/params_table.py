"""params-table: the parameters of h heads over those of one layer."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk.nn import MultiHeadAttention
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

OUTPUT = "out_proj"


def measure(run: ExperimentRun) -> ExperimentResult:
    """Parameters of W_Q, W_K and W_V of h heads over h times those of one layer."""
    d_model = run["d_model"]
    figures = []
    for heads in run["heads"]:
        for kind, head_dim in (("kept", run["d_k"]), ("divided", d_model // heads)):
            one_dim = run["d_k"] if kind == "kept" else d_model
            one = _counts(d_model, 1, one_dim, 1)
            many = _counts(d_model, heads, head_dim, 1 if run["one_key_head"] else heads)
            place = {"heads": heads, "d_k": kind}
            figures += [
                exact("parameters", many["projections"], **place),
                exact("over_h_layers", many["projections"] / (heads * one["projections"]), **place),
                exact("over_one_layer", many["projections"] / one["projections"], **place),
                exact("over_one_layer_with_output", many["all"] / one["all"], **place),
            ]
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _counts(d_model: int, heads: int, head_dim: int, kv_heads: int) -> dict[str, int]:
    module = MultiHeadAttention(d_model, heads, bias=False, head_dim=head_dim, kv_heads=kv_heads, device="meta")
    counts = {path: p.numel() for path, p in module.named_parameters()}
    return {
        "projections": sum(count for path, count in counts.items() if not path.startswith(OUTPUT)),
        "all": sum(counts.values()),
    }


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    labels = {"kept": "each head keeps $d_k$", "divided": "$d_k = d_{model} / h$"}
    return Plot(
        "heads",
        WORDS("plot.heads"),
        "heads h",
        "parameters over those of one layer",
        (
            *(series_over(label, figures.all("over_one_layer", d_k=kind), "heads") for kind, label in labels.items()),
            curve_series("times h", run["heads"], run["heads"], style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    kept, divided = (figures.all("over_one_layer", d_k=kind)[-1] for kind in ("kept", "divided"))
    count = figures.all("parameters", d_k="divided")[-1]
    return WORDS(
        "why",
        heads=kept.at["heads"],
        kept=kept,
        divided=divided,
        parameters=f"{count.value:.0f}",
        whole=figures.all("over_one_layer_with_output", d_k="divided")[-1],
    )


def _part(kind: str) -> ClaimPart:
    return ClaimPart(WORDS(f"part.{kind}"), (Expect("over_h_layers", low=1.0, high=1.0, at={"d_k": kind}),))


CLAIM = Claim(
    id="params-table",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"3\,h\,d_{model}\,d_k = h \cdot 3\,d_{model}\,d_k, \qquad "
    r"3\,h\,d_{model}\,\frac{d_{model}}{h} = 3\,d_{model}^2",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"d_model": 512, "d_k": 64, "heads": (2, 4, 8, 16), "one_key_head": False},
    quick={},
    flipped={"one_key_head": True},
    measure=measure,
    parts=(
        _part("kept"),
        _part("divided"),
    ),
    why=why,
    condition=WORDS("condition"),
)
