"""Whether kept tensors give the output that was recorded: some rows, computed again; a reading that does not is none.

Rounding is allowed for generously: it is a wrong layout, or a step that was overlooked, that must not pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.tracing.read.masks import BOTTOM
from sqrtdk.tracing.tensors import CallTensors

DOUBT = "computed again, its tensors don't give its output"
_ROWS = 8
_FLOOR = 2.0**-8  # of what the values add up to, beside rounding
_STEPS = 16.0  # roundings of a logit


def proven(call: CallTensors) -> bool:
    """Whether some of the rows come out as they were; True as well where rounding alone may make them anything."""
    rows = torch.linspace(0, call.output.shape[2] - 1, min(_ROWS, call.output.shape[2])).long()
    rows = rows.to(call.output.device)
    heads = call.output.shape[1]
    query = call.query.values[:, :, rows].to(torch.float64)
    key, value = (
        x.values.to(torch.float64).repeat_interleave(heads // x.values.shape[1], 1) for x in (call.key, call.value)
    )
    logits, sizes, sinks = query @ key.mT, query.abs() @ key.abs().mT, None
    visible = torch.ones_like(logits, dtype=torch.bool)
    for term in call.terms or ():
        by = _of_rows(term.value, rows, call.output.shape[2])
        if term.name == "sinks" and isinstance(by, Tensor):
            sinks = by[:, None, None].expand(*logits.shape[:-1], 1)
        elif term.name == "mask" and isinstance(by, Tensor):
            visible = visible & by.bool()
            logits = torch.where(by.bool(), logits, logits + term.fill if term.added else term.fill)
        elif term.name == "scale" and by is not None:
            logits, sizes = logits * by, sizes * _size(by)
        elif term.name == "bias" and by is not None:
            logits, sizes = logits + by, sizes + _size(by)
        elif term.name == "softcap" and isinstance(by, float):
            logits = by * (logits / by).tanh()
    seeing = (visible & (logits > BOTTOM)).any(-1)
    whole = logits if sinks is None else torch.cat([logits, sinks], -1)
    weights = whole.softmax(-1)[..., : logits.shape[-1]].nan_to_num()
    if call.kept is not None:
        kept = _of_rows(call.kept, rows, call.output.shape[2])
        assert kept is not None
        weights = weights * kept / (1.0 - call.dropout)
    unit = max(torch.finfo(getattr(torch, name)).eps for name in (call.logits_dtype, call.weights_dtype, call.dtype))
    allowed = _FLOOR + torch.expm1(_STEPS * unit * sizes.amax(-1, keepdim=True)) + _STEPS * unit
    gap = (weights @ value - call.output[:, :, rows].to(torch.float64)).abs()
    # a bias of minus infinity, or numbers that are none, leave nothing to judge
    judged = seeing[..., None] & allowed.isfinite() & gap.isfinite()
    return not bool((judged & (gap > allowed * (weights.abs() @ value.abs()))).any())


def _size(value: Tensor | float) -> Tensor | float:
    return value.abs() if isinstance(value, Tensor) else abs(value)


def _of_rows(value: Tensor | float | None, rows: Tensor, length: int) -> Tensor | float | None:
    """The rows of what broadcasts to (B, Hq, L, S)."""
    if not isinstance(value, Tensor):
        return value if value is None or math.isfinite(value) else float(value)
    if value.dim() > 1 and value.shape[-2] == length != 1:
        value = value[..., rows, :]
    return value if value.dtype == torch.bool else value.to(torch.float64)
