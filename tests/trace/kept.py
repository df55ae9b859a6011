"""The law of the tensors that a trace keeps: computed again in float64 they give what the model gave.

`unlike(call)` lists where a call breaks it. What is allowed is the worst case of the rounding, first step to last: sums
of n terms are off by n + 2 units of the accumulator, each operation on the logits by one unit of their dtype, of the
sum of the sizes that went in; a weight by the exponential of that, and so on. Nothing in it is tuned.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.infer.fit import fit_norm, fit_rotation
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector
from sqrtdk.tracing.trace import Trace

FEW_BITS = 2.0**-13  # what torch's kernel of half precision leaves an exponential: it takes one of few terms
EXPONENTIALS = 16  # units in the last place that exp, log and tanh of a vector library may be off, all together


def unit(name: str) -> float:
    """The largest relative error of one rounding to a dtype."""
    return float(torch.finfo(getattr(torch, name)).eps) / 2


def accumulator(name: str) -> float:
    """The same of the sums that a dtype is added up in."""
    return unit("float64" if name == "float64" else "float32")


def check(run: Trace, *, missing: int = 0) -> None:
    """Every call of a trace holds the law, but for so many that say why they can't be computed."""
    assert len(run.tensors) == len(run.calls) > 0
    assert [call.call for call in run.tensors] == list(run.calls)
    assert [call.missing for call in run.tensors if call.missing][missing:] == []
    assert sum(call.missing is not None for call in run.tensors) == missing
    assert [(call.site, fault) for call in run.tensors for fault in unlike(call)] == []


def unlike(call: CallTensors) -> list[str]:
    """What of a call is not what its tensors give."""
    if call.missing is not None:
        return [] if len(call.missing) > 5 else ["no reason"]
    ways = {"query": call.query, "key": call.key, "value": call.value}
    faults = [f"{name}: {fault}" for name, vector in ways.items() for fault in way_faults(vector)]
    return [*shape_faults(call), *output_faults(call), *faults]


# -- from the product to the output ------------------------------------------------------------------------------------


def shape_faults(call: CallTensors) -> list[str]:
    """Sizes that don't fit together, and that are not those of the record."""
    q, k, v, output = call.query.values, call.key.values, call.value.values, call.output
    record = call.call
    assert record is not None
    batch, heads, rows, width = q.shape
    told = (record.batch, record.heads, record.query_len, record.padded_head_dim)
    fits = output.shape == (batch, heads, rows, v.shape[-1]) and k.shape[0] == v.shape[0] == batch
    fits = fits and k.shape[2] == v.shape[2] == record.key_len and k.shape[-1] == width
    fits = fits and heads % k.shape[1] == 0 and heads % v.shape[1] == 0 and told == tuple(q.shape)
    return [] if fits else [f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, {tuple(output.shape)}"]


def spread(values: Tensor, heads: int) -> Tensor:
    """(B, H, ...) to (B, heads, ...)."""
    return values.double().repeat_interleave(heads // values.shape[1], 1)


def output_faults(call: CallTensors) -> list[str]:
    """An output, or sums of exponentials, that the terms don't give."""
    q = call.query.values.double()
    k, v = spread(call.key.values, q.shape[1]), spread(call.value.values, q.shape[1])
    least = accumulator(call.dtype)
    logits, sizes = q @ k.mT, q.abs() @ k.abs().mT
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    sinks: Tensor | None = None
    step = max(unit(call.logits_dtype), least)
    error = sizes * ((q.shape[-1] + 2) * least + step)
    for term in call.terms or ():
        if term.name == "sinks":
            assert isinstance(term.value, Tensor)
            sinks = term.value.double()[:, None, None].expand(*logits.shape[:-1], 1)
            continue
        logits, error, hidden = after(term, logits, error, hidden, step)
    if sinks is not None:
        logits = torch.cat([sinks, logits], -1)
        error = torch.cat([sinks.abs() * step + EXPONENTIALS * 64 * least, error], -1)
        hidden = torch.cat([torch.zeros_like(sinks, dtype=torch.bool), hidden], -1)
    seeing = (~hidden[..., 1 if sinks is not None else 0 :]).any(-1) & (logits > -math.inf).any(-1)
    error = torch.where(logits == -math.inf, 0.0, error) + EXPONENTIALS * least
    if call.lse is not None and call.dtype in ("bfloat16", "float16"):
        error = error + FEW_BITS
    weights = logits.softmax(-1).nan_to_num()
    whole = (weights * error.expm1()).sum(-1, keepdim=True)
    off = weights * (error + whole.log1p()).expm1()
    if sinks is not None:
        weights, off = weights[..., 1:], off[..., 1:]
    step = max(unit(call.weights_dtype), unit(call.dtype))
    off = off * (1 + step) + weights * step + torch.finfo(getattr(torch, call.weights_dtype)).tiny
    if call.kept is not None:
        gain = 1 / (1 - call.dropout)
        kept = call.kept * gain * (1 + 0 * weights)
        weights, off = weights * kept, off * kept + weights * kept * 2 * step
    output = weights @ v
    bound = (
        off @ v.abs()
        + (v.shape[2] + 2) * least * (weights @ v.abs())
        + unit(str(call.output.dtype)[6:]) * 4 * (output.abs() + weights @ v.abs() * (call.dtype != "float64"))
    )
    bound = bound + torch.finfo(call.output.dtype).tiny
    gap = (call.output.double() - output).abs()
    bad = ((gap > bound) | gap.isnan()) & seeing[..., None]
    faults = []
    if not bool(seeing.any()):
        faults.append("no row sees a key")
    if bool(bad.any()):
        faults.append(f"output off by {float(gap[bad].max()):.2e}, allowed {float(bound[bad].min()):.2e}")
    if call.lse is not None and bool(seeing.any()):
        of_keys = logits if sinks is None else logits[..., 1:]
        sums = of_keys.logsumexp(-1)
        allowed = error.max(-1).values + (4 * unit("float32") + least) * (sums.abs() + 1)
        beyond = ((call.lse.double() - sums).abs() > allowed) & seeing
        if bool(beyond.any()):
            faults.append(f"lse off by {float((call.lse.double() - sums).abs()[beyond].max()):.2e}")
    return faults


def after(term: Term, logits: Tensor, error: Tensor, hidden: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits after a term, how far they may be off, and which are hidden."""
    value = term.value
    assert value is not None
    if term.name == "scale":
        logits, error = logits * value, error * abs(value)
    elif term.name == "softcap":
        assert isinstance(value, float)
        logits = (logits if term.detail else value) * (logits / value).tanh()
        error = error + logits.abs() * 3 * step
    elif term.name == "bias":
        logits = logits + value
        error = error + (abs(value) if isinstance(value, float) else value.double().abs()) * step
    elif term.name == "mask":
        assert isinstance(value, Tensor)
        lowered = logits + term.fill if term.added else torch.full_like(logits, term.fill)
        logits = torch.where(value, logits, lowered)
        hidden = hidden | ~value
    else:
        raise AssertionError(term.name)
    return logits, error + logits.abs().nan_to_num(posinf=0.0) * step, hidden


# -- from the projection to the product --------------------------------------------------------------------------------


def way_faults(vector: Vector) -> list[str]:
    """Steps that don't lead from the projection to what met in the product."""
    faults = []
    before = vector.projected
    if before is None:
        return ["steps from nowhere"] if vector.steps or vector.projection else []
    if vector.projection is not None:
        faults += projection_faults(vector.projection, before)
    for step in vector.steps:
        if step.values is None:
            return faults
        if step.values.shape != vector.values.shape:
            faults.append(f"{step.name} of shape {tuple(step.values.shape)}")
        elif not step_fits(step.name, step.detail, before, step.values):
            faults.append(f"{step.name} {step.detail} does not fit the values around it")
        before = step.values
    expected = before.double() * vector.factor
    units = sum(max(unit(str(x.dtype)[6:]), unit("float32")) for x in (before, vector.values)) * 2
    if vector.values.dtype == torch.float64:
        units = 4 * unit("float64")
    if bool(((vector.values.double() - expected).abs() > 4 * units * expected.abs() + 1e-37).any()):
        faults.append(f"the last step and the factor {vector.factor} don't give the values")
    return faults


def step_fits(name: str, detail: str, before: Tensor, values: Tensor) -> bool:
    """Whether a step of a name can make the values of those before."""
    if name == "norm":
        return fit_norm(before, values, detail, dtype=values.dtype) is not None
    if name == "rope":
        return fit_rotation(before, values, dtype=values.dtype) is not None
    return name != "rounded" or torch.equal(before.to(getattr(torch, detail)).to(values.dtype), values)


def projection_faults(projection: Projection, projected: Tensor) -> list[str]:
    """A projection whose input and weight don't give what it gave."""
    if projection.weight is None:
        return []
    x, weight = projection.input.double(), projection.weight.double()
    bias = torch.zeros(weight.shape[:2]) if projection.bias is None else projection.bias
    bias = bias.double()[:, None]
    expected = torch.einsum("bld,hed->bhle", x, weight) + bias
    if expected.shape != projected.shape:
        return [f"projected {tuple(projected.shape)}, by its weight {tuple(expected.shape)}"]
    sizes = torch.einsum("bld,hed->bhle", x.abs(), weight.abs()) + bias.abs()
    name = str(projected.dtype)[6:]
    coarsest = max(unit(str(t.dtype)[6:]) for t in (projection.input, projection.weight, projected))
    bound = sizes * ((x.shape[-1] + 2) * accumulator(name) + 2 * coarsest) + 1e-37
    gap = (projected.double() - expected).abs()
    return [f"projected off by {float(gap.max()):.2e}"] if bool((gap > bound).any()) else []


def known(call: CallTensors) -> dict[str, str]:
    """How much of the way of q, k and v is known: "projection", "projected", "steps" or "values"."""

    def of(vector: Vector) -> str:
        if vector.projected is None:
            return "values"
        whole = all(step.values is not None for step in vector.steps)
        told = "projection" if vector.projection is not None and vector.projection.weight is not None else "projected"
        return told if whole else f"{told}, lost"

    return {"query": of(call.query), "key": of(call.key), "value": of(call.value)}


def changed(call: CallTensors, **parts: object) -> CallTensors:
    """The call with something else in it."""
    return replace(call, **parts)  # type: ignore[arg-type]
