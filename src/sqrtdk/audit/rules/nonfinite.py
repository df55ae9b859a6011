"""NaN or infinite parameters, and rows of logits that hold NaN or plus infinity: the model is sick.

Formula: count of parameters that are not finite, and of rows that are not. Threshold: 0 (no finite answer follows).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sqrtdk.audit.context import Context, folded
from sqrtdk.audit.records import Finding

SOURCE = "IEEE 754: NaN propagates through the softmax to the whole row"


def check(context: Context) -> Iterable[Finding]:
    """One finding for the parameters, one for each kind of site with rows that are not finite."""
    sick = [
        name
        for name, parameter in context.model.named_parameters()
        if not parameter.is_meta and parameter.is_floating_point() and not bool(torch.isfinite(parameter).all())
    ]
    if sick:
        yield Finding(
            rule="nonfinite",
            severity="critical",
            site=sick[0].rpartition(".")[0],
            value=float(len(sick)),
            threshold=0.0,
            message=f"{len(sick)} parameters hold NaN or infinity, first {sick[0]}",
            fix="go back to a checkpoint whose weights are finite",
            source=SOURCE,
        )
    rows = [(j, True) for j in context.calls if j.call.stats is not None and sum(j.call.stats.nan_rows) > 0]
    for judged, _, more in folded(rows):
        stats = judged.call.stats
        assert stats is not None
        yield Finding(
            rule="nonfinite",
            severity="critical",
            site=judged.call.site,
            value=float(sum(stats.nan_rows)),
            threshold=0.0,
            message=f"{sum(stats.nan_rows)} of {stats.rows * stats.heads} rows have a NaN or infinite logit{more}",
            fix="find the first layer with such a row: an overflow in q . k, or non-finite weights or inputs",
            source=SOURCE,
        )
