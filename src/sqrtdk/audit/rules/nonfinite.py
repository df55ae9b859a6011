"""NaN or infinite parameters, and rows of logits that hold NaN or plus infinity: the model is sick.

Formula: count of parameters that are not finite, and of rows that are not. Threshold: 0 (no finite answer follows).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding
from sqrtdk.errors import short_text
from sqrtdk.tracing.records import NotMeasured

SOURCE = "IEEE 754: NaN propagates through the softmax to the whole row"


def check(context: Context) -> Iterable[Finding | NotMeasured]:
    """One finding for the parameters, one for each call with rows that are not finite."""
    sick = []
    for name, parameter in context.model.named_parameters():
        if not parameter.is_meta and parameter.is_floating_point():
            try:
                sick += [] if _finite(parameter) else [name]
            except (RuntimeError, TypeError) as error:  # a kind of tensor that lacks the operation
                reason = f"nonfinite: {name} can't be looked at: {short_text(error, 120)}"
                yield NotMeasured(name.rpartition(".")[0], reason)
    if sick:
        yield Finding(
            rule="nonfinite",
            severity="critical",
            site=sick[0].rpartition(".")[0],
            value=float(len(sick)),
            threshold=0.0,
            message=f"parameter {sick[0]} holds NaN or infinity"
            if len(sick) == 1
            else f"{len(sick)} parameters hold NaN or infinity, first {sick[0]}",
            fix="go back to a checkpoint whose weights are finite",
            source=SOURCE,
        )
    for judged in context.calls:
        stats = judged.call.stats
        if stats is None or not any(stats.nan_rows):
            continue
        yield Finding(
            rule="nonfinite",
            severity="critical",
            site=judged.call.site,
            value=float(sum(stats.nan_rows)),
            threshold=0.0,
            message=f"{sum(stats.nan_rows)} of {stats.rows * stats.heads} rows have a NaN or infinite logit",
            fix="find the first layer with such a row: an overflow in q . k, or non-finite weights or inputs",
            source=SOURCE,
        )


def _finite(parameter: Tensor) -> bool:
    """Whether all numbers that a parameter stores are finite; a sparse one stores but some."""
    with torch.no_grad():
        values = parameter.detach()
        if values.layout is torch.sparse_coo:
            values = values._values()
        elif values.layout is not torch.strided:
            values = values.values()
        return bool(torch.isfinite(values.float() if values.dtype.itemsize == 1 else values).all())
