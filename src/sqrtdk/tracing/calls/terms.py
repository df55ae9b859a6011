"""Collects the terms between product and softmax and the log-sum-exp of a call, and proves that they are right.

`is_proven` computes some rows of a call again from the kept tensors. If a layout was read wrongly or a step was missed,
the result differs from the recorded output by more than rounding can explain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.calls.places import ValueOperands
from sqrtdk.tracing.calls.visible_keys import VisibleKeys, visible_by
from sqrtdk.tracing.readback.addends import BOTTOM
from sqrtdk.tracing.readback.reading import Logits, Reading, Vectors
from sqrtdk.tracing.records import BY_ROW, IN_BLOCKS
from sqrtdk.tracing.steps import (
    Beside,
    Bias,
    Blocks,
    Clamp,
    Hide,
    LearnedSinks,
    Mix,
    Offset,
    Scale,
    Softcap,
    Squares,
    Step,
    Unknown,
)
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.graph import distinct
from sqrtdk.tracing.tensors import CallTensors, Term

_STEP_NAMES: dict[type[Step], str] = {
    Squares: "trace.step.squared_length",
    Clamp: "trace.step.clamp",
    Mix: "trace.step.mixing",
    Beside: "trace.step.several_products",
}
_RECOMPUTED_ROWS = 8  # rows that are computed again
_EXPONENTIALS = 16.0  # roundings that exp, log and tanh of a vector library may be off, all together
_FEW_BITS = 2.0**-13  # error of the exponential in torch's half-precision kernels, which use a short polynomial
_ROUNDING_SLACK = 4.0  # factor on the derived rounding, for the order of sums and for operations that a compiler fuses
_TF32 = 2.0**-11  # unit roundoff of TF32


def terms_of(reading: Reading, visible_keys: VisibleKeys, used: ValueOperands) -> tuple[Term, ...]:
    """Return the terms between the product of q and k and the softmax, in the order in which they are applied.

    The value of a term is None if it is unknown.

    Args:
        reading: what was read of the attention.
        visible_keys: its combined masks, with the steps on the logits.
        used: the operands of the product of weights and values.
    """
    terms = (_term(step, reading, visible_keys, used) for step in visible_keys.steps)
    return tuple(term for term in terms if term is not None)


def _term(step: Step, reading: Reading, visible_keys: VisibleKeys, used: ValueOperands) -> Term | None:
    # A row's maximum cancels in the softmax, and a mask without a name hides nothing.
    if isinstance(step, (Blocks, Offset)) or (isinstance(step, Hide) and step.name is None):
        return None
    if isinstance(step, Scale):
        return Term("scale", _factor(step, reading), step.factor.source)
    if isinstance(step, Softcap):
        return Term("softcap", step.cap, step.detail)
    if isinstance(step, Bias):
        added = None if step.addend is None else _at_logits(reading, step.addend)
        if added is not None and not added.is_floating_point():  # `q @ k.mT + mask` of a bool mask adds 0 and 1
            added = added.to(torch.float32)
        return Term("bias", None if added is None else _small(added), step.name)
    if isinstance(step, Hide):
        visible = visible_by(step, reading)
        fill = -math.inf if step.fill is None else step.fill
        return Term("mask", None if visible is None else _small(visible), step.name or "", fill, step.form == "float")
    if isinstance(step, LearnedSinks):
        return Term("sinks", _sinks(reading, visible_keys, used), "sinks")
    if isinstance(step, Unknown):
        return Term("unknown", None, step.name)
    known = _STEP_NAMES.get(type(step))
    return Term("unknown", None, type(step).__name__.lower() if known is None else Message(known))


def _factor(step: Scale, reading: Reading) -> Tensor | float | None:
    """Return a factor as one number, one per head as (Hq, 1, 1), or one per row; None if unknown."""
    factor, operands = step.factor, reading.operands
    if factor.per_head is not None:
        return torch.tensor(factor.per_head, dtype=torch.float64)[:, None, None]
    if factor.value is None and factor.source == BY_ROW and isinstance(operands, Vectors):
        return operands.scale.detach().clone() if isinstance(operands.scale, Tensor) else operands.scale
    if factor.value is None and step.by is not None:
        by = _small(_at_logits(reading, step.by))
        return by[..., :1].clone() if bool((by == by[..., :1]).all()) else by
    return factor.value


def _at_logits(reading: Reading, placed: StepTensor) -> Tensor:
    """Return the tensor of a step in the layout of the logits, (B, H, L, S)."""
    assert isinstance(reading.operands, (Logits, Vectors))
    return reading.operands.at_logits(placed)


def _small(tensor: Tensor) -> Tensor:
    """Return a copy with size 1 on each axis along which the tensor only repeats."""
    tensor = distinct(tensor.detach())
    for axis in range(tensor.dim() - 2):
        if tensor.shape[axis] > 1 and bool((tensor == tensor.narrow(axis, 0, 1)).all()):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.clone()


def _sinks(reading: Reading, visible_keys: VisibleKeys, used: ValueOperands) -> Tensor | None:
    """Return the sinks, (Hq,), one logit per head: the median of the values seen in the rows, or None if unknown."""
    logits, layout = reading.operands, reading.layout
    if not isinstance(logits, Logits):
        sinks = None if used.kernel is None else used.kernel.arguments.get("sinks")
        return None if sinks is None else sinks.detach().reshape(-1).to(torch.float64, copy=True)
    whole = logits.axes.apply(logits.values)
    beside = [at for at in (0, whole.shape[-1] - 1) if not 0 <= at - logits.first < layout.columns]
    if beside:  # z = cat([logits, sinks], -1); (z - z.amax(-1, keepdim=True)).softmax(-1): read from the column
        sinks = layout.by_head(whole[..., beside[0] : beside[0] + 1]).to(torch.float64)[..., 0]
        for step in reading.steps:
            if isinstance(step, Offset):
                if step.addend is None:
                    return None
                sinks = sinks - _at_logits(reading, step.addend).to(torch.float64)[..., 0]
    else:  # exp(z) / (exp(z).sum(-1, keepdim=True) + exp(sinks)): read from the weight that the keys lack
        weights = logits.arrange(logits.weights).to(torch.float64)
        of_keys = logits.arrange(logits.values).to(torch.float64)
        if visible_keys.visible is not None:
            of_keys = of_keys.masked_fill(~visible_keys.visible, -math.inf)
        met = weights.sum(-1)
        sinks = of_keys.logsumexp(-1) + torch.log((1.0 - met).clamp_min(1e-300) / met)
    return sinks.transpose(0, 1).flatten(1).nanmedian(1).values


def lse_of(reading: Reading, visible_keys: VisibleKeys, used: ValueOperands) -> Tensor | None:
    """Return log(sum(exp(logits))) of each row over its keys, without learned sinks.

    Args:
        reading: what was read of the attention.
        visible_keys: its combined masks.
        used: the operands of the product of weights and values.

    Returns:
        (B, Hq, L), minus infinity for a row that sees no key. From logits it is computed in float64 and returned in
        float32; a kernel's own is returned if it has one without sinks. None if neither is known.
    """
    layout, logits, kernel = reading.layout, reading.operands, used.kernel
    # The sums of a kernel with sinks include theirs, which can't be subtracted exactly.
    if kernel is not None and kernel.lse is not None and kernel.arguments.get("sinks") is None:
        lse = kernel.lse.detach().clone().reshape(layout.batch, layout.heads, layout.rows)
        return (
            lse
            if visible_keys.visible is None
            else lse.masked_fill(~visible_keys.visible.any(-1).expand(lse.shape), -math.inf)
        )
    if not isinstance(logits, Logits) or any(isinstance(step, Offset) for step in reading.steps):
        return None
    return logits.arrange(logits.values).to(torch.float64).logsumexp(-1).to(torch.float32)


# -- the proof ---------------------------------------------------------------------------------------------------------


def is_proven(call: CallTensors) -> bool:
    """Return whether some rows of the output, computed again from the kept tensors, agree with it within rounding.

    The allowed difference is derived from the dtypes. Rows for which it is infinite are not judged.
    """
    length = call.output.shape[2]
    rows = torch.linspace(0, length - 1, min(_RECOMPUTED_ROWS, length)).long().to(call.output.device)
    heads, width = call.output.shape[1], call.query.values.shape[-1]
    query = call.query.values[:, :, rows].to(torch.float64)
    key, value = (
        x.values.to(torch.float64).repeat_interleave(heads // x.values.shape[1], 1) for x in (call.key, call.value)
    )
    least = _unit("float32")  # for float64 as well, because transformers computes its softmax in float32
    if query.is_cuda and call.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        least = _TF32
    step = max(_unit(call.logits_dtype), least)
    logits, sizes, sinks = query @ key.mT, query.abs() @ key.abs().mT, None
    visible = torch.ones_like(logits, dtype=torch.bool)
    error = sizes * ((width + 2) * least + step)  # largest rounding error of each logit
    for term in call.terms or ():
        by = _of_rows(term.value, rows, length)
        if term.name == "sinks" and isinstance(by, Tensor):
            sinks = by[:, None, None].expand(*logits.shape[:-1], 1)
        elif term.name == "mask" and isinstance(by, Tensor):
            visible = visible & by.bool()
            logits = torch.where(by.bool(), logits, logits + term.fill if term.added else term.fill)
        elif term.name == "scale" and by is not None:
            logits, error = logits * by, error * _size(by)
        elif term.name == "bias" and by is not None:
            logits, error = logits + by, error + _size(by) * step
        elif term.name == "softcap" and isinstance(by, float):
            bent = (logits / by).tanh()
            # The slope of z * tanh(z / c) is at most 1.2, and that of c * tanh(z / c) at most 1.
            logits, error = (logits * bent, 1.2 * error) if term.detail else (by * bent, error)
            error = error + logits.abs() * 3 * step
        error = error + logits.abs().nan_to_num(posinf=0.0) * step
    seeing = (visible & (logits > BOTTOM)).any(-1)
    if sinks is not None:
        logits = torch.cat([logits, sinks], -1)
        error = torch.cat([error, sinks.abs() * step + 4 * _EXPONENTIALS * least], -1)
    error = _ROUNDING_SLACK * torch.where(logits <= BOTTOM, 0.0, error) + _EXPONENTIALS * least
    error = error + (_FEW_BITS if call.dtype in ("bfloat16", "float16") else 0.0)
    weights = logits.softmax(-1).nan_to_num()
    # An error e of the logits changes a weight by a factor of at most exp(e), and its row's sum by the weighted mean.
    off = weights * (error + (weights * error.expm1()).sum(-1, keepdim=True).log1p()).expm1()
    weights, off = weights[..., : key.shape[2]], off[..., : key.shape[2]]
    if call.kept is not None:
        dropout_mask = _of_rows(call.kept, rows, length)
        assert dropout_mask is not None
        weights, off = weights * dropout_mask / (1.0 - call.dropout), off * dropout_mask / (1.0 - call.dropout)
    rounded = (key.shape[2] + 2) * least + 4 * max(
        _unit(name) for name in (call.weights_dtype, call.dtype, str(call.output.dtype).removeprefix("torch."))
    )
    allowed = (off + _ROUNDING_SLACK * rounded * weights) @ value.abs() + torch.finfo(call.output.dtype).tiny
    gap = (weights @ value - call.output[:, :, rows].to(torch.float64)).abs()
    # A bias of minus infinity, or NaN in the tensors, leaves nothing to judge.
    judged = seeing[..., None] & allowed.isfinite() & gap.isfinite()
    if bool((judged & (gap > allowed)).any()):
        return False
    # e @ v / (e.sum(-1, keepdim=True) + 1): all of a row is too small by one factor, which half precision may hide.
    right, made = (x.masked_fill(~judged, 0.0) for x in (weights @ value, call.output[:, :, rows].to(torch.float64)))
    size = float((right * right).sum())  # 0 where no row sees a key
    short = float((right * made).sum()) / size - 1 if size else 0.0
    return call.call is None or call.call.op != IN_BLOCKS or abs(short) <= 4 * max(_unit(call.dtype), least)


def _size(value: Tensor | float) -> Tensor | float:
    return value.abs() if isinstance(value, Tensor) else abs(value)


def _unit(dtype: str) -> float:
    """Return the largest relative error of one rounding."""
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


def _of_rows(value: Tensor | float | None, rows: Tensor, length: int) -> Tensor | float | None:
    """Return the selected rows of a value that broadcasts to (B, Hq, L, S)."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1 and value.shape[-2] == length != 1:
        value = value[..., rows, :]
    return value if value.dtype == torch.bool else value.to(torch.float64)
