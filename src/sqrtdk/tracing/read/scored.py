"""Reading an attention whose score is no product of q and k: additive, or a distance."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.tracing.classify.scores import score_of
from sqrtdk.tracing.read.chain import Chain
from sqrtdk.tracing.read.orient import Orientation
from sqrtdk.tracing.read.reading import Layout, Logits, Reading
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.steps import Scale, Sink, Step
from sqrtdk.tracing.watch.events import Weighing


def read_scored(weighing: Weighing, chain: Chain, value: Tensor, output: Tensor) -> Reading:
    """The steps from the score, where the `chain` ends, to the softmax; there is no scale to judge."""
    assert chain.product is not None
    name = score_of(chain.product)
    steps = _signed(chain.steps) if name == "distance" else chain.steps
    logits = weighing.logits.movedim(weighing.dim, -1)
    dims = logits.dim()
    axes = Orientation(weighing.dim, dims - 2, swapped=False, followed=True)
    single = dims == 2 and value.dim() == 3 and value.shape[0] == logits.shape[0]  # (B, S): one query each
    layout = Layout(
        batch=logits.shape[0],
        heads=math.prod(logits.shape[1:-2]) if dims >= 4 else 1,
        rows=1 if single or dims < 2 else logits.shape[-2],
        columns=logits.shape[-1],
        width=0,
        value_width=value.shape[-1],
    )
    why = f"the score is no product of q and k: {name}"
    return Reading(
        site=weighing.entry.site,
        kind="eager",
        op=weighing.op,
        layout=layout,
        query=Side(None, None, (Stage("logits", "score", name or ""),)),
        key=Side(None, None),
        steps=(*steps, *((Sink(column=False),) if weighing.sinks else ())),
        operands=Logits(weighing.logits, weighing.weights, chain.product, chain.views, axes, layout),
        dtype=value.dtype,
        logits_dtype=logits.dtype,
        device=logits.device,
        output=output,
        dropout=weighing.dropout,
        carried=weighing.carried,
        score=name,
        # of two axes the first may be the batch or the queries
        fault=why if dims < 3 or weighing.fault is not None else None,
        no_slope=why,
    )


def _signed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of -|q - k|^2: the minus belongs to the score."""
    first = steps[0] if steps else None
    if isinstance(first, Scale) and first.factor.value == -1.0:
        return steps[1:]
    return (Scale(Factor(-1.0, "logits", "number")), *steps)
