"""free: the time and memory that the scale costs, depending on where it is applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.messages import Text
from sqrtdk_lab._costs import peak_bytes, time_ratio, typical
from sqrtdk_lab._rows import factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, series_over
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K = 64
LITTLE = 0.03  # of the attention's time
SCALE_PLACES = ("kernel", "query", "logits", "logits in place")
Inputs = tuple[Tensor, Tensor, Tensor]
Factor = Callable[[], float | Tensor]


def measure(run: ExperimentRun) -> ExperimentResult:
    """Time that the scale adds, and peak memory with it over that without it, for each place."""
    length, rng = run["length"], run.generator("inputs")
    query, key, value = (torch.randn(1, 1, length, D_K, generator=rng) for _ in range(3))
    constant = factor("sqrt_dk", D_K)
    scale: Factor = (lambda: _per_pair(constant, length)) if run["per_pair"] else lambda: constant
    figures = []
    for place in SCALE_PLACES:
        where = "logits" if run["per_pair"] else place  # neither the kernel nor the query can take a scale per pair
        bare = "kernel without" if where == "kernel" else "nowhere"
        own, other = (partial(_attend, (query, key, value), one, scale) for one in (where, bare))
        at: dict[str, Any] = {"blocks": run["blocks"], "calls": run["calls"], "place": place}
        if where == "kernel":
            added = _less_one(time_ratio("added_share_of_time", own, other, **at))
        else:
            added = typical("added_share_of_time", own, **at)
        figures += [added, exact("peak_memory_over_unscaled", peak_bytes(own) / peak_bytes(other), place=place)]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _per_pair(constant: float, length: int) -> Tensor:
    """A factor for each query and key, (length, length), that falls with their distance."""
    steps = torch.arange(length)
    return constant / (1.0 + (steps[:, None] - steps[None, :]).abs() / length)


def _attend(inputs: Inputs, place: str, scale: Factor) -> float:
    """Run attention; if in separate operations, return the time of the scaling over that of the others."""
    query, key, value = inputs
    if place.startswith("kernel"):
        attention(query, key, value, scale=1.0 if place == "kernel without" else scale(), impl="fused")
        return math.nan
    begin = time.thread_time()
    if place == "query":
        query = query * scale()
    ready = time.thread_time()
    logits = query @ key.mT
    del query
    stored = time.thread_time()
    if place == "logits":
        logits = logits * scale()
    elif place == "logits in place":
        logits.mul_(scale())
    scaled = time.thread_time()
    torch.softmax(logits, -1) @ value
    end = time.thread_time()
    step = (ready - begin) + (scaled - stored)
    return step / (end - begin - step)


def _less_one(ratio: Figure) -> Figure:
    return replace(ratio, value=ratio.value - 1.0, low=ratio.low - 1.0, high=ratio.high - 1.0)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "time",
        WORDS("plot.time"),
        "place of the scale",
        "added time, percent",
        (series_over("measured", figures.all("added_share_of_time"), "place", style="bars", factor=100.0),),
        lines=((f"{LITTLE:.0%}", 100.0 * LITTLE),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    kernel, query, logits, in_place = (figures("added_share_of_time", place=place) for place in SCALE_PLACES)
    seen = query.low > 0.0
    memory = figures("peak_memory_over_unscaled", place="logits")
    return WORDS(
        "why",
        kernel=kernel,
        query=query,
        seen=WORDS("measurable" if seen else "unmeasurable"),
        logits=logits,
        in_place=in_place,
        memory=memory,
    )


def _time(place: str) -> ClaimPart:
    text = WORDS(f"part.{place}", little=f"{LITTLE:.0%}")
    return ClaimPart(text, (Expect("added_share_of_time", high=LITTLE, at={"place": place}),))


CLAIM = Claim(
    id="free",
    group="precision",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\frac{L\,d_k}{2\,L\,S\,d_k} \ll 1, \qquad \mathrm{softmax}\left((s\,Q) K^\top\right) = "
    r"\mathrm{softmax}\left(s\,(Q K^\top)\right)",
    method=WORDS("method", little=f"{LITTLE:.0%}"),
    control=WORDS("control"),
    parameters={"length": 1024, "blocks": 20, "calls": 15, "per_pair": False},
    quick={"calls": 8},
    flipped={"per_pair": True, "blocks": 8, "calls": 2},  # far from the bar, so few calls suffice
    measure=measure,
    parts=(
        _time("kernel"),
        _time("query"),
        _time("logits"),
        ClaimPart(
            WORDS("part.memory"),
            (Expect("peak_memory_over_unscaled", high=1.01),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
    timed=True,
)
