"""best-exponent: which power of d_k is the best scale, before the first update and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sqrtdk.messages import Text
from sqrtdk_lab._first_step import FIRST_STEP_QUANTITIES, first_step
from sqrtdk_lab._scale_grid import (
    FULL_GRID,
    LOSS_TOLERANCE,
    QUICK_GRID,
    START_EXPONENT,
    Losses,
    best_sigmas,
    costs_of,
    law_costs,
    loss_plot,
    train_grid,
)
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, curve_series, format_figure, map_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

STEP = "adam_step"
LAW = "cost_with_best_factor_nats"
SHARED = "0.01"  # the rate with the smallest losses in trials
OWN = "own"  # rate of what is measured at the best rate of each d_k and scale
# Between d_k 16 and 512 an exponent that is off by 0.2 makes the scale wrong by a factor of 32^0.2 = 2, which S3 calls
# harmful. A best exponent within 0.2 of 1/2 is the square root.
EXPONENT_ROOM = 0.2
LOW, HIGH = 0.5 - EXPONENT_ROOM, 0.5 + EXPONENT_ROOM


def measure(run: ExperimentRun) -> ExperimentResult:
    """Exponents that keep a head at its start as it is, and exponents of the best scale after training."""
    figures = _at_start(run)
    arms = train_grid(run)
    losses: dict[str, Losses] = {
        f"{rate:g}": {place: arm.losses(rate) for place, arm in arms.items()} for rate in run["rates"]
    }
    losses[OWN] = {place: arm.best for place, arm in arms.items()}
    for rate, found in losses.items():
        figures += _of_losses(run, rate, found)
    return ExperimentResult(figures, _plots(run, Figures(figures), losses))


def _at_start(run: ExperimentRun) -> list[Figure]:
    """Return the exponent a for which the scale c d_k^-a leaves a quantity the same at every d_k."""
    dims, sigmas, draws = run["start_dims"], run["start_sigmas"], run["draws"]
    figures: list[Figure] = []
    by_keys: dict[int, dict[str, list[float]]] = {}
    for keys in run["keys"]:
        place = {"keys": keys, "sigmas": list(sigmas), "folded": run["start"] == "folded"}
        cells = [{**place, "d_k": d, "seed": run.seed * draws + draw} for draw in range(draws) for d in dims]
        found = run.map(first_step, cells)
        exponents: dict[str, list[float]] = {}
        for name in FIRST_STEP_QUANTITIES:
            values = np.array([result[name] for result in found]).reshape(draws, len(dims), len(sigmas))
            start = START_EXPONENT[run["start"]]
            exponents[name] = [start + _level_exponent(dims, sigmas, one) for one in values]
            when = "step" if name == STEP else "start"
            figures.append(mean("exponent", exponents[name], when=when, of=name, keys=keys))
            if name == STEP and keys == min(run["keys"]):
                figures += [
                    geometric_mean("logit_change_over_rate", values[:, i, j], d_k=d, sigma=sigma)
                    for i, d in enumerate(dims)
                    for j, sigma in enumerate(sigmas)
                ]
        by_keys[keys] = exponents
    for name in ("entropy_share", "jacobian"):
        ends = (by_keys[keys][name] for keys in (max(run["keys"]), min(run["keys"])))
        figures.append(mean("change_with_keys", [many - few for many, few in zip(*ends, strict=True)], of=name))
    return figures


def _level_exponent(dims: Sequence[int], sigmas: Sequence[float], values: np.ndarray) -> float:
    """Return b for which sigma = c d_k^-b leaves the quantity (d_k, sigmas) the same at every d_k, close to sigma 1.

    The logarithm of the quantity is fitted by a0 + a1 log sigma + a2 log d_k, which is level along b = a2 / a1.
    """
    near = [j for j, sigma in enumerate(sigmas) if 0.5 <= sigma <= 2.0]
    grid = [(1.0, math.log(sigmas[j]), math.log(d)) for d in dims for j in near]
    fit = np.linalg.lstsq(np.array(grid), np.log(values[:, near]).flatten(), rcond=None)[0]
    return float(fit[2] / fit[1])


def _of_losses(run: ExperimentRun, rate: str, losses: Losses) -> list[Figure]:
    """Return the best sigma of every d_k, its exponent, and what sigma 1 and other laws cost."""
    best, start = best_sigmas(losses), START_EXPONENT[run["start"]]
    figures = [geometric_mean("best_sigma", found, rate=rate, d_k=d) for d, found in best.items()]
    figures += [mean("cost_of_sigma_1_nats", costs_of(losses, d, 1.0), rate=rate, d_k=d) for d in best]
    if len(best) > 1:
        slopes = np.polyfit(np.log(list(best)), np.log(list(best.values())), 1)[0]
        figures.append(mean("exponent_of_best_scale", start - slopes, rate=rate))
        figures += [mean(LAW, law_costs(losses, start - power), rate=rate, exponent=power) for power in (0.0, 0.5, 1.0)]
    return figures


def _plots(run: ExperimentRun, figures: Figures, losses: dict[str, Losses]) -> tuple[Plot, ...]:
    dims, keys = run["start_dims"], min(run["keys"])
    step = figures("exponent", of=STEP, keys=keys).value - START_EXPONENT[run["start"]]
    rates = [figure for figure in figures.all("best_sigma") if figure.at["rate"] != OWN]
    by_rate = [replace(figure, at={**figure.at, "rate": float(figure.at["rate"])}) for figure in rates]
    return (
        Plot(
            "first-step",
            WORDS("plot.first_step", keys=keys, exponent=format_figure(START_EXPONENT[run["start"]] + step)),
            "$d_k$",
            r"$\sigma$ of the logits at the start",
            (
                curve_series("steps of one size", dims, [(d / 64) ** -step for d in dims]),
                curve_series(r"$1/\sqrt{d_k}$", dims, [1.0] * len(dims), style="dashed"),
            ),
            x_axis="log",
            y_axis="log",
            map=map_over(
                "change of the logits / rate", figures.all("logit_change_over_rate"), "d_k", "sigma", colours="log"
            ),
        ),
        loss_plot(
            "shared-rate", WORDS("plot.shared", rate=SHARED), losses[SHARED], figures.all("best_sigma", rate=SHARED)
        ),
        loss_plot("own-rate", WORDS("plot.own"), losses[OWN], figures.all("best_sigma", rate=OWN)),
        Plot(
            "by-rate",
            WORDS("plot.by_rate"),
            "$d_k$",
            "learning rate",
            (),
            x_axis="log",
            y_axis="log",
            map=map_over(r"best $\sigma$ at the start", by_rate, "d_k", "rate", colours="log"),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    start = figures.all("exponent", when="start")
    steps = figures.all("exponent", when="step")
    costs = [figure.value for figure in figures.all("cost_of_sigma_1_nats", rate=OWN)]
    none, root, d_k = figures.all(LAW, rate=OWN)
    best = figures.all("best_sigma", rate=OWN)
    return WORDS(
        "why",
        least=format_figure(min(figure.value for figure in start)),
        most=format_figure(max(figure.value for figure in start)),
        step=steps[0],
        step_keys=steps[0].at["keys"],
        last_step=steps[-1],
        last_step_keys=steps[-1].at["keys"],
        shared=figures("exponent_of_best_scale", rate=SHARED),
        rate=SHARED,
        own=figures("exponent_of_best_scale", rate=OWN),
        none=none,
        root=root,
        d_k=d_k,
        first_best=best[0],
        first_dim=best[0].at["d_k"],
        last_best=best[-1],
        last_dim=best[-1].at["d_k"],
        least_cost=format_figure(min(costs)),
        most_cost=format_figure(max(costs)),
    )


CLAIM = Claim(
    id="best-exponent",
    group="factors",
    sources=("S1", "S3"),
    statement=WORDS("statement"),
    formula=r"s = c\, d_k^{-a}, \qquad a = \frac{1}{2}\,?",
    method=WORDS("method", room=EXPONENT_ROOM),
    control=WORDS("control"),
    parameters={
        **FULL_GRID,
        "keys": (32, 64, 128, 256, 512, 1024, 2048, 4096),
        "start_dims": (16, 32, 64, 128, 256, 512),
        "start_sigmas": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        "draws": 8,
    },
    quick={
        **QUICK_GRID,
        "keys": (32, 128),
        "start_dims": (16, 64, 512),
        "start_sigmas": (0.5, 1.0, 2.0),
        "draws": 8,
    },
    flipped={"start": "folded", "dims": (64, 512), "rates": (1e-2,)},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.start"), (Expect("exponent", LOW, HIGH, {"when": "start"}),)),
        ClaimPart(WORDS("part.step"), (Expect("exponent", LOW, HIGH, {"when": "step"}),)),
        ClaimPart(WORDS("part.keys"), (Expect("change_with_keys", -EXPONENT_ROOM, EXPONENT_ROOM),)),
        ClaimPart(WORDS("part.shared"), (Expect("cost_of_sigma_1_nats", high=LOSS_TOLERANCE, at={"rate": SHARED}),)),
        ClaimPart(WORDS("part.own"), (Expect("cost_of_sigma_1_nats", high=LOSS_TOLERANCE, at={"rate": OWN}),)),
    ),
    why=why,
    condition=WORDS("condition"),
)
