"""mean-range: the mean of the dot product, which the scale is said to keep in range."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._rows import RULE_BY_SIDE, SIDES, Draw, dot_products, factor, normal_pairs, root_mean_square
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

RANGE = 3.0  # explanations expect scaled logits within three standard deviations, which are 3
COMPONENT_MEANS = {"zero": 0.0, "shifted": 0.5}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Mean and standard deviation of the products, unscaled and scaled, of components with and without a mean."""
    figures = []
    for components, shift in COMPONENT_MEANS.items():
        for d_k in run["dims"]:
            product = dot_products(run.generator(components, d_k), run["pairs"], d_k, _shifted(shift))
            for side, rule in RULE_BY_SIDE.items():
                logits = factor(rule, d_k) * product
                place = {"components": components, "side": side, "d_k": d_k}
                center = mean("mean", logits, **place)
                spread = root_mean_square("deviation", logits - logits.mean(), **place)
                figures += [center, spread]
                if components == "zero":
                    judged = {"mean": center, "deviation": spread}[run["judged"]]
                    figures.append(replace(judged, name="mean_or_deviation", at={"side": side, "d_k": d_k}))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _shifted(shift: float) -> Draw:
    """Return a function that draws q and k with components of this mean and variance 1."""

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = normal_pairs(rng, pairs, d_k)
        return query + shift, key + shift

    return draw


def _plot(figures: Figures) -> Plot:
    labels = {"zero": "component mean 0", "shifted": f"component mean {COMPONENT_MEANS['shifted']:g}"}
    return Plot(
        "mean",
        WORDS("plot.mean", shift=f"{COMPONENT_MEANS['shifted']:g}"),
        "$d_k$",
        r"mean of $q \cdot k$",
        tuple(
            series_over(f"{label}, {side}", figures.all("mean", components=components, side=side), "d_k")
            for components, label in labels.items()
            for side in SIDES
        ),
        x_axis="log",
        lines=(("3", RANGE),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(float(figure.at["d_k"]) for figure in figures.all("mean"))
    found = {
        f"{components}_{side}": figures("mean", components=components, side=side, d_k=d_k)
        for components in COMPONENT_MEANS
        for side in SIDES
    }
    spread = {f"spread_{side}": figures("deviation", components="zero", side=side, d_k=d_k) for side in SIDES}
    return WORDS("why", d_k=f"{d_k:g}", shift=f"{COMPONENT_MEANS['shifted']:g}", **found, **spread)


CLAIM = Claim(
    id="mean-range",
    group="statistics",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"\mathrm{E}[s \, q \cdot k] = s \, d_k \, \mu_q \mu_k, \qquad s = 1, \; \frac{1}{\sqrt{d_k}}",
    method=WORDS("method", range=f"{RANGE:g}"),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 256, 1024), "pairs": 100_000, "judged": "mean"},
    quick={"dims": (16, 64, 512), "pairs": 20_000},
    flipped={"judged": "deviation"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.kept", range=f"{RANGE:g}"),
            (
                Expect("mean_or_deviation", low=RANGE, at={"side": "unscaled"}),
                Expect("mean_or_deviation", low=-RANGE, high=RANGE, at={"side": "scaled"}),
            ),
        ),
    ),
    why=why,
)
