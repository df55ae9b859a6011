"""fp16-overflow: whether the scale keeps half precision from overflowing, depending on where it is applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab._rows import factor
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figures, Plot, series_over
from sqrtdk.lab.intervals import mean, proportion
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.theory import largest_finite, spacing
from sqrtdk.theory.ranges import RANGE_DTYPES

WORDS = words_of(__name__)

D_K, LENGTH = 64, 64
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _on_query(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax((query * scale) @ key.mT, -1) @ value


def _on_product(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.softmax((query @ key.mT) * scale, -1) @ value


def _in_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Torch's fused kernel: products are summed, scaled and exponentiated in float32, and never stored."""
    result = attention(query, key, value, scale=scale, impl="fused")
    assert isinstance(result, Tensor)
    return result


ATTEND_BY_SCALE_PLACE: dict[str, Attend] = {"query": _on_query, "product": _on_product, "kernel": _in_kernel}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Share of calls whose output is not finite, with and without the scale, at three places."""
    dtype = RANGE_DTYPES[run["dtype"]]
    query, key, value = _inputs(run, dtype)
    largest = (query.double() @ key.double().mT).abs().flatten(1).amax(-1)
    scaled = factor("sqrt_dk", D_K) * largest
    figures = [
        mean("largest_product", largest, scale="none"),
        mean("largest_product", scaled, scale="sqrt_dk"),
        mean("step_of_a_stored_logit_nats", [spacing(float(logit), dtype) for logit in scaled]),
    ]
    for place, attend in ATTEND_BY_SCALE_PLACE.items():
        for scale in ("none", "sqrt_dk"):
            output = attend(query, key, value, factor(scale, D_K))
            bad = int((~output.isfinite()).flatten(1).any(-1).sum())
            figures.append(proportion("calls_not_finite", bad, run["calls"], place=place, scale=scale))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _inputs(run: ExperimentRun, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gaussian q, k, v (calls, 1, length, d_k); one channel of q and k is an outlier, as in trained models."""
    rng = run.generator("inputs")
    query, key, value = (torch.randn(run["calls"], 1, LENGTH, D_K, generator=rng) for _ in range(3))
    query[..., 0] += run["outlier"]
    key[..., 0] += run["outlier"]
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "places",
        WORDS("plot.places"),
        "place of the scale",
        "share of calls not finite",
        tuple(
            series_over(label, figures.all("calls_not_finite", scale=scale), "place", style="bars")
            for label, scale in (("unscaled", "none"), ("scaled", "sqrt_dk"))
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    product, scaled = (figures("largest_product", scale=scale) for scale in ("none", "sqrt_dk"))
    shares = {
        place: [figures("calls_not_finite", place=place, scale=scale).value for scale in ("none", "sqrt_dk")]
        for place in ATTEND_BY_SCALE_PLACE
    }
    step = figures("step_of_a_stored_logit_nats")
    limit = largest_finite(torch.float16)
    return WORDS(
        "why",
        limit=f"{limit:.0f}",
        product=product,
        scaled=scaled,
        query_bare=f"{shares['query'][0]:.0%}",
        query_scaled=f"{shares['query'][1]:.0%}",
        product_scaled=f"{shares['product'][1]:.0%}",
        kernel_bare=f"{shares['kernel'][0]:.0%}",
        step=step,
    )


def _part(place: str) -> ClaimPart:
    """The scale prevents overflow: without it calls fail, with it none does."""
    return ClaimPart(
        WORDS(f"part.{place}"),
        (
            Expect("calls_not_finite", low=0.9, at={"place": place, "scale": "none"}),
            Expect("calls_not_finite", high=0.1, at={"place": place, "scale": "sqrt_dk"}),
        ),
    )


CLAIM = Claim(
    id="fp16-overflow",
    group="precision",
    sources=("S2", "S3"),
    statement=WORDS("statement"),
    formula=r"\left|\sum_i (s\,q_i)\,k_i\right| \le 65504, \qquad s \cdot \left|\sum_i q_i k_i\right|, "
    r"\; \left|\sum_i q_i k_i\right| > 65504",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"calls": 200, "outlier": 300.0, "dtype": "float16"},
    quick={"calls": 80},
    flipped={"dtype": "bfloat16"},
    measure=measure,
    parts=(
        _part("query"),
        _part("product"),
        _part("kernel"),
    ),
    why=why,
    condition=WORDS("condition"),
)
