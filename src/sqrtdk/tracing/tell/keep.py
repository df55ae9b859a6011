"""The tensors of an attention that was read, in one layout: what it takes to compute it again."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.errors import kind_and_text
from sqrtdk.tracing.read.patterns import distinct
from sqrtdk.tracing.read.reading import Logits, Reading, Vectors
from sqrtdk.tracing.records import ROWS, AttentionCall, Factor
from sqrtdk.tracing.steps import Beside, Bias, Clamp, Hide, Mix, Offset, Scale, Sink, Softcap, Squares, Step, Unknown
from sqrtdk.tracing.tell.held import held_in
from sqrtdk.tracing.tell.places import NO_OPERANDS, places_of, rows_of, sizes_of
from sqrtdk.tracing.tell.proof import DOUBT, proven
from sqrtdk.tracing.tell.sight import Sight, look, visible_by
from sqrtdk.tracing.tell.sums import at_logits, lse_of, sinks_of
from sqrtdk.tracing.tell.used import Used
from sqrtdk.tracing.tell.vectors import own, sharing, vector
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector
from sqrtdk.tracing.watch.marks import Carried

_EVEN = 0.02  # a factor on rounded weights that is the same for all
_ROUNDED = 2.0**-20  # a factor of float32 this near to 1 is 1
NATIVE = "one native operation computed it as a whole; torch.backends.mha.set_fastpath_enabled(False) shows its steps"
ENLARGED = "its q was enlarged"
BLOCKS_OF_KEYS = "it was computed in blocks of keys"


def without(call: AttentionCall, reason: str) -> CallTensors:
    """No tensors of a call, and why."""
    nothing = Vector(torch.zeros(0))
    return CallTensors(
        call.site, call.index, nothing, nothing, nothing, nothing.values, None, missing=reason, call=call
    )


def projections_of(kept: CallTensors) -> tuple[Projection | None, Projection | None]:
    """Where q and k come from: names of weights and numbers of features, and no tensor of the run."""

    def bare(one: Vector) -> Projection | None:
        if one.projection is None:
            return None
        return replace(one.projection, input=torch.zeros(0), weight=None, bias=None)

    return bare(kept.query), bare(kept.key)


def keep(reading: Reading, used: Used | None, call: AttentionCall) -> CallTensors:
    """The tensors of a reading; what can't be laid out or is not known is told in `missing`."""
    try:
        kept = _keep(reading, used, call)
        return kept if kept.missing is not None or proven(kept) else without(call, DOUBT)
    except Exception as error:  # what a stranger's layout brings about must not stop the model
        return without(call, f"its tensors could not be laid out: {kind_and_text(error)}")


def _keep(reading: Reading, used: Used | None, call: AttentionCall) -> CallTensors:
    dropped = None if used is None else _dropped(reading, used)
    if dropped is not None:
        reading = replace(reading, dropout=dropped, carried=Carried())
    fault = _fault(reading)
    if fault is not None or used is None:
        return without(call, fault or NO_OPERANDS)
    places = places_of(reading, used)
    if isinstance(places, str):
        return without(call, places)
    sight = look(reading, counts=False)
    query, key, value = sharing([vector(place) for place in places])
    if reading.kind == "sdpa" and isinstance(reading.operands, Logits):
        # torch's own decomposition multiplies q and k by a root of the scale each: `terms` have the whole of it
        root = math.sqrt(abs(next((s.factor.value or 1.0 for s in sight.steps if isinstance(s, Scale)), 1.0)))
        query, key = _unscaled(query, root), _unscaled(key, root)
    missing = _changed(reading)
    terms = _terms(reading, sight, used) if missing is None else None
    unknown = next((term for term in terms or () if term.value is None), None)
    if unknown is not None:
        missing = f"{unknown.name} {unknown.detail} is not known".replace("unknown ", "")
    assert reading.output is not None
    kept = None
    if reading.dropout and used.weights is not None:
        kept = (used.weights.reshape(sizes_of(reading)) != 0).detach()
    return CallTensors(
        site=call.site,
        index=call.index,
        query=query,
        key=key,
        value=value,
        output=own(rows_of(reading, used, reading.output), reading.output),
        terms=terms,
        lse=lse_of(reading, sight, used.lse),
        kept=kept,
        dropout=reading.dropout,
        dtype=call.dtype,
        logits_dtype=_dtype_of_logits(reading, call),
        weights_dtype=call.dtype if used.weights is None else _dtype_of_weights(reading, used.weights),
        missing=missing,
        call=call,
    )


def _dropped(reading: Reading, used: Used) -> float | None:
    """The rate at which weights were set to 0 before they met v, the others being enlarged; None where it is not so."""
    carried = reading.carried
    if not (carried.changes or carried.remasked or carried.thinned) or used.weights is None:
        return None
    if not isinstance(reading.operands, Logits) or reading.dropout:
        return None
    weights = reading.operands.arrange(reading.operands.weights).to(torch.float64)
    met = used.weights.reshape(weights.shape).to(torch.float64)
    kept = (met != 0) & (weights != 0)
    by = (met / weights)[kept]
    if not by.numel() or bool((met != 0).sum() != kept.sum()):
        return None
    rate = 1.0 - 1.0 / float(by.median())
    even = bool(((by * (1.0 - rate) - 1.0).abs() <= _EVEN).all())
    return rate if even and 0.0 < rate < 1.0 else None


def _unscaled(vector: Vector, root: float) -> Vector:
    values = (vector.values.to(torch.float64) / root).to(vector.values.dtype)
    factor = vector.factor / root
    plain = vector.projected is None or (isinstance(factor, float) and abs(factor - 1) <= _ROUNDED)
    return replace(vector, values=values, factor=1.0 if plain else factor)


def _changed(reading: Reading) -> str | None:
    """What the weights went through between the softmax and v, where that can't be computed again."""
    carried = reading.carried
    names = [*carried.changes, *(stage.detail or stage.name for stage in carried.stages)]
    if names or carried.remasked or carried.thinned or carried.combined:
        return f"its weights went through {', '.join(names) or 'a second mask'} after the softmax"
    return None


def _dtype_of_logits(reading: Reading, call: AttentionCall) -> str:
    logits = reading.operands
    return held_in(logits.values, call.logits_dtype) if isinstance(logits, Logits) else call.logits_dtype


def _dtype_of_weights(reading: Reading, met: Tensor) -> str:
    name = str(met.dtype).removeprefix("torch.")
    logits = reading.operands
    return held_in(met, held_in(logits.weights, name) if isinstance(logits, Logits) else name)


def _fault(reading: Reading) -> str | None:
    """Why it can't be computed again."""
    if reading.without_data:
        return "no data on the meta device"
    if reading.fault is not None:
        return reading.fault
    if reading.score is not None or reading.distance is not None:
        return "its score is no product of q and k"
    if reading.axis != "positions":
        return f"its keys are {reading.axis}"
    if reading.kind == "native":
        return NATIVE  # its output is that of the output projection
    if not isinstance(reading.operands, (Logits, Vectors)) or reading.output is None:
        return NO_OPERANDS
    if reading.blocks:
        return BLOCKS_OF_KEYS
    return None


# -- from the product to the softmax -----------------------------------------------------------------------------------


def _terms(reading: Reading, sight: Sight, used: Used) -> tuple[Term, ...]:
    terms = [_term(step, reading, sight, used) for step in sight.steps]
    return tuple(term for term in terms if term is not None)


def _term(step: Step, reading: Reading, sight: Sight, used: Used) -> Term | None:
    if isinstance(step, Scale):
        by = _factor(step.factor, reading)
        if by is None and step.by is not None:
            by = _small(at_logits(reading, step.by))
            by = by[..., :1].clone() if bool((by == by[..., :1]).all()) else by  # one a row
        return Term("scale", by, step.factor.source)
    if isinstance(step, Softcap):
        return Term("softcap", step.cap)
    if isinstance(step, Squares):
        return Term("unknown", None, "a squared length")
    if isinstance(step, Bias):
        return Term(
            "bias", None if step.addend is None else _small(_numbers(at_logits(reading, step.addend))), step.name
        )
    if isinstance(step, Hide):
        if step.name is None:
            return None
        visible = visible_by(step, reading)
        fill = -math.inf if step.fill is None else step.fill
        return Term("mask", None if visible is None else _small(visible), step.name, fill, step.form == "float")
    if isinstance(step, Sink):
        return Term("sinks", sinks_of(reading, sight, used.sinks), "sinks")
    if isinstance(step, Offset):
        return None
    if isinstance(step, Unknown):
        return Term("unknown", None, step.name)
    names = {Clamp: "a clamp", Mix: "a mixing of the heads", Beside: "logits of several products"}
    return Term("unknown", None, names.get(type(step), type(step).__name__.lower()))


def _factor(factor: Factor, reading: Reading) -> Tensor | float | None:
    """The number, one a head as (Hq, 1, 1), or one a row."""
    if factor.per_head is not None:
        return torch.tensor(factor.per_head, dtype=torch.float64)[:, None, None]
    if factor.value is None and factor.source == ROWS and isinstance(reading.operands, Vectors):
        scale = reading.operands.scale
        return scale.detach().clone() if isinstance(scale, Tensor) else scale
    return factor.value


def _numbers(addend: Tensor) -> Tensor:
    """What is added to logits as they take it: `q @ k.mT + mask` of a bool mask adds 0 and 1."""
    return addend if addend.is_floating_point() else addend.to(torch.float32)


def _small(tensor: Tensor) -> Tensor:
    """Without the axes that only repeat."""
    tensor = distinct(tensor.detach())
    for axis in range(tensor.dim() - 2):
        if tensor.shape[axis] > 1 and bool((tensor == tensor.narrow(axis, 0, 1)).all()):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.clone()
