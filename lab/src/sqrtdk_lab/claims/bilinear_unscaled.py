"""bilinear-unscaled: can the matrix of a bilinear score learn the range of the logits, and how fast?"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.messages import Text
from sqrtdk.scores import bilinear, luong_general
from sqrtdk_lab._teacher import LEARNED, TEACHER_STD, Start, fit, resize
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, Series, Style, curve_series
from sqrtdk_lab.intervals import geometric_mean, largest_draw, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

SMALL, LARGE = 8, 16
EXACT_DIM = 24  # not a square, so that dividing by its root rounds
LINE_STYLES: dict[str, Style] = {"unscaled": "curve", "scaled": "dashed"}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Difference between the two ways to write the factor, and the result of gradient descent from an unscaled
    start."""
    figures = [largest_draw("largest_difference", _differences(run))]
    curves: list[Series] = []
    for d_k, steps in run["dims_and_steps"]:
        starts = {
            "unscaled": Start(weight_std=d_k**-0.5, scale=1.0),
            "scaled": Start(weight_std=d_k**-0.5, scale=d_k**-0.5),
        }
        fits = fit(
            run.generator("learners", d_k),
            d_k=d_k,
            starts=starts,
            learners=run["learners"],
            rates=run["rates"],
            steps=steps,
            rows=32,
            keys=8,
            keep_size=run["keep_size"],
        )
        for case, found in fits.items():
            at = {"case": case, "d_k": d_k}
            figures += [
                geometric_mean("error_at_start", found.start, **at),
                geometric_mean("error_at_end", found.end, **at),
                largest_draw("largest_error_at_end", found.end, **at),
                mean("logit_std_at_start", found.start_std, **at),
                mean("logit_std_at_end", found.end_std, **at),
                geometric_mean("steps_until_learned", found.steps, **at),
            ]
            curves.append(curve_series(f"{case}, $d_k$ = {d_k}", range(steps), found.curve, style=LINE_STYLES[case]))
        ratio = fits["unscaled"].steps / fits["scaled"].steps
        figures.append(geometric_mean("steps_over_those_of_the_scaled_layer", ratio, d_k=d_k))
    plot = Plot(
        "error",
        WORDS("plot.error"),
        "step",
        "error",
        tuple(curves),
        y_axis="log",
    )
    return ExperimentResult(figures, (plot,))


def _differences(run: ExperimentRun) -> Tensor:
    """Differences between the outputs of scaled attention with W and of unscaled attention with W / sqrt(d_k)."""
    rng = run.generator("exact")
    query, key, value, weight = (
        torch.randn(EXACT_DIM, EXACT_DIM, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    scaled = attention(query, key, value, score=bilinear(weight))
    smaller = weight / EXACT_DIM**0.5
    if run["keep_size"]:
        resize(smaller, like=weight)
    absorbed = attention(query, key, value, score=luong_general(smaller))
    assert isinstance(scaled, Tensor)
    assert isinstance(absorbed, Tensor)
    return (scaled - absorbed).abs().flatten()


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(name: str, d_k: int, case: str = "unscaled") -> str:
        return str(figures(name, case=case, d_k=d_k))

    small = figures("steps_over_those_of_the_scaled_layer", d_k=SMALL)
    *_, longest = figures.all("steps_over_those_of_the_scaled_layer")
    last = int(longest.at["d_k"])
    worst = max(figures.all("largest_error_at_end", case="unscaled"), key=lambda f: f.value)
    return WORDS(
        "why",
        difference=figures("largest_difference"),
        worst=worst,
        small_dim=SMALL,
        learned=LEARNED,
        ratio_small=small,
        large_dim=last,
        start=found("logit_std_at_start", last),
        teacher_std=f"{TEACHER_STD:g}",
        steps=found("steps_until_learned", last),
        scaled_steps=found("steps_until_learned", last, "scaled"),
        ratio=longest,
    )


CLAIM = Claim(
    id="bilinear-unscaled",
    group="factors",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\frac{q^\top W k}{\sqrt{d_k}} = q^\top \left( \frac{W}{\sqrt{d_k}} \right) k, \qquad "
    r"\mathrm{std}[q^\top W k] = \Vert W \Vert_F",
    method=WORDS("method", teacher_std=f"{TEACHER_STD:g}", learned=LEARNED),
    control=WORDS("control"),
    parameters={
        "dims_and_steps": ((SMALL, 400), (LARGE, 1000), (32, 2400)),
        "learners": 8,
        "rates": (1e-2, 3e-2),
        "keep_size": False,
    },
    quick={"dims_and_steps": ((SMALL, 160), (LARGE, 500)), "learners": 5},
    flipped={"keep_size": True},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.folded"),
            (Expect("largest_difference", high=1e-12),),
        ),
        ClaimPart(
            WORDS("part.learns", learned=LEARNED),
            (Expect("largest_error_at_end", high=LEARNED, at={"case": "unscaled"}),),
        ),
    ),
    why=why,
)
