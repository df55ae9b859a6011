"""temperature: softmax(z / T), and the equivalent scale."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_entropy_nats, expected_jacobian_norm
from sqrtdk_lab._rows import attention_weights, own_keys
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, format_figure, series_over
from sqrtdk_lab.intervals import largest_draw, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Weights at each temperature by the formula, against attention with the equivalent scale."""
    d_k, keys, temperatures = run["d_k"], run["keys"], run["temperatures"]
    rng = run.generator("rows")
    query, key = own_keys(rng, run["rows"], keys, d_k)
    textbook = query @ key.mT / math.sqrt(d_k)
    figures, entropies = [], []
    for t in temperatures:
        by_scale = attention_weights(query, key, 1 / (math.sqrt(d_k) * t))
        logits = textbook * t ** run["power"]
        rows = row_stats(logits)
        entropies.append(rows.entropy_nats.flatten())
        difference = (by_scale - logits.softmax(-1)).abs().amax(-1).flatten()
        figures += [
            largest_draw("largest_difference_of_weights", difference, t=t),
            mean("peak", rows.peak.flatten(), t=t),
            mean("entropy_nats", entropies[-1], t=t),
            mean("squared_jacobian_norm", rows.jacobian_norm.flatten() ** 2, t=t),
        ]
    for (low, high), (cold, warm) in zip(pairwise(temperatures), pairwise(entropies), strict=True):
        figures.append(proportion("rows_flatter_when_warmer", int((warm > cold).sum()), run["rows"], t=high, below=low))
    figures.append(mean("peak_at_the_lowest", row_stats(textbook * temperatures[0] ** run["power"]).peak.flatten()))
    figures.append(largest_draw("largest_entropy_slope_error", _slope_error(textbook)))
    return ExperimentResult(figures, _plots(Figures(figures), run))


def _slope_error(logits: Tensor) -> Tensor:
    """Difference between dH/dT at T = 1, by automatic differentiation, and the variance of z under the weights."""
    t = torch.ones(len(logits), 1, 1, dtype=torch.float64, requires_grad=True)
    log_weights = (logits / t).log_softmax(-1)
    (slope,) = torch.autograd.grad(-(log_weights.exp() * log_weights).sum(), t)
    shares = logits.softmax(-1)
    mean_logit = (shares * logits).sum(-1, keepdim=True)
    variance = (shares * (logits - mean_logit) ** 2).sum(-1)
    return (slope.flatten() - variance.flatten()).abs()


def _plots(figures: Figures, run: ExperimentRun) -> tuple[Plot, Plot]:
    keys, temperatures = run["keys"], run["temperatures"]
    sigmas = [t ** run["power"] for t in temperatures]
    return (
        Plot(
            "entropy",
            WORDS("plot.entropy", keys=keys),
            "temperature",
            "entropy, nats",
            (
                series_over("measured", figures.all("entropy_nats"), "t", style="points"),
                curve_series("theory", temperatures, expected_entropy_nats(keys, sigmas), style="dashed"),
            ),
            x_axis="log",
            lines=(("uniform", math.log(keys)),),
        ),
        Plot(
            "jacobian",
            WORDS("plot.jacobian"),
            "temperature",
            "squared norm of the Jacobian",
            (
                series_over("measured", figures.all("squared_jacobian_norm"), "t", style="points"),
                curve_series(
                    "theory", temperatures, [norm**2 for norm in expected_jacobian_norm(keys, sigmas)], style="dashed"
                ),
            ),
            x_axis="log",
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    away = max(figure.value for figure in figures.all("largest_difference_of_weights"))
    peaks = figures.all("peak")
    cold = figures("peak_at_the_lowest")
    slope = figures("largest_entropy_slope_error")
    return WORDS(
        "why",
        away=format_figure(away),
        slope=slope,
        coldest=peaks[0].at["t"],
        cold=cold,
        warmest=peaks[-1].at["t"],
        warm=peaks[-1],
    )


CLAIM = Claim(
    id="temperature",
    group="saturation",
    sources=("S2", "arXiv:1503.02531"),
    statement=WORDS("statement"),
    formula=r"\mathrm{softmax}\left(\frac{q \cdot k}{T \sqrt{d_k}}\right), \qquad s = \frac{1}{T \sqrt{d_k}}, "
    r"\qquad \frac{dH}{dT} = \frac{\mathrm{Var}_p(z)}{T^{3}} \ge 0",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "d_k": 64,
        "keys": 10,
        "rows": 20_000,
        "temperatures": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        "power": -1,
    },
    quick={"rows": 3000},
    flipped={"power": 1},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.same"),
            (Expect("largest_difference_of_weights", high=1e-12),),
        ),
        ClaimPart(
            WORDS("part.flatter"),
            (Expect("rows_flatter_when_warmer", low=0.99),),
        ),
        ClaimPart(
            WORDS("part.sharp"),
            (Expect("peak_at_the_lowest", low=0.9),),
        ),
    ),
    why=why,
)
