"""softmax-overflow: whether unscaled logits at d_k = 64 leave the floating range in the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.theory.ranges import RANGE_DTYPES
from sqrtdk_lab._rows import factor, products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean, proportion
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K, KEYS = 64, 512


def _as_written(logits: Tensor) -> Tensor:
    powers = logits.exp()
    return powers / powers.sum(-1, keepdim=True)


def _less_maximum(logits: Tensor) -> Tensor:
    return _as_written(logits - logits.amax(-1, keepdim=True))


SOFTMAX_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "as written": _as_written,
    "less maximum": _less_maximum,
    "torch": lambda logits: torch.softmax(logits, -1),
}
NARROW_DTYPES = ("float16", "bfloat16", "float32")


def measure(run: ExperimentRun) -> ExperimentResult:
    """Share of rows whose weights are not finite, and of weights that become 0, by softmax and dtype."""
    product = products(run.generator("rows"), draws=run["rows"], keys=KEYS, d_k=D_K)[:, 0]
    logits = (factor(run["scale"], D_K) * product).float()
    figures = [mean("largest_logit", logits.amax(-1))]
    for dtype in NARROW_DTYPES:
        stored = logits.to(RANGE_DTYPES[dtype])
        for softmax, function in SOFTMAX_BY_NAME.items():
            weights, place = function(stored), {"softmax": softmax, "dtype": dtype}
            bad = int((~weights.isfinite()).any(-1).sum())
            figures.append(proportion("rows_not_finite", bad, run["rows"], **place))
            if softmax == "torch":
                figures.append(mean("weights_that_become_0", (weights == 0).double().mean(-1), **place))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _plot(figures: Figures) -> Plot:
    return Plot(
        "rows",
        WORDS("plot.rows"),
        "dtype of logits and softmax",
        "share of rows not finite",
        tuple(
            series_over(name, figures.all("rows_not_finite", softmax=name), "dtype", style="bars")
            for name in SOFTMAX_BY_NAME
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    largest = figures("largest_logit")
    ends = {name: f"{math.log(torch.finfo(RANGE_DTYPES[name]).max):.1f}" for name in NARROW_DTYPES}
    half, wide = (figures("rows_not_finite", softmax="as written", dtype=name) for name in ("float16", "float32"))
    safe = figures("rows_not_finite", softmax="torch", dtype="float16")
    lost, kept = (figures("weights_that_become_0", dtype=name, softmax="torch") for name in ("float16", "float32"))
    return WORDS(
        "why",
        keys=KEYS,
        largest=largest,
        end_fp16=ends["float16"],
        end_fp32=ends["float32"],
        half=half,
        wide=wide,
        safe=safe,
        lost=lost,
        kept=kept,
    )


def _part(name: str, softmax: str, dtype: str) -> ClaimPart:
    return ClaimPart(
        WORDS(f"part.{name}"), (Expect("rows_not_finite", low=0.01, at={"softmax": softmax, "dtype": dtype}),)
    )


CLAIM = Claim(
    id="softmax-overflow",
    group="precision",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"e^z \le 65504 \Leftrightarrow z \le 11.09, \qquad "
    r"\frac{e^{z_i}}{\sum_j e^{z_j}} = \frac{e^{z_i - m}}{\sum_j e^{z_j - m}}, \; m = \max_j z_j",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"rows": 4000, "scale": "none"},
    quick={"rows": 800},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        _part("written_fp16", "as written", "float16"),
        _part("written_bf16", "as written", "bfloat16"),
        _part("written_fp32", "as written", "float32"),
        _part("less_maximum_fp16", "less maximum", "float16"),
        _part("torch_fp16", "torch", "float16"),
    ),
    why=why,
    condition=WORDS("condition"),
)
