"""The metrics for loggers at a sampled step: a few numbers per site, and the worst of each over the whole model.

The records in a run's folder have every head; a logger gets one number for all heads, by the table here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sqrtdk.monitor.samples import CallSample, StepSample

PREFIX = "attention"
WORST = "worst"  # stands in place of the site in metrics of the whole model


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that loggers receive for every attention.

    Batches are the forward passes of a step, ranks those of its process group. The rows of all batches and ranks are
    pooled before anything is divided, so both are reduced in the same way as rows.

    Attributes:
        name: last part of the metric's name.
        columns: columns of the records that are added up for it.
        unit: of the number.
        rows: how the rows of a head, of all batches and ranks, become one number.
        heads: how heads become one: "max", "min" or "sum"; "same": a property of the call, equal for all heads.
        worst: how sites become one: "max", "min" or "sum"; None: the metric exists only for sites.
        meaning: in one sentence.
        signed: whether it can be below 0.
        scaled: whether the scale is in it; None: it does not measure logits.
        after_bias: whether bias and softcap are in it; None: it does not measure logits.
    """

    name: str
    columns: tuple[str, ...]
    unit: str
    rows: str
    heads: str
    worst: str | None
    meaning: str
    signed: bool = False
    scaled: bool | None = None
    after_bias: bool | None = None


def _of_logits(name: str, column: str, unit: str, rows: str, heads: str, meaning: str, signed: bool = False) -> Metric:
    return Metric(name, (column,), unit, rows, heads, heads, meaning, signed, scaled=True, after_bias=True)


METRICS = (
    _of_logits(
        "max_attention_logit", "max_logit", "logits", "max", "max", "largest logit of a visible key", signed=True
    ),
    _of_logits("max_row_offset", "row_offset", "logits", "max", "max", "largest absolute mean logit of a row"),
    _of_logits(
        "max_std_logit", "std_logit", "logits", "root of the mean variance", "max", "spread of the logits within a row"
    ),
    _of_logits("min_entropy_nats", "entropy_nats", "nats", "mean", "min", "entropy of the weights"),
    _of_logits(
        "min_entropy_fraction",
        "entropy_fraction",
        "1",
        "mean over rows of two keys or more",
        "min",
        "entropy / log(visible keys)",
    ),
    _of_logits("min_effective_keys", "effective_keys", "keys", "mean", "min", "1 / sum p^2"),
    _of_logits(
        "max_saturated_fraction",
        "saturated",
        "1",
        "fraction of the rows of two keys or more",
        "max",
        "rows whose largest weight is above .99",
    ),
    Metric(
        "max_product",
        ("max_product",),
        "products",
        "max",
        "max",
        "max",
        "largest |q . k| of a visible key before any scale, that of q and k included",
        scaled=False,
        after_bias=False,
    ),
    Metric(
        "max_query_grad", ("query_grad_max",), "loss per unit of q", "max", "max", "max", "root mean square of dL/dq"
    ),
    Metric("max_key_grad", ("key_grad_max",), "loss per unit of k", "max", "max", "max", "root mean square of dL/dk"),
    Metric(
        "nonfinite_rows",
        ("nan_rows", "inf_rows"),
        "rows",
        "sum",
        "sum",
        "sum",
        "rows with a NaN or plus infinite logit, or with minus infinite ones alone",
    ),
    Metric(
        "nonfinite_grads",
        ("query_grad_nonfinite", "key_grad_nonfinite"),
        "rows",
        "sum",
        "sum",
        "sum",
        "rows of dL/dq, and keys of dL/dk of each head of q, that hold NaN or infinity",
    ),
    Metric("blind_rows", ("blind_rows",), "rows", "sum", "sum", "sum", "rows that see no key"),
    Metric(
        "scale_ratio",
        (),
        "1",
        "same",
        "same",
        None,
        "effective scale times sqrt(head dimension); 1 is the textbook value",
        signed=True,
    ),
)
_REDUCTION_BY_NAME: Mapping[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "sum": math.fsum}


def metrics_of(sample: StepSample) -> dict[str, float]:
    """Return the metrics of a sampled step, by name: `attention/<site>/<metric>`, and `attention/worst/<metric>`.

    The site is the module path, "model" for the model itself; the second and later attentions of one site are
    `<site>.call1` and so on. Unmeasured values have no entry; an infinite value stays infinite.

    Args:
        sample: of the step.

    Returns:
        In the order of the sites, then of `METRICS`; last `attention/calls`, the number of attentions with statistics,
        and `attention/not_measured`, the number of entries that could not be measured.

    Example:
        >>> call = CallSample("block.0", 0, 2, {"max_logit": [3.0, 5.0], "entropy_nats": [1.5, 0.5]}, 1.0, "")
        >>> for name, value in metrics_of(StepSample(1, (call,))).items():
        ...     print(name, value)
        attention/block.0/max_attention_logit 5.0
        attention/block.0/min_entropy_nats 0.5
        attention/block.0/scale_ratio 1.0
        attention/worst/max_attention_logit 5.0
        attention/worst/min_entropy_nats 0.5
        attention/calls 1.0
        attention/not_measured 0.0
    """
    measured = sample.measured
    sites = {_label(call): {metric.name: _value(metric, call) for metric in METRICS} for call in measured}
    worst = {metric.name: _reduced(metric.worst, (site[metric.name] for site in sites.values())) for metric in METRICS}
    found = {
        f"{PREFIX}/{place}/{name}": value
        for place, values in [*sites.items(), (WORST, worst)]
        for name, value in values.items()
        if value is not None
    }
    return found | {f"{PREFIX}/calls": float(len(measured)), f"{PREFIX}/not_measured": float(sample.unmeasured)}


def _label(call: CallSample) -> str:
    return (call.site or "model") + (f".call{call.index}" if call.index else "")


def _value(metric: Metric, call: CallSample) -> float | None:
    if metric.heads == "same":
        return call.scale_ratio
    columns = [call.columns.get(name, ()) for name in metric.columns]
    if not all(columns):
        return None
    return _reduced(metric.heads, (math.fsum(of_head) for of_head in zip(*columns, strict=True)))


def _reduced(how: str | None, values: Iterable[float | None]) -> float | None:
    """Reduce several numbers to one; unmeasured numbers are left out."""
    there = [value for value in values if value is not None and not math.isnan(value)]
    return None if how is None or not there else float(_REDUCTION_BY_NAME[how](there))
