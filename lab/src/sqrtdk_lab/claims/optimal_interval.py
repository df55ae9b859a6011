"""optimal-interval: whether variance 1 puts the softmax into its best working interval."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk.theory import expected_jacobian_norm
from sqrtdk_lab._first_step import first_step
from sqrtdk_lab._rows import products
from sqrtdk_lab._scale_grid import (
    FULL_GRID,
    QUICK_GRID,
    Losses,
    best_sigmas,
    costs_of,
    loss_plot,
    train_grid,
    train_lengths,
)
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, HeatMap, Plot, curve_series, format_figure, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

KEYS_NEAR_BEST = 8  # keys for which variance 1 is near the best
D_K = 64
RATE = 1e-2  # the best of the rates for most sizes in trials
# Half of the factor of 2 that S3 calls harmful, on a logarithmic axis.
SIGMA_ROOM = math.sqrt(2.0)
ROW_SIGMAS = tuple(2.0 ** (i / 4) for i in range(-8, 17))  # of the random rows: 1/4 to 16
GRADIENT_SIGMAS = (0.25, 1.0, 4.0)


def measure(run: ExperimentRun) -> ExperimentResult:
    """The standard deviation of the logits with the largest Jacobian, with the best training, and after it."""
    judged, figures = run["judged_sigma"], []
    for keys in run["keys"]:
        # The fewer the keys, the more the norms of rows scatter: 8 keys take 750 rows a block.
        draws = run["blocks"] * max(run["rows"], 6000 // keys)
        rows = products(run.generator("rows", keys), draws=draws, keys=keys, d_k=D_K)
        rows = rows.reshape(run["blocks"], -1, keys) * D_K**-0.5
        best, share = zip(*(_largest_jacobian(block) for block in rows), strict=True)
        few = "few" if keys <= KEYS_NEAR_BEST else "many"
        figures += [
            geometric_mean("sigma_of_largest_jacobian", best, keys=keys),
            geometric_mean("best_over_judged", np.array(best) / judged, by="jacobian", number=few, keys=keys),
            mean("jacobian_at_sigma_1_over_largest", share, keys=keys),
        ]
    figures += _gradients(run)
    arms = train_grid(run)
    losses: Losses = {place: arm.best for place, arm in arms.items()}
    best_start = best_sigmas(losses)
    for d_k, found in best_start.items():
        figures += [
            geometric_mean("best_sigma", found, d_k=d_k),
            geometric_mean("best_over_judged", np.array(found) / judged, by="loss", d_k=d_k),
            mean("cost_of_sigma_1_nats", costs_of(losses, d_k, 1.0), d_k=d_k),
        ]
        arm = min((arms[d_k, sigma] for sigma in run["sigmas"]), key=lambda one: sum(one.losses(one.rate)))
        ends = [curve[-1] for curve in arm.at_best("logit_std")]
        figures += [
            geometric_mean("sigma_after_training", ends, d_k=d_k),
            geometric_mean("best_over_judged", np.array(ends) / judged, by="trained", d_k=d_k),
        ]
    by_length = train_lengths(run, D_K, RATE)
    figures += [
        geometric_mean("best_sigma_by_length", found, length=length) for length, found in best_sigmas(by_length).items()
    ]
    return ExperimentResult(figures, _plots(run, Figures(figures), losses, by_length))


def _largest_jacobian(logits: Tensor) -> tuple[float, float]:
    """Return the sigma of the largest rms norm over rows of variance 1 (rows, keys), and the norm at 1 over that."""
    norms = [row_stats(sigma * logits).jacobian_norm.square().mean().sqrt().item() for sigma in ROW_SIGMAS]
    at = min(max(int(np.argmax(norms)), 1), len(ROW_SIGMAS) - 2)
    # a parabola through the largest and its neighbours, on a logarithmic axis of sigma
    left, middle, right = norms[at - 1 : at + 2]
    shift = 0.5 * (left - right) / (left - 2 * middle + right)
    return ROW_SIGMAS[at] * 2.0 ** (shift / 4), norms[ROW_SIGMAS.index(1.0)] / max(norms)


def _gradients(run: ExperimentRun) -> list[Figure]:
    """Return the gradient of a query at a smaller and at a larger sigma, over that at sigma 1."""
    keys = max(run["keys"])
    place = {"keys": keys, "sigmas": list(GRADIENT_SIGMAS), "folded": False, "d_k": D_K}
    found = run.map(first_step, [{**place, "seed": run.seed * run["blocks"] + i} for i in range(run["blocks"])])
    ratios = [[value / one["gradient_q"][1] for value in one["gradient_q"]] for one in found]
    return [
        geometric_mean("gradient_over_that_at_sigma_1", [one[i] for one in ratios], sigma=sigma, keys=keys)
        for i, sigma in enumerate(GRADIENT_SIGMAS)
        if sigma != 1.0
    ]


def _plots(run: ExperimentRun, figures: Figures, losses: Losses, by_length: Losses) -> tuple[Plot, ...]:
    keys = run["keys"]
    norms = tuple(tuple(expected_jacobian_norm(n, sigma) for n in keys) for sigma in ROW_SIGMAS)
    most = tuple(max(row[i] for row in norms) for i in range(len(keys)))
    shares = tuple(tuple(value / largest for value, largest in zip(row, most, strict=True)) for row in norms)
    return (
        Plot(
            "jacobian",
            WORDS("plot.jacobian"),
            "keys $n$",
            r"$\sigma$ of the logits",
            (
                series_over("largest, measured", figures.all("sigma_of_largest_jacobian"), "keys"),
                curve_series(r"$\sqrt{2\,\log n}$", keys, [math.sqrt(2 * math.log(n)) for n in keys], style="dashed"),
                curve_series(r"$0.8\,\log n$", keys, [0.8 * math.log(n) for n in keys]),
            ),
            x_axis="log",
            y_axis="log",
            lines=((r"$1/\sqrt{d_k}$", 1.0),),
            map=HeatMap("Jacobian over its largest", tuple(map(float, keys)), ROW_SIGMAS, shares),
        ),
        loss_plot("start", WORDS("plot.start"), losses, figures.all("best_sigma")),
        loss_plot(
            "length",
            WORDS("plot.length", d_k=D_K, rate=f"{RATE:g}"),
            by_length,
            figures.all("best_sigma_by_length"),
            "length",
            "length of the text, bytes",
        ),
        Plot(
            "trained",
            WORDS("plot.trained"),
            "$d_k$",
            r"$\sigma$ of the logits",
            (
                series_over("best at the start", figures.all("best_sigma"), "d_k"),
                series_over("after training", figures.all("sigma_after_training"), "d_k"),
            ),
            x_axis="log",
            y_axis="log",
            lines=((r"$1/\sqrt{d_k}$ at the start", 1.0),),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    largest = figures.all("sigma_of_largest_jacobian")
    shares = figures.all("jacobian_at_sigma_1_over_largest")
    smaller, larger = figures.all("gradient_over_that_at_sigma_1")
    best, ends = figures.all("best_sigma"), figures.all("sigma_after_training")
    costs = figures.all("cost_of_sigma_1_nats")
    lengths = figures.all("best_sigma_by_length")
    return WORDS(
        "why",
        few=largest[0],
        few_keys=largest[0].at["keys"],
        some=largest[1],
        some_keys=largest[1].at["keys"],
        many=largest[-1],
        many_keys=largest[-1].at["keys"],
        share=shares[-1],
        smaller=smaller,
        larger=larger,
        gradient_keys=larger.at["keys"],
        first_dim=best[0].at["d_k"],
        last_dim=best[-1].at["d_k"],
        first_best=best[0],
        last_best=best[-1],
        least_cost=format_figure(min(cost.value for cost in costs)),
        most_cost=format_figure(max(cost.value for cost in costs)),
        short=lengths[0],
        short_length=lengths[0].at["length"],
        long=lengths[-1],
        long_length=lengths[-1].at["length"],
        first_end=ends[0],
        last_end=ends[-1],
    )


CLAIM = Claim(
    id="optimal-interval",
    group="saturation",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\sigma_{\text{best}} = \text{arg max}_\sigma \Vert \mathrm{diag}(p) - p\,p^\top \Vert, \qquad "
    r"p = \mathrm{softmax}(\sigma z), \quad z \sim N(0, 1)^n",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        **FULL_GRID,
        "judged_sigma": 1.0,
        "keys": (8, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        "blocks": 8,
        "rows": 100,
        "lengths": (16, 64, 256),
    },
    quick={**QUICK_GRID, "keys": (8, 32, 256), "rows": 60, "lengths": (32,)},
    flipped={"judged_sigma": 16.0, "dims": (64,), "rates": (1e-2,)},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.few", keys=KEYS_NEAR_BEST),
            (Expect("best_over_judged", 1 / SIGMA_ROOM, SIGMA_ROOM, {"by": "jacobian", "number": "few"}),),
        ),
        ClaimPart(
            WORDS("part.many"),
            (Expect("best_over_judged", 1 / SIGMA_ROOM, SIGMA_ROOM, {"by": "jacobian", "number": "many"}),),
        ),
        ClaimPart(WORDS("part.loss"), (Expect("best_over_judged", 1 / SIGMA_ROOM, SIGMA_ROOM, {"by": "loss"}),)),
        ClaimPart(WORDS("part.trained"), (Expect("best_over_judged", 1 / SIGMA_ROOM, SIGMA_ROOM, {"by": "trained"}),)),
    ),
    why=why,
    condition=WORDS("condition"),
)
