"""robust: do noise, or another learning rate, cost a model with the scale less than one without it?"""

from __future__ import annotations

from collections.abc import Callable

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, TASK_TEXTS, Arm, list_figures, train_arms
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.training.train import NOISE_ON_INPUTS, NOISE_ON_WEIGHTS
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

BETTER = 0.4  # nats a symbol; the losses of the unscaled arm differ by as much from seed to seed


def _noise_cost(kind: str) -> Callable[[Arm], list[float]]:
    return lambda arm: [arm.results[rate][seed]["noise_costs"][kind] for seed, rate in enumerate(arm.chosen)]


def _rate_cost(arm: Arm) -> list[float]:
    """Return what another learning rate adds to the loss of each seed: mean of the next smaller and the next larger."""
    rates = list(arm.results)
    best = rates.index(arm.rate)
    beside = [arm.losses(rates[i]) for i in (best - 1, best + 1) if 0 <= i < len(rates)]
    means = [sum(losses) / len(losses) for losses in zip(*beside, strict=True)]
    return [near - least for near, least in zip(means, arm.losses(arm.rate), strict=True)]


NOISES = ("inputs", "weights")
COSTS: dict[str, Callable[[Arm], list[float]]] = {
    "inputs": _noise_cost("inputs"),
    "weights": _noise_cost("weights"),
    "rate": _rate_cost,
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """What each disturbance adds to the held-out loss, without and with the scale."""
    figures: list[Figure] = []
    for task in run["tasks"]:
        scales = {"unscaled": run["unscaled"], "scaled": run["scaled"]}
        arms: dict[str, Arm] = train_arms(
            run, {case: {"task": task, "head_dim": run["d_k"], "scale": scale} for case, scale in scales.items()}
        )
        at: dict[str, Place] = {"task": task, "d_k": run["d_k"]}
        for case, arm in arms.items():
            figures.append(geometric_mean("held_out_loss_nats", arm.best, case=case, **at))
        for kind in NOISES:
            noisy = {
                case: [a + b for a, b in zip(arm.best, COSTS[kind](arm), strict=True)] for case, arm in arms.items()
            }
            gaps = [a - b for a, b in zip(noisy["unscaled"], noisy["scaled"], strict=True)]
            figures.append(mean(f"{kind}_noisy_gap_nats", gaps, **at))
        for kind, cost in COSTS.items():
            costs = {case: cost(arm) for case, arm in arms.items()}
            figures += [mean("cost_nats", values, kind=kind, case=case, **at) for case, values in costs.items()]
            pairs = list(zip(costs["unscaled"], costs["scaled"], strict=True))
            figures.append(mean(f"{kind}_saving_nats", [a - b for a, b in pairs], **at))
    return ExperimentResult(figures, tuple(_plot(Figures(figures), task, run["d_k"]) for task in run["tasks"]))


def _plot(figures: Figures, task: str, d_k: int) -> Plot:
    return Plot(
        f"costs-{task}",
        WORDS("plot.costs", task=TASK_TEXTS[task], d_k=d_k),
        "disturbance",
        "added loss, nats a symbol",
        tuple(
            series_over(case, figures.all("cost_nats", task=task, case=case), "kind", style="bars")
            for case in ("unscaled", "scaled")
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    found = {
        f"{case}_{kind}": list_figures(figures.all("cost_nats", case=case, kind=kind))
        for case in ("unscaled", "scaled")
        for kind in COSTS
    }
    noisy = {f"noisy_{kind}": list_figures(figures.all(f"{kind}_noisy_gap_nats")) for kind in NOISES}
    losses = {
        f"{case}_loss": list_figures(figures.all("held_out_loss_nats", case=case)) for case in ("unscaled", "scaled")
    }
    return WORDS("why", **found, **losses, **noisy)


def _part(kind: str, figure: str) -> ClaimPart:
    return ClaimPart(
        WORDS(f"part.{kind}_{figure}"), (Expect(f"{kind}_{figure}_nats", low=BETTER, at={"task": "strings"}),)
    )


CLAIM = Claim(
    id="robust",
    group="gradients",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"\Delta L = L(x + \epsilon) - L(x), \quad L(W + \epsilon) - L(W), \quad L(3^{\pm 1} \eta) - L(\eta)",
    method=WORDS("method", better=BETTER, inputs=NOISE_ON_INPUTS, weights=NOISE_ON_WEIGHTS),
    control=WORDS("control"),
    parameters={**FULL_TRAINING, "tasks": ("text", "strings"), "d_k": 64, "unscaled": "none", "scaled": "sqrt_dk"},
    quick={**QUICK, "tasks": ("strings",)},
    flipped={"unscaled": "dk"},
    measure=measure,
    parts=(
        *(_part(kind, figure) for figure in ("noisy_gap", "saving") for kind in NOISES),
        ClaimPart(WORDS("part.other"), reason=WORDS("reason.other")),
    ),
    why=why,
)
