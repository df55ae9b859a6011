"""layernorm-role: the effect of layer normalisation before the projections on the logits, and its limits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sqrtdk.messages import Text
from sqrtdk_lab._rows import factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

MODEL_WIDTH = 512
NORM_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "layer": lambda x: nn.functional.layer_norm(x, (MODEL_WIDTH,)),
    "none": lambda x: x,
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Standard deviation of the logits as the inputs, the weights or d_k grow, each against the same layer before."""
    figures = []
    start = _logit_std(run, 64, 1.0, 1.0, "sqrt_dk")
    for times in run["times"]:
        inputs = _logit_std(run, 64, times, 1.0, "sqrt_dk")
        weights = _logit_std(run, 64, 1.0, times, "sqrt_dk")
        figures += [
            mean("std_ratio", inputs / start, grown="inputs", times=times),
            mean("std_ratio", weights / start, grown="weights", times=times),
        ]
    figures += [mean("unscaled_logit_std", _logit_std(run, d, 1.0, 1.0, "none"), d_k=d) for d in run["dims"]]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _logit_std(run: ExperimentRun, d_k: int, input_factor: float, weight_factor: float, scale: str) -> Tensor:
    """Standard deviation of the logits, one for each fresh layer; the same layers for every factor."""
    rng, found = run.generator("layers", d_k), []
    for _ in range(run["layers"]):
        tokens = [torch.randn(run["tokens"], MODEL_WIDTH, generator=rng, dtype=torch.float64) for _ in range(2)]
        weights = [
            torch.randn(d_k, MODEL_WIDTH, generator=rng, dtype=torch.float64) / MODEL_WIDTH**0.5 for _ in range(2)
        ]
        query, key = (
            NORM_BY_NAME[run["norm"]](input_factor * x) @ (weight_factor * w).T
            for x, w in zip(tokens, weights, strict=True)
        )
        found.append((factor(scale, d_k) * query @ key.T).std())
    return torch.stack(found)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "growth",
        WORDS("plot.growth"),
        "factor on inputs or weights",
        "standard deviation, over the start",
        tuple(series_over(grown, figures.all("std_ratio", grown=grown), "times") for grown in ("inputs", "weights")),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    inputs, weights = (figures.all("std_ratio", grown=grown)[-1] for grown in ("inputs", "weights"))
    plain = figures.all("unscaled_logit_std")[-1]
    times = inputs.at["times"]
    return WORDS("why", times=times, inputs=inputs, weights=weights, plain=plain, d_k=plain.at["d_k"])


CLAIM = Claim(
    id="layernorm-role",
    group="gradients",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\mathrm{LN}(c\,x) = \mathrm{LN}(x), \qquad \mathrm{Var}[q \cdot k] = d_k \, "
    r"(d_{\mathrm{model}} \mathrm{Var}[W_q]) (d_{\mathrm{model}} \mathrm{Var}[W_k])",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"layers": 40, "tokens": 128, "times": (2, 4, 8), "dims": (16, 64, 256), "norm": "layer"},
    quick={"layers": 10, "tokens": 64, "times": (2, 8), "dims": (16, 64)},
    flipped={"norm": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.inputs"),
            (Expect("std_ratio", low=0.98, high=1.02, at={"grown": "inputs"}),),
        ),
        ClaimPart(
            WORDS("part.weights"),
            (Expect("std_ratio", low=0.98, high=1.02, at={"grown": "weights"}),),
        ),
        ClaimPart(
            WORDS("part.unscaled"),
            (Expect("unscaled_logit_std", high=2.0),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
