"""jacobian-vanishes: the derivative of softmax when one logit dominates."""

from __future__ import annotations

import math

import torch

from sqrtdk.messages import Text
from sqrtdk.stats import row_stats
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, series_over
from sqrtdk_lab.intervals import largest_draw, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Norm of the Jacobian of rows whose first logit leads the others by a given distance."""
    rng = run.generator("others")
    others = torch.randn(run["rows"], run["keys"] - 1, generator=rng, dtype=torch.float64)
    logs, figures = {}, []
    for lead in run["leads"]:
        top = others.amax(-1, keepdim=True) + run["dominance"] * lead
        logits = torch.cat([top, others], -1)
        norm = row_stats(logits).jacobian_norm
        logs[lead] = norm.log()
        figures += [
            mean("jacobian_norm", norm, lead_nats=lead),
            largest_draw("largest_error_against_autograd", _errors(logits[: run["checked"]], norm), lead_nats=lead),
        ]
    *_, before, last = run["leads"]
    figures.append(mean("slope_of_log_norm", (logs[last] - logs[before]) / (last - before)))
    return ExperimentResult(figures, (_plot(Figures(figures), run["leads"]),))


def _errors(logits: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Relative differences between the formula of the norm and autograd's Jacobian, one per row."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: z.softmax(-1)))(logits)
    found: torch.Tensor = jacobian.flatten(1).norm(dim=1)
    return (found / norm[: len(logits)] - 1.0).abs()


def _plot(figures: Figures, leads: tuple[float, ...]) -> Plot:
    return Plot(
        "norm",
        WORDS("plot.norm"),
        "lead of the largest logit, nats",
        r"$\Vert J \Vert_F$",
        (
            series_over("measured", figures.all("jacobian_norm"), "lead_nats", style="points"),
            curve_series(r"$e^{-\mathrm{lead}}$", leads, (math.exp(-lead) for lead in leads), style="dashed"),
        ),
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    near, *_, far = figures.all("jacobian_norm")
    slope = figures("slope_of_log_norm")
    return WORDS("why", near=near, far=far, lead=far.at["lead_nats"], slope=slope)


CLAIM = Claim(
    id="jacobian-vanishes",
    group="gradients",
    sources=("S0", "S1", "S3"),
    statement=WORDS("statement"),
    formula=r"J = \mathrm{diag}(p) - p\,p^\top, \qquad "
    r"\Vert J \Vert_F^2 = \sum_i p_i^2 - 2 \sum_i p_i^3 + \left( \sum_i p_i^2 \right)^2",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "rows": 4000,
        "keys": 16,
        "leads": (0, 1, 2, 4, 6, 8, 10, 15, 20),
        "dominance": 1.0,
        "checked": 50,
    },
    quick={"rows": 1000, "leads": (0, 5, 10, 20), "checked": 10},
    flipped={"dominance": 0.0},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.vanishes"),
            (
                Expect("jacobian_norm", high=1e-6, at={"lead_nats": 20}),
                Expect("slope_of_log_norm", low=-1.02, high=-0.98),
                Expect("largest_error_against_autograd", high=1e-6),
            ),
        ),
    ),
    why=why,
)
