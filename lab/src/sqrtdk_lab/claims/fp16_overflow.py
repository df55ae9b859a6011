"""fp16-overflow: whether the scale keeps half precision from overflowing, depending on where it is applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.messages import Text
from sqrtdk.theory import largest_finite, spacing
from sqrtdk.theory.ranges import RANGE_DTYPES
from sqrtdk_lab._rows import factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Place, Plot, series_over
from sqrtdk_lab.intervals import largest_draw, mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

LENGTH, D_V = 64, 64
# Our addition: a channel of this size in q and in k, so that products leave fp16 and scaled ones do not. Channels of
# trained models can be that much larger than the rest; the sources' components are N(0, 1).
OUTLIER_INPUTS = ("outlier", 64, 300.0)
NORMAL = "N(0,1)"
SAVES = 0.1  # share of the calls; fewer than one in ten would go unseen in a run of this size
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
    figures = []
    for inputs, d_k, outlier in (OUTLIER_INPUTS, *((NORMAL, d_k, 0.0) for d_k in run["dims"])):
        query, key, value = _inputs(run, dtype, d_k, outlier)
        largest = (query.double() @ key.double().mT).abs().flatten(1).amax(-1)
        scaled = factor("sqrt_dk", d_k) * largest
        at: dict[str, Place] = {"inputs": inputs, "d_k": d_k}
        figures += [
            mean("largest_product", largest, **at, scale="none"),
            mean("largest_product", scaled, **at, scale="sqrt_dk"),
            largest_draw("largest_product_of_all_calls", largest, **at),
            mean("step_of_a_stored_logit_nats", [spacing(float(logit), dtype) for logit in scaled], **at),
        ]
        for place in ATTEND_BY_SCALE_PLACE if outlier else ("query",):
            attend = ATTEND_BY_SCALE_PLACE[place]
            bad = {
                scale: (~attend(query, key, value, factor(scale, d_k)).isfinite()).flatten(1).any(-1)
                for scale in ("none", "sqrt_dk")
            }
            for scale, calls in bad.items():
                figures.append(
                    proportion("calls_not_finite", int(calls.sum()), run["calls"], **at, place=place, scale=scale)
                )
            saved = int((bad["none"] & ~bad["sqrt_dk"]).sum())
            figures.append(proportion("calls_saved", saved, run["calls"], **at, place=place))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _inputs(run: ExperimentRun, dtype: torch.dtype, d_k: int, outlier: float) -> tuple[Tensor, ...]:
    """Gaussian q, k (calls, 1, length, d_k) and v (calls, 1, length, d_v); channel 0 of q and k has `outlier` added."""
    rng = run.generator("inputs", d_k, outlier)
    query, key, value = (torch.randn(run["calls"], 1, LENGTH, width, generator=rng) for width in (d_k, d_k, D_V))
    query[..., 0] += outlier
    key[..., 0] += outlier
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "places",
        WORDS("plot.places"),
        "place of the scale",
        "share of calls not finite",
        tuple(
            series_over(
                label, figures.all("calls_not_finite", inputs=OUTLIER_INPUTS[0], scale=scale), "place", style="bars"
            )
            for label, scale in (("unscaled", "none"), ("scaled", "sqrt_dk"))
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    name = OUTLIER_INPUTS[0]
    product, scaled = (figures("largest_product", inputs=name, scale=scale) for scale in ("none", "sqrt_dk"))
    shares = {
        place: [
            figures("calls_not_finite", inputs=name, place=place, scale=scale).value for scale in ("none", "sqrt_dk")
        ]
        for place in ATTEND_BY_SCALE_PLACE
    }
    step = figures("step_of_a_stored_logit_nats", inputs=name)
    limit = largest_finite(torch.float16)
    normal = figures.all("largest_product_of_all_calls", inputs=NORMAL)
    bad = [figure.value for figure in figures.all("calls_not_finite", inputs=NORMAL, scale="none")]
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
        outlier=f"{OUTLIER_INPUTS[2]:g}",
        small_dim=normal[0].at["d_k"],
        small=normal[0],
        large_dim=normal[-1].at["d_k"],
        large=normal[-1],
        normal_bare=f"{max(bad):.0%}",
    )


def _part(name: str, place: str, inputs: str = OUTLIER_INPUTS[0]) -> ClaimPart:
    """Calls that fail without the scale and not with it."""
    return ClaimPart(WORDS(f"part.{name}"), (Expect("calls_saved", low=SAVES, at={"place": place, "inputs": inputs}),))


CLAIM = Claim(
    id="fp16-overflow",
    group="precision",
    sources=("S2", "S3"),
    statement=WORDS("statement"),
    formula=r"\left|\sum_i (s\,q_i)\,k_i\right| \le 65504, \qquad s \cdot \left|\sum_i q_i k_i\right|, "
    r"\; \left|\sum_i q_i k_i\right| > 65504",
    method=WORDS("method", outlier=f"{OUTLIER_INPUTS[2]:g}", saves=f"{SAVES:.0%}"),
    control=WORDS("control"),
    parameters={"calls": 200, "dims": (256, 4096), "dtype": "float16"},
    quick={"calls": 80, "dims": (256, 1024)},
    flipped={"dtype": "bfloat16"},
    measure=measure,
    parts=(
        *(_part(place, place) for place in ATTEND_BY_SCALE_PLACE),
        _part("normal", "query", NORMAL),
    ),
    why=why,
    condition=WORDS("condition"),
)
