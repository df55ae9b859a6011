"""batchnorm-analogy: a fixed factor is no normalisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._rows import own_keys
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import bootstrap, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

DIVISORS: dict[str, Callable[[Tensor, int], float]] = {
    "sqrt(d_k)": lambda product, d_k: d_k**0.5,
    "own std": lambda product, d_k: float(product.std()),
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Standard deviation of divided products as the components' standard deviation or mean moves away from (1, 0)."""
    figures = []
    for std in run["stds"]:
        logits = _logits(run, std, 0)
        figures.append(bootstrap("logit_std", logits, np.std, seed=run.seed, component_std=std, component_mean=0))
    for shift in run["means"]:
        logits = _logits(run, 1, shift)
        figures += [
            bootstrap("logit_std", logits, np.std, seed=run.seed, component_std=1, component_mean=shift),
            mean("logit_mean", logits, component_mean=shift),
        ]
    return ExperimentResult(figures, (_plot(Figures(figures), run["stds"]),))


def _logits(run: ExperimentRun, std: float, shift: float) -> Tensor:
    """Independent products, divided."""
    rng = run.generator("pairs", std, shift)
    query, key = own_keys(rng, run["pairs"], 1, run["d_k"], std=std, mean=shift)
    product = (query * key).sum((-1, -2))
    return product / DIVISORS[run["divide_by"]](product, run["d_k"])


def _plot(figures: Figures, stds: tuple[float, ...]) -> Plot:
    return Plot(
        "std",
        WORDS("plot.std"),
        "standard deviation of the components",
        "standard deviation of the logits",
        (
            series_over("measured", figures.all("logit_std", component_mean=0), "component_std", style="points"),
            curve_series("its square", stds, (std**2 for std in stds), style="dashed"),
        ),
        x_axis="log",
        y_axis="log",
        lines=(("normalised", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    unit = figures("logit_std", component_std=1, component_mean=0)
    wide = figures.all("logit_std", component_mean=0)[-1]
    shifted, centre = figures.all("logit_std", component_std=1)[-1], figures.all("logit_mean")[-1]
    return WORDS(
        "why",
        unit=unit,
        std=wide.at["component_std"],
        wide=wide,
        shift=shifted.at["component_mean"],
        shifted=shifted,
        centre=centre,
    )


CLAIM = Claim(
    id="batchnorm-analogy",
    group="gradients",
    sources=("S1", "S4"),
    statement=WORDS("statement"),
    formula=r"\mathrm{std}\left[ \frac{q \cdot k}{\sqrt{d_k}} \right] = "
    r"\sqrt{\sigma_q^2 \sigma_k^2 + \mu_q^2 \sigma_k^2 + \mu_k^2 \sigma_q^2}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "d_k": 64,
        "pairs": 20_000,
        "stds": (0.25, 0.5, 1, 2, 4),
        "means": (0.5, 1),
        "divide_by": "sqrt(d_k)",
    },
    quick={"pairs": 5_000, "stds": (0.25, 1, 4), "means": (1,)},
    flipped={"divide_by": "own std"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.unit"),
            (Expect("logit_std", low=0.9, high=1.1, at={"component_std": 1, "component_mean": 0}),),
        ),
        ClaimPart(
            WORDS("part.spread"),
            tuple(Expect("logit_std", low=0.9, high=1.1, at={"component_std": std}) for std in (0.25, 4)),
        ),
        ClaimPart(
            WORDS("part.shifted"),
            (Expect("logit_std", low=0.9, high=1.1, at={"component_mean": 1}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
