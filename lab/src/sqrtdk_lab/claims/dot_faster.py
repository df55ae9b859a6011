"""dot-faster: time and memory of dot-product attention beside additive attention."""

from __future__ import annotations

from functools import partial

import torch

from sqrtdk.messages import Text
from sqrtdk.nn import AdditiveAttention, ScaledDotProductAttention
from sqrtdk_lab._costs import peak_bytes, time_ratio
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Time and peak memory of the dot product's attention over those of the additive one."""
    figures = []
    for d_k in run["dims"]:
        rng, hidden = run.generator("inputs", d_k), run["hidden"] or d_k
        query, key, value = (torch.randn(1, 1, run["length"], d_k, generator=rng) for _ in range(3))
        for impl in ("dense", "auto"):
            dot = ScaledDotProductAttention(d_k, impl=impl)
            additive = AdditiveAttention(d_k, hidden=hidden, impl=impl)
            calls = [partial(module, query, key, value) for module in (dot, additive)]
            place = {"d_k": d_k, "impl": impl}
            peaks = [peak_bytes(call) for call in calls]
            figures += [
                time_ratio("time_over_additive", *calls, blocks=run["blocks"], calls=run["calls"], **place),
                exact("peak_memory_over_additive", peaks[0] / peaks[1], **place),
            ]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "ratios",
        WORDS("plot.ratios"),
        "$d_k$",
        "dot product over additive",
        tuple(
            series_over(f"{label}, {impl}", figures.all(name, impl=impl), "d_k")
            for label, name in (("time", "time_over_additive"), ("memory", "peak_memory_over_additive"))
            for impl in ("dense", "auto")
        ),
        x_axis="log",
        y_axis="log",
        lines=(("equal", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    d_k = max(int(figure.at["d_k"]) for figure in figures)
    times = [figures("time_over_additive", d_k=d_k, impl=impl) for impl in ("dense", "auto")]
    peaks = [figures("peak_memory_over_additive", d_k=d_k, impl=impl) for impl in ("dense", "auto")]
    return WORDS("why", d_k=d_k, dense_time=times[0], dense_memory=peaks[0], best_time=times[1], best_memory=peaks[1])


CLAIM = Claim(
    id="dot-faster",
    group="precision",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\#(q \cdot k) = L S\,d_k, \qquad \#(v^\top \tanh(W_q q + W_k k)) = L S\,A",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 128), "hidden": None, "length": 384, "blocks": 8, "calls": 5},
    quick={"dims": (16, 64), "length": 192, "blocks": 5, "calls": 3},
    flipped={"dims": (1024,), "hidden": 1},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.faster"), (Expect("time_over_additive", high=0.8),)),
        ClaimPart(WORDS("part.leaner"), (Expect("peak_memory_over_additive", high=0.8),)),
    ),
    why=why,
    timed=True,
)
