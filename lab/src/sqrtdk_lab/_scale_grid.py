"""Trainings over a grid of head dimensions and scales: which scale is the best, and how it depends on d_k.

A scale is named by `sigma`, the standard deviation that it gives the logits before the first update: sigma / sqrt(d_k)
for entries of variance 1, sigma itself if the weights of q start with 1/sqrt(d_k) ("folded").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sqrtdk.messages import Text
from sqrtdk_lab._arms import Arm, train_arms
from sqrtdk_lab.claim import ExperimentRun
from sqrtdk_lab.figures import Figure, HeatMap, Plot, series_over

# Two losses this close are one result: the register's bar for a training that is slower.
LOSS_TOLERANCE = 0.02  # nats a symbol
Losses = Mapping[tuple[int, float], Sequence[float]]  # by d_k (or length) and sigma, one a seed
START_EXPONENT = {"unit": 0.5, "folded": 0.0}  # a in sigma = scale * d_k^a before the first update

# 400 steps: long enough for attention to matter. The best sigma is far below 1: the grid reaches further down than up.
FULL_GRID: dict[str, Any] = {
    "start": "unit",
    "dims": (16, 32, 64, 128, 256, 512),
    "sigmas": (2**-12, 2**-10, 2**-8, 2**-6, 2**-4, 2**-2, 1.0, 4.0),
    "seeds": 4,
    "rates": (3e-3, 1e-2, 3e-2),
    "widened": 0,
    "text": {"steps": 400, "rows": 16, "length": 64, "points": 2},
}
# Small batches: how far training moves the logits depends on the number of steps.
QUICK_GRID: dict[str, Any] = {
    "dims": (64, 128),
    "sigmas": (2**-6, 1.0),
    "rates": (1e-2,),
    "text": {"steps": 300, "rows": 8, "length": 32, "points": 2},
}


def train_grid(run: ExperimentRun) -> dict[tuple[int, float], Arm]:
    """Train decoders on text at every d_k of `dims` and sigma of `sigmas`, at every rate and from every seed.

    Args:
        run: with the parameters of `FULL_GRID`.
    """
    places = [(d_k, sigma) for d_k in run["dims"] for sigma in run["sigmas"]]
    return train_arms(run, {(d, sigma): {**_design(run), "head_dim": d, "factor": sigma} for d, sigma in places})


def train_lengths(run: ExperimentRun, d_k: int, rate: float) -> Losses:
    """Train at one d_k and rate, and return the losses by length of the text and sigma.

    Args:
        run: with `lengths` and the parameters of `FULL_GRID`. A batch has equally many bytes at every length.
        d_k: of every head.
        rate: of all lengths and sigmas.
    """
    tokens = run["text"]["rows"] * run["text"]["length"]
    arms = {
        (length, sigma): {
            **_design(run),
            "head_dim": d_k,
            "factor": sigma,
            "length": length,
            "rows": tokens // length,
        }
        for length in run["lengths"]
        for sigma in run["sigmas"]
    }
    found = train_arms(run, arms, rates=dict.fromkeys(arms, (rate,)))
    return {place: arm.losses(rate) for place, arm in found.items()}


def _design(run: ExperimentRun) -> dict[str, Any]:
    return {"task": "text", "init": run["start"], "scale": "power", "exponent": START_EXPONENT[run["start"]]}


def best_sigma(sigmas: Sequence[float], losses: Sequence[float]) -> float:
    """Return the middle of the scales that are about as good as the best, on a logarithmic axis.

    A scale counts by exp(-(loss - smallest loss) / LOSS_TOLERANCE): where neighbours differ by less than their scatter,
    the place of the smallest loss says little.

    Example:
        >>> round(best_sigma([0.25, 1.0, 4.0], [2.0, 2.0, 3.0]), 3)
        0.5
    """
    excess = np.asarray(losses) - min(losses)
    return math.exp(float(np.average(np.log(sigmas), weights=np.exp(-excess / LOSS_TOLERANCE))))


def best_sigmas(losses: Losses) -> dict[int, list[float]]:
    """Return the best sigma of each seed, by d_k.

    Example:
        >>> best_sigmas({(16, 1.0): [2.0, 2.1], (16, 4.0): [3.0, 3.1]})
        {16: [1.0, 1.0]}
    """
    dims, sigmas = grid_of(losses)
    return {d: [best_sigma(sigmas, one) for one in zip(*(losses[d, s] for s in sigmas), strict=True)] for d in dims}


def costs_of(losses: Losses, d_k: int, sigma: float) -> list[float]:
    """Return for each seed the loss at a sigma minus that at the best of the other seeds, both of this seed.

    Example:
        >>> costs_of({(16, 1.0): [2.25, 2.25], (16, 0.25): [2.0, 1.75]}, 16, 1.0)
        [0.25, 0.5]
    """
    sigmas, found = grid_of(losses)[1], losses[d_k, sigma]
    costs = []
    for seed, loss in enumerate(found):
        rival = min(sigmas, key=lambda other: sum(losses[d_k, other]) - losses[d_k, other][seed])
        costs.append(loss - losses[d_k, rival][seed])
    return costs


def law_costs(losses: Losses, power: float) -> list[float]:
    """Return for each seed what the law sigma = c d_k^power costs with its best c: the mean over d_k of its loss minus
    that of the best sigma of each d_k. Losses between two sigmas are interpolated.

    Example:
        >>> losses = {(16, 1.0): [2.0], (16, 4.0): [3.0], (64, 1.0): [3.0], (64, 4.0): [2.0]}
        >>> [round(law_costs(losses, power)[0], 3) for power in (0.0, 1.0)]
        [0.5, 0.0]
    """
    dims, sigmas = grid_of(losses)
    grid = np.log(sigmas)
    shifts = {d: power * math.log(d / dims[0]) for d in dims}
    # the factors for which the whole law lies within the grid
    factors = np.linspace(grid[0] - min(shifts.values()), grid[-1] - max(shifts.values()), 97)
    seeds = range(len(losses[dims[0], sigmas[0]]))
    totals: np.ndarray = np.zeros((len(seeds), len(factors)))
    for d in dims:
        curves = np.array([losses[d, sigma] for sigma in sigmas])
        best = curves[int(curves.mean(1).argmin())]
        totals += [np.interp(factors + shifts[d], grid, curves[:, seed]) - best[seed] for seed in seeds]
    costs: list[float] = (totals[:, int(totals.mean(0).argmin())] / len(dims)).tolist()
    return costs


def grid_of(losses: Losses) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the dimensions and the sigmas of a grid, ascending."""
    dims, sigmas = zip(*losses, strict=True)
    return tuple(sorted(set(dims))), tuple(sorted(set(sigmas)))


def loss_plot(
    name: str, caption: Text, losses: Losses, best: Sequence[Figure], axis: str = "d_k", label: str = "$d_k$"
) -> Plot:
    """Plot the mean loss above that of the best sigma of the same d_k (or length), with the best sigmas over it."""
    columns, sigmas = grid_of(losses)
    means = {place: float(np.mean(values)) for place, values in losses.items()}
    least = {column: min(means[column, s] for s in sigmas) for column in columns}
    rows = tuple(tuple(means[column, s] - least[column] for column in columns) for s in sigmas)
    return Plot(
        name,
        caption,
        label,
        r"$\sigma$ of the logits at the start",
        (series_over("best", best, axis),),
        x_axis="log",
        y_axis="log",
        lines=((r"$1/\sqrt{d_k}$", 1.0),),
        map=HeatMap("loss above the best, nats", tuple(map(float, columns)), sigmas, rows),
    )
