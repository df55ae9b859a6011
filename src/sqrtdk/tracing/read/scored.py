"""Reading an attention whose score is additive: no product of q and k."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.tracing.read.chain import Chain
from sqrtdk.tracing.read.orient import Orientation
from sqrtdk.tracing.read.reading import Layout, Logits, Reading
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps import Sink
from sqrtdk.tracing.watch.marks import Weighing

ADDITIVE = "additive"


def read_scored(weighing: Weighing, chain: Chain, value: Tensor, output: Tensor) -> Reading:
    """The steps from the score, where the `chain` ends, to the softmax; there is no scale to judge."""
    assert chain.product is not None
    logits = weighing.logits.movedim(weighing.dim, -1)
    dims = logits.dim()
    axes = Orientation(weighing.dim, (dims - 2,) if dims > 1 else (), swapped=False, followed=True)
    odd = dims < 3 or (dims > 4 and logits.shape[-2] == 1)  # of two axes the first may be the batch or the queries
    if dims == 2 and value.dim() > 2:
        logits = logits.unsqueeze(-2)  # a query for each sequence
    elif odd and dims > 4:
        logits = logits.squeeze(-2)  # the axis that held one number a pair
    layout = Layout(
        batch=logits.shape[0] if logits.dim() > 2 else 1,
        heads=math.prod(logits.shape[1:-2]),
        rows=logits.shape[-2] if logits.dim() > 1 else 1,
        columns=logits.shape[-1],
        width=0,
        value_width=value.shape[-1],
    )
    why = f"the score is no product of q and k: {ADDITIVE}"
    return Reading(
        site=weighing.entry.site,
        kind="eager",
        op=weighing.op,
        layout=layout,
        query=Side(None, None, (Stage("logits", "score", ADDITIVE),)),
        key=Side(None, None),
        steps=(*chain.steps, *((Sink(column=False),) if weighing.sinks else ())),
        operands=Logits(weighing.logits, weighing.weights, chain.product, chain.views, axes, layout),
        dtype=value.dtype,
        logits_dtype=logits.dtype,
        device=logits.device,
        output=output,
        dropout=weighing.dropout,
        carried=weighing.carried,
        score=ADDITIVE,
        fault=why if odd or weighing.fault is not None else None,
        no_slope=why,
    )
