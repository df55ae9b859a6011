"""Collects the tensors of an attention in one layout, with all that is needed to compute it again."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.calls.keep_blocks import output_of_blocks, vectors_of_blocks
from sqrtdk.tracing.calls.places import NO_OPERANDS, ValueOperands, output_rows, places_of
from sqrtdk.tracing.calls.terms import is_proven, lse_of, terms_of
from sqrtdk.tracing.calls.vectors import first_columns, owned_copy, share_tensors, vector
from sqrtdk.tracing.calls.visible_keys import NO_DATA, combined_masks
from sqrtdk.tracing.readback.reading import Logits, Reading, Vectors
from sqrtdk.tracing.records import IN_BLOCKS, AttentionCall
from sqrtdk.tracing.steps import Scale
from sqrtdk.tracing.tape.node import WeightSteps
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, some_tokens

_DROPOUT_TOLERANCE = 0.02  # relative tolerance for dropout's common factor 1 / (1 - rate) on rounded weights
_UNIT_ROUNDING = 2.0**-20  # distance from 1 that is rounding for a float32 factor
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_NUMBERS = 32  # numbers other than 0 and 1 that would not all fit into half precision by chance
_MOST_SAMPLED_NUMBERS = 4096  # largest sample of numbers
NATIVE_MASKS = "trace.kept.native"
ENLARGED_RUN = "trace.kept.enlarged"
BLOCKS_OF_KEYS = "trace.kept.blocks"


def missing_tensors(call: AttentionCall, reason: str) -> CallTensors:
    """Return a result without tensors for a call.

    Args:
        call: the record of the call.
        reason: why the tensors are missing; it becomes the field `missing`.
    """
    nothing = Vector(torch.zeros(0))
    return CallTensors(
        call.site, call.index, nothing, nothing, nothing, nothing.values, None, missing=reason, call=call
    )


def keep_tensors(reading: Reading, used: ValueOperands | None, call: AttentionCall) -> CallTensors:
    """Return the tensors of an attention, in one layout, with all that is needed to compute it again.

    A few rows are computed again to prove that the layout was read correctly. No error is raised.

    Args:
        reading: what was read of the attention.
        used: the operands of the product of weights and values; None if they are unknown.
        call: the record of the attention.

    Returns:
        The tensors. If the attention can't be computed again from them, `missing` has the reason, and the tensors are
        empty if they are not trustworthy.
    """
    try:
        tensors = _keep_tensors(reading, used, call)
        if (
            tensors.missing is None and tensors.dropout and tensors.kept is None
        ):  # a kernel tells nobody what it dropped
            return replace(tensors, missing=Message("trace.kept.dropped"))
        settled = tensors.missing is not None or is_proven(tensors)
        return tensors if settled else missing_tensors(call, Message("trace.kept.doubt"))
    except Exception as error:  # a trace must not stop the model, whatever the layout
        return missing_tensors(call, Message("trace.kept.failed", error=kind_and_text(error)))


def _keep_tensors(reading: Reading, used: ValueOperands | None, call: AttentionCall) -> CallTensors:
    dropped = None if used is None else _dropped(reading, used)
    if dropped is not None:
        reading = replace(reading, dropout=dropped, weight_steps=WeightSteps())
    fault = _fault(reading, used)
    if fault is not None or used is None:
        return missing_tensors(call, fault or Message(NO_OPERANDS))
    vectors = vectors_of_blocks(reading, used.blocks) if reading.blocks else _vectors(reading, used)
    if not isinstance(vectors, tuple):
        return missing_tensors(call, vectors or Message(BLOCKS_OF_KEYS))
    visible_keys = combined_masks(reading, counts=False)
    query, key, value = share_tensors([*vectors])
    if reading.blocks:
        reading = replace(reading, output=output_of_blocks(reading, value.values))
    logits = reading.operands if isinstance(reading.operands, Logits) else None
    if reading.kind == "sdpa" and logits is not None:
        # torch's math kernel computes (q * sqrt(scale)) @ (k * sqrt(scale)).mT, and `terms` contain the whole scale.
        root = math.sqrt(abs(next((s.factor.value or 1.0 for s in visible_keys.steps if isinstance(s, Scale)), 1.0)))
        query, key = _unscaled(query, root), _unscaled(key, root)
    missing, terms = _changed(reading), None
    if missing is None:
        terms = terms_of(reading, visible_keys, used)
        unknown = next((term for term in terms if term.value is None), None)
        if unknown is not None:
            missing = _unknown(unknown)
    assert reading.output is not None
    weights_dtype = call.dtype
    if used.weights is not None:
        weights_dtype = str(used.weights.dtype).removeprefix("torch.")
        weights_dtype = weights_dtype if logits is None else _held_in(logits.weights, weights_dtype)
        weights_dtype = _held_in(used.weights, weights_dtype)
    sizes = (call.batch, call.heads, call.query_len, call.key_len)
    return CallTensors(
        site=call.site,
        index=call.index,
        query=query,
        key=key,
        value=value,
        output=owned_copy(output_rows(reading, used, reading.output), reading.output),
        terms=terms,
        lse=lse_of(reading, visible_keys, used),
        kept=(used.weights.reshape(sizes) != 0).detach() if reading.dropout and used.weights is not None else None,
        dropout=reading.dropout,
        dtype=call.dtype,
        logits_dtype=call.logits_dtype if logits is None else _held_in(logits.values, call.logits_dtype),
        weights_dtype=weights_dtype,
        missing=missing,
        call=call,
    )


def _vectors(reading: Reading, used: ValueOperands) -> tuple[Vector, ...] | str:
    """Return q, k and v; or the reason, a text, why they can't be arranged."""
    places = places_of(reading, used)
    if isinstance(places, str):
        return places
    at_query, at_key, at_value = places
    if reading.op == IN_BLOCKS and reading.output is not None:
        at_value = first_columns(at_value, reading.output.shape[-1])
    return vector(at_query), vector(at_key), vector(at_value)


def _dropped(reading: Reading, used: ValueOperands) -> float | None:
    """Return the rate of a dropout on the weights, w * mask / (1 - rate), or None if they were changed otherwise.

    It is read from values: some weights became 0, and all others grew by one factor.
    """
    weight_steps = reading.weight_steps
    if not (weight_steps.changes or weight_steps.remasked or weight_steps.thinned) or used.weights is None:
        return None
    if not isinstance(reading.operands, Logits) or reading.dropout:
        return None
    weights = reading.operands.arrange(reading.operands.weights).to(torch.float64)
    met = used.weights.reshape(weights.shape).to(torch.float64)
    not_dropped = (met != 0) & (weights != 0)
    by = (met / weights)[not_dropped]
    if not by.numel() or bool((met != 0).sum() != not_dropped.sum()):
        return None
    rate = 1.0 - 1.0 / float(by.median())
    even = bool(((by * (1.0 - rate) - 1.0).abs() <= _DROPOUT_TOLERANCE).all())
    return rate if even and 0.0 < rate < 1.0 else None


def _unscaled(vector: Vector, root: float) -> Vector:
    values = (vector.values.to(torch.float64) / root).to(vector.values.dtype)
    factor = vector.factor / root
    plain = vector.projected is None or (isinstance(factor, float) and abs(factor - 1) <= _UNIT_ROUNDING)
    return replace(vector, values=values, factor=1.0 if plain else factor)


def _changed(reading: Reading) -> str | None:
    """Return a reason if the weights were changed after the softmax in a way that can't be computed again."""
    weight_steps = reading.weight_steps
    names = [
        *(change.name for change in weight_steps.changes),
        *(stage.detail or stage.name for stage in weight_steps.stages),
    ]
    if names or weight_steps.remasked or weight_steps.thinned or weight_steps.combined:
        what = joined(names, "comma") if names else Message("trace.kept.second_mask")
        return Message("trace.kept.weights", what=what)
    return None


def _unknown(term: Term) -> Message:
    """Return the reason why a call can't be computed again if a term of its logits has no value."""
    match term.name:
        case "scale":
            return Message("trace.kept.unknown.scale", source=term.detail)
        case "bias":
            return Message("trace.kept.unknown.bias", name=term.detail)
        case "mask":
            return Message("trace.kept.unknown.mask", name=term.detail)
        case "softcap" | "sinks":
            return Message(f"trace.kept.unknown.{term.name}")
    if isinstance(term.detail, Message):
        return Message("trace.kept.unknown.step", what=term.detail)
    return Message("trace.kept.unknown.operation", name=term.detail)


def _fault(reading: Reading, used: ValueOperands | None) -> str | None:
    """Return the reason why the attention can't be computed again, or None."""
    if reading.without_data:
        return Message(NO_DATA)
    if reading.fault is not None:
        return reading.fault
    if reading.score is not None or reading.distance is not None:
        return Message("trace.kept.score")
    if reading.axis != "positions":
        return Message("trace.kept.axis", axis=reading.axis)
    if reading.kind == "native":
        return Message(NATIVE_MASKS)  # the fast path returns the result of the output projection
    if reading.blocks:
        known = used is not None and used.blocks and isinstance(reading.operands, Logits)
        return None if known else Message(BLOCKS_OF_KEYS)
    held = isinstance(reading.operands, Logits) and not reading.operands.values.is_meta
    if not (held or isinstance(reading.operands, Vectors)) or reading.output is None:
        return Message(NO_OPERANDS)
    return None


def _held_in(numbers: Tensor, dtype: str) -> str:
    """Return the name of `dtype`, or of a half-precision dtype if all numbers fit into it and so were rounded to it.

    Example:
        >>> x = torch.linspace(0.1, 0.9, 64)
        >>> _held_in(x, "float32"), _held_in(x.half().float(), "float32")
        ('float32', 'float16')
    """
    # logits.half().float() is a float32 tensor of float16 numbers.
    if getattr(torch, dtype) in _HALF_DTYPES or not numbers.is_floating_point():
        return dtype
    some = numbers.detach().flatten()
    some = some[:: max(1, some.numel() // _MOST_SAMPLED_NUMBERS)]
    some = some[some.isfinite() & (some != 0) & (some != 1) & (some.abs() < 1e4)]
    for half in _HALF_DTYPES:
        of_half = some.numel() >= _LEAST_NUMBERS and torch.equal(some.to(half).to(some.dtype), some)
        if numbers.dtype == half or of_half:
            return str(half).removeprefix("torch.")
    return dtype


# -- less than all of it -----------------------------------------------------------------------------------------------


def projections_of(tensors: CallTensors) -> tuple[Projection | None, Projection | None]:
    """Return the projections of q and k with their names and feature indices, without tensors.

    Returns:
        (projection of q, projection of k); None for one that is unknown. Their input is empty, weight and bias are
        None.
    """
    query, key = (
        None if one is None else replace(one, input=torch.zeros(0), weight=None, bias=None)
        for one in (tensors.query.projection, tensors.key.projection)
    )
    return query, key


def sketch_of(tensors: CallTensors) -> CallTensors:
    """Return the call with a few tokens, one row of each head's weight, and no output, masks or biases.

    It shows where q and k come from, and is small enough to keep while a model trains.
    """
    return replace(
        tensors,
        query=_sketched(tensors.query),
        key=_sketched(tensors.key),
        value=_sketched(tensors.value),
        output=tensors.output.new_zeros(0),
        terms=None if tensors.terms is None else tuple(_without_tensor(term) for term in tensors.terms),
        lse=None,
        kept=None,
    )


def _without_tensor(term: Term) -> Term:
    return replace(term, value=None) if isinstance(term.value, Tensor) else term


def _sketched(vector: Vector) -> Vector:
    if vector.values.dim() != 4:  # the empty vector of a call whose tensors are missing
        return vector
    projection = vector.projection
    if projection is not None:
        entering = some_tokens(projection.input.unsqueeze(1)).squeeze(1).clone()
        weight = None if projection.weight is None else projection.weight[:, :1].clone()
        projection = replace(projection, input=entering, weight=weight)
    return replace(
        vector,
        values=some_tokens(vector.values).clone(),  # a view would keep the whole tensor alive
        factor=1.0,
        projected=None if vector.projected is None else some_tokens(vector.projected).clone(),
        steps=tuple(s if s.values is None else replace(s, values=some_tokens(s.values).clone()) for s in vector.steps),
        projection=projection,
    )
