"""per-head-dk: the dimension under the root is the head dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sqrtdk import AuxRequest
from sqrtdk.messages import Text
from sqrtdk.nn import MultiHeadAttention
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

TOTAL_WIDTH = 768


def measure(run: ExperimentRun) -> ExperimentResult:
    """Standard deviation of the logits of real multi-head attention, with the root of one dimension or the other."""
    figures = [
        mean("logit_std", _logit_std(run, heads, run[case]), heads=heads, scale=case)
        for heads in run["heads"]
        for case in ("head", "model")
    ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["heads"]),))


def _logit_std(run: ExperimentRun, heads: int, dimension: str) -> Tensor:
    """Root mean square over rows and heads, one for each fresh layer with unit-variance q and k."""
    rng, found = run.generator("layers", heads), []
    scale = {"head": None, "model": TOTAL_WIDTH**-0.5}[dimension]  # None: the library's own rule
    layer = MultiHeadAttention(TOTAL_WIDTH, heads, bias=False, batch_first=True, scale=scale)
    assert layer.in_proj_weight is not None
    for _ in range(run["layers"]):
        nn.init.normal_(layer.in_proj_weight, std=TOTAL_WIDTH**-0.5, generator=rng)
        query, key = (
            nn.functional.layer_norm(torch.randn(1, run["tokens"], TOTAL_WIDTH, generator=rng), (TOTAL_WIDTH,))
            for _ in range(2)
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
        WORDS("plot.std", width=TOTAL_WIDTH),
        "heads $h$",
        "standard deviation of the logits",
        (
            series_over(r"divided by $\sqrt{d_k}$", figures.all("logit_std", scale="head"), "heads"),
            series_over(r"divided by $\sqrt{d_{model}}$", figures.all("logit_std", scale="model"), "heads"),
            curve_series(r"$1/\sqrt{h}$", heads, (h**-0.5 for h in heads), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    right, wrong = (figures.all("logit_std", scale=case)[-1] for case in ("head", "model"))
    heads = right.at["heads"]
    return WORDS("why", heads=heads, wrong=wrong, right=right)


CLAIM = Claim(
    id="per-head-dk",
    group="factors",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\mathrm{std}\left[ \frac{q_h \cdot k_h}{\sqrt{d_k}} \right] = 1, \qquad "
    r"\mathrm{std}\left[ \frac{q_h \cdot k_h}{\sqrt{d_{\mathrm{model}}}} \right] = \frac{1}{\sqrt{h}}",
    method=WORDS("method", width=TOTAL_WIDTH),
    control=WORDS("control"),
    parameters={"heads": (2, 4, 8, 12, 24, 48), "layers": 20, "tokens": 64, "head": "head", "model": "model"},
    quick={"heads": (4, 12), "layers": 6, "tokens": 32},
    flipped={"head": "model", "model": "head"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.head"),
            (
                Expect("logit_std", low=0.85, high=1.15, at={"scale": "head"}),
                Expect("logit_std", high=0.8, at={"scale": "model"}),
            ),
        ),
    ),
    why=why,
)
