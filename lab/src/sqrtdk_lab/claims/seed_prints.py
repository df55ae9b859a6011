"""seed-prints: examples that print the mean of the weights, a dtype and a shape, run with the scale and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._rows import RULE_BY_SIDE, SIDES, factor, normal_pairs
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import largest_draw, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

# What an example can print of its logits and weights, as Python shows it.
PRINTS: dict[str, Callable[[Tensor, Tensor], str]] = {
    "mean": lambda _, probs: f"{probs.mean():.4f}",
    "dtype": lambda logits, _: str(logits.dtype),
    "shape": lambda _, probs: str(tuple(probs.shape)),
    "largest": lambda _, probs: f"{probs.max():.4f}",
    "deviation": lambda logits, _: f"{logits.float().std():.4f}",
    "entropy": lambda _, probs: f"{torch.special.entr(probs).sum(-1).mean():.4f}",
}
PRINTED = ("mean", "dtype", "shape")
TELLING = ("largest", "deviation", "entropy")


def measure(run: ExperimentRun) -> ExperimentResult:
    """Share of runs in which the print tells the scaled attention from the unscaled one."""
    figures = []
    for place, name in zip(PRINTED, run["prints"], strict=True):
        differ = 0
        for number in range(run["runs"]):
            one, other = (PRINTS[name](*_attention(run, number, run["d_k"], side)) for side in SIDES)
            differ += one != other
        figures.append(proportion("runs_that_differ", differ, run["runs"], place=place, printed=name))
    away: list[float] = []
    for d_k in run["dims"]:
        for side in SIDES:
            found = [_attention(run, number, d_k, side)[1] for number in range(run["runs"])]
            figures.append(mean("largest_weight", [float(probs.max()) for probs in found], d_k=d_k, side=side))
            means = [float(probs.mean()) for probs in found]
            figures.append(mean("mean_weight", means, d_k=d_k, side=side))
            away += [abs(run["keys"] * one - 1.0) for one in means]
    figures.append(largest_draw("largest_relative_error_of_the_mean", away))
    return ExperimentResult(figures, (_plot(Figures(figures), run["keys"]),))


def _attention(run: ExperimentRun, number: int, d_k: int, side: str) -> tuple[Tensor, Tensor]:
    """Return logits and weights of one run: under autocast the product is in bfloat16, and the softmax in float32."""
    query, key = normal_pairs(run.generator("example", number, d_k), run["keys"], d_k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = query @ key.mT * factor(RULE_BY_SIDE[side], d_k)
    return logits, logits.float().softmax(-1)


def _plot(figures: Figures, keys: int) -> Plot:
    return Plot(
        "prints",
        WORDS("plot.prints", keys=keys),
        "$d_k$",
        "weight",
        tuple(
            series_over(f"{label}, {side}", figures.all(name, side=side), "d_k")
            for label, name in (("largest", "largest_weight"), ("mean", "mean_weight"))
            for side in SIDES
        ),
        x_axis="log",
        lines=(("1/n", 1 / keys),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    found = figures.all("largest_weight")
    d_k = max(float(figure.at["d_k"]) for figure in found)
    unscaled, scaled = (figures("largest_weight", d_k=d_k, side=side) for side in SIDES)
    shares = figures.all("runs_that_differ")
    return WORDS(
        "why",
        runs=shares[0].samples,
        differ=max(shares, key=lambda figure: figure.value),
        away=figures("largest_relative_error_of_the_mean"),
        d_k=f"{d_k:g}",
        unscaled=unscaled,
        scaled=scaled,
    )


def _part(place: str) -> ClaimPart:
    # more than half: a print that shows the scale differs in any run but those that agree by accident
    return ClaimPart(WORDS(f"part.{place}"), (Expect("runs_that_differ", low=0.5, at={"place": place}),))


CLAIM = Claim(
    id="seed-prints",
    group="saturation",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\frac{1}{n} \sum_{j=1}^{n} p_{ij} = \frac{1}{n} \text{ for every scale}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"prints": PRINTED, "d_k": 64, "dims": (16, 64, 256), "keys": 10, "runs": 400},
    quick={"runs": 60},
    flipped={"prints": TELLING},
    measure=measure,
    parts=tuple(map(_part, PRINTED)),
    why=why,
    condition=WORDS("condition"),
)
