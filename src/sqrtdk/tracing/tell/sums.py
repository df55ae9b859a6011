"""What the softmax takes beside the keys, and what its exponentials add up to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.tracing.read.masks import BOTTOM
from sqrtdk.tracing.read.reading import Logits, Reading, Vectors
from sqrtdk.tracing.steps import Offset
from sqrtdk.tracing.tell.sight import Sight


def at_logits(reading: Reading, placed: object) -> Tensor:
    """(B, H, L, S) of what met the logits at a step."""
    assert isinstance(reading.operands, (Logits, Vectors))
    return reading.operands.at_logits(placed)  # type: ignore[arg-type]


def sinks_of(reading: Reading, sight: Sight, sinks: Tensor | None) -> Tensor | None:
    """(Hq,), one logit a head, from what the softmax kept from the keys."""
    if isinstance(reading.operands, Vectors):
        return None if sinks is None else sinks.detach().reshape(-1).to(torch.float64, copy=True)
    logits = reading.operands
    if not isinstance(logits, Logits):
        return None
    layout = reading.layout
    whole = logits.axes.apply(logits.values)
    beside = [at for at in (0, whole.shape[-1] - 1) if not 0 <= at - logits.first < layout.columns]
    if beside:
        sinks = layout.by_head(whole[..., beside[0] : beside[0] + 1]).to(torch.float64)[..., 0]
        offset = _offset(reading)
        if offset is None:
            return None
        sinks = sinks - offset
    else:
        weights = logits.arrange(logits.weights).to(torch.float64)
        whole_logits = logits.arrange(logits.values).to(torch.float64)
        if sight.visible is not None:
            whole_logits = whole_logits.masked_fill(~sight.visible, -math.inf)
        rest = 1.0 - weights.sum(-1)
        sinks = whole_logits.logsumexp(-1) + torch.log(rest.clamp_min(1e-300) / weights.sum(-1))
    flat = sinks.transpose(0, 1).flatten(1)
    middle = flat.nanmedian(1).values
    # what is told of a column of its own is rounded twice: as it is stored, and with the row's maximum taken off
    stored = 2 * torch.finfo(logits.values.dtype).eps if beside else 0.0
    size = (flat.abs() + middle[:, None].abs()).nan_to_num() + (flat - middle[:, None]).abs().nan_to_num()
    largest = whole.detach().abs().to(torch.float64)
    largest = torch.where(largest < -BOTTOM, largest, 0.0).max() if beside else torch.zeros(())
    even = (flat - middle[:, None]).abs().nan_to_num() <= 1e-3 + stored * (size + largest)
    return middle if bool(even.all()) else None


def _offset(reading: Reading) -> Tensor | float | None:
    """(B, H, L), what was added to whole rows before the softmax; None where it is not known."""
    offsets = [step for step in reading.steps if isinstance(step, Offset)]
    if any(step.addend is None for step in offsets):
        return None
    return sum((at_logits(reading, step.addend).to(torch.float64)[..., 0] for step in offsets), 0.0)


def lse_of(reading: Reading, sight: Sight, lse: Tensor | None) -> Tensor | None:
    """Log of the sum of exponentials over the keys, sinks aside; minus infinity where a row sees none."""
    layout = reading.layout
    if lse is not None:
        lse = lse.detach().clone().reshape(layout.batch, layout.heads, layout.rows)
        if sight.visible is None:
            return lse
        seeing = sight.visible.any(-1).expand(lse.shape)
        return lse.masked_fill(~seeing, -math.inf)
    if not isinstance(reading.operands, Logits):
        return None
    if any(isinstance(step, Offset) for step in reading.steps):
        return None
    return reading.operands.arrange(reading.operands.values).to(torch.float64).logsumexp(-1).to(torch.float32)
