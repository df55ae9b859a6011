"""v-scaling: a factor on the values instead of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.messages import Text
from sqrtdk.stats.request import AuxOutput, AuxRequest
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import bootstrap, largest_draw, mean, ratio_of_means
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

FIGURE_FIELDS = {"peak": "peak", "entropy": "entropy_nats", "jacobian_norm": "jacobian_norm"}
ROW_STATISTICS = AuxRequest(**dict.fromkeys(FIGURE_FIELDS.values(), True))


def measure(run: ExperimentRun) -> ExperimentResult:
    """The same rows without any factor, and with 1/sqrt(d_k) on the values or on the logits."""
    figures = []
    for d_k in run["dims"]:
        rng = run.generator("rows", d_k)
        query, key, value, upstream = (
            torch.randn(run["rows"], 1, n, d_k, generator=rng, dtype=torch.float64)
            for n in (1, run["keys"], run["keys"], 1)
        )
        factors = {"nothing": 1.0, run["on"]: d_k**-0.5}
        found = {}
        for on in ("nothing", run["on"]):
            of_logits, of_values = (factors[on] if on == place else 1.0 for place in ("logits", "values"))
            found[on] = _rows(query, key, value * of_values, upstream, of_logits)
        (plain, plain_gradient), (changed, gradient) = found["nothing"], found[run["on"]]
        for name, field in FIGURE_FIELDS.items():
            before, after = (getattr(rows, field).detach().flatten() for rows in (plain, changed))
            figures += [mean(name, before, d_k=d_k, factor="none"), mean(name, after, d_k=d_k, factor="1/sqrt(d_k)")]
            figures.append(largest_draw(f"largest_change_of_{name}", (after - before).abs(), d_k=d_k))
        pair = (gradient * d_k**0.5, plain_gradient)
        figures.append(bootstrap("gradient_of_q_ratio_times_root_d_k", pair, ratio_of_means, seed=run.seed, d_k=d_k))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _rows(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, scale: float) -> tuple[AuxOutput, Tensor]:
    query = query.clone().requires_grad_()
    out, rows = attention(query, key, value, scale=scale, return_aux=ROW_STATISTICS)
    (gradient,) = torch.autograd.grad((out * upstream).sum(), query)
    return rows, gradient.norm(dim=-1).flatten()


def _plot(figures: Figures) -> Plot:
    labels = {"none": "no factor", "1/sqrt(d_k)": r"$1/\sqrt{d_k}$ on the values"}
    return Plot(
        "peak",
        WORDS("plot.peak"),
        "$d_k$",
        "largest weight",
        tuple(series_over(labels[name], figures.all("peak", factor=name), "d_k") for name in labels),
        x_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(figure.at["d_k"] for figure in figures.all("peak"))
    peak = figures("peak", d_k=d_k, factor="1/sqrt(d_k)")
    change = figures("largest_change_of_peak", d_k=d_k)
    ratio = figures("gradient_of_q_ratio_times_root_d_k", d_k=d_k)
    return WORDS("why", d_k=d_k, change=change, peak=peak, ratio=ratio)


CLAIM = Claim(
    id="v-scaling",
    group="saturation",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\mathrm{softmax}(Q K^{T}) \, (c V) = c \, \mathrm{softmax}(Q K^{T}) \, V, \qquad "
    r"\frac{\partial p}{\partial z} = \mathrm{diag}(p) - p p^{T}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 256, 512), "keys": 10, "rows": 4000, "on": "values"},
    quick={"dims": (64, 512), "rows": 600},
    flipped={"on": "logits"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.unchanged"),
            (
                Expect("largest_change_of_peak", high=1e-12),
                Expect("largest_change_of_entropy", high=1e-12),
                Expect("largest_change_of_jacobian_norm", high=1e-12),
            ),
        ),
        ClaimPart(
            WORDS("part.peak"),
            (Expect("peak", low=0.9, at={"d_k": 512, "factor": "1/sqrt(d_k)"}),),
        ),
    ),
    why=why,
)
