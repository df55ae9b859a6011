"""Decodes names, tensors and JSON into `CallTensors`, and checks that they fit one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.masks.packed import PackedMask, bits_needed
from sqrtdk.recording.document import CallEntry, MaskEntry, TermEntry, VectorEntry
from sqrtdk.recording.format import FLOAT_DTYPES, INTEGER_DTYPES, TENSOR_LAYOUTS, prefix, to_bhle
from sqrtdk.recording.limits import (
    MAX_RECORD_BYTES,
    MAX_SIDE,
    at_most,
    parse_trace_json,
    quote,
    refuse_file,
    trace_record,
)
from sqrtdk.recording.records import Bounds, Cut, Shard
from sqrtdk.recording.source import TensorSource
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint


class DecodedCall(NamedTuple):
    """A call of a file, and which part of the attention it is."""

    call: CallTensors
    cut: Cut | None = None
    shard: Shard | None = None
    bounds: tuple[Bounds | None, ...] = ()


_U8 = frozenset({torch.uint8})
Shape = tuple[int, ...]


def decode_call(entry: CallEntry, number: int, index: int, source: TensorSource) -> DecodedCall:
    """Return one call of a file.

    Args:
        entry: the call's JSON.
        number: the call's place in the file.
        index: index at its site if the JSON names none.
        source: gives the tensors.

    Raises:
        TraceFileError: A tensor is missing, or does not fit the others.
    """
    at = prefix(number)
    index = index if entry.index is None else entry.index
    if at + "q" not in source and entry.missing is not None:
        return DecodedCall(_without(entry, at, index, source), shard=entry.shard)
    layout = entry.layout or "BHLE"
    query = _vector(entry.q or VectorEntry(), at + "q", layout, source)
    key = _vector(entry.k or VectorEntry(), at + "k", layout, source)
    value = _vector(entry.v or VectorEntry(), at + "v", layout, source)
    output = _laid_out(at + "output", layout, source)
    logits = _check_fit(at, query.values, key.values, value.values, output)
    source.count_logits(logits)
    # Optional: engines that return it allow the logits' scale to be checked without the weights.
    lse = source.take(at + "lse", FLOAT_DTYPES)
    if lse is not None and "B" not in layout:
        lse = lse.unsqueeze(0)
    if lse is not None and lse.shape != logits[:3]:
        refuse_file(f"{at}lse has shape {tuple(lse.shape)}; (B, Hq, L) is {logits[:3]}")
    dtype = entry.dtype or str(query.values.dtype).removeprefix("torch.")
    terms, local = None, RankPlaces.of(entry.shard, logits)
    if entry.terms is not None:
        terms = tuple(
            _term(term, f"{at}terms.{place}", logits, source, local) for place, term in enumerate(entry.terms)
        )
    call = CallTensors(
        site=entry.site,
        index=index,
        query=query,
        key=key,
        value=value,
        output=output,
        terms=terms,
        lse=lse,
        kept=_dropout_mask(entry.kept, at + "kept", logits, source),
        dropout=entry.dropout or 0.0,
        dtype=dtype,
        # of the logits, unless the file says otherwise
        logits_dtype=entry.logits_dtype or (dtype if dtype == "float64" else "float32"),
        weights_dtype=entry.weights_dtype or dtype,
        missing=entry.missing,
        call=_record(at + "record", source),
    )
    bounds = tuple((term.least, term.greatest) if _has_bounds(term) else None for term in entry.terms or ())
    return DecodedCall(call, _cut(entry.cut, f"calls[{number}].cut", logits), entry.shard, bounds)


def _has_bounds(entry: MaskEntry) -> bool:
    return entry.least is not None or entry.greatest is not None


class RankPlaces(NamedTuple):
    """Places of a rank's rows and keys in the sequence: bounds of its masks speak of these."""

    rows: list[int]
    keys: list[int]

    @classmethod
    def of(cls, shard: Shard | None, logits: Shape) -> RankPlaces | None:
        """Return the places, which must be those of the tensors; None for a call of one process.

        Args:
            shard: as it is declared.
            logits: (B, Hq, L, S) of the file's tensors.

        Raises:
            TraceFileError: The shard does not fit the tensors.
        """
        if shard is None:
            return None
        shard.places("heads", logits[1])
        return cls(shard.places("rows", logits[2])[0], shard.places("keys", logits[3])[0])

    def shift(self) -> int | None:
        """Return how much larger i - j is in the sequence than in the tensors; None if that is not one number."""
        rows, keys = ({place - at for at, place in enumerate(places)} for places in (self.rows, self.keys))
        return rows.pop() - keys.pop() if len(rows) == len(keys) == 1 else None


def _without(entry: CallEntry, at: str, index: int, source: TensorSource) -> CallTensors:
    """Return a call without tensors, which states the reason in `missing`."""
    nothing = Vector(torch.zeros(0))
    return CallTensors(
        site=entry.site,
        index=index,
        query=nothing,
        key=nothing,
        value=nothing,
        output=nothing.values,
        terms=None,
        dropout=entry.dropout or 0.0,
        dtype=entry.dtype or "float32",
        logits_dtype=entry.logits_dtype or "float32",
        weights_dtype=entry.weights_dtype or "float32",
        missing=entry.missing,
        call=_record(at + "record", source),
    )


def _laid_out(name: str, layout: str, source: TensorSource) -> Tensor:
    tensor = source.take(name, FLOAT_DTYPES)
    if tensor is None:
        refuse_file(f"the file has no tensor {name!r}", "Each call has q, k, v and output.")
    if tensor.dim() != len(layout):
        refuse_file(
            f"{name} has shape {tuple(tensor.shape)}, and the layout is {layout}",
            f"Give the call its 'layout', one of: {', '.join(TENSOR_LAYOUTS)}.",
        )
    return to_bhle(tensor, layout)


def _check_fit(at: str, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Shape:
    """Return the shape of the logits, (B, Hq, L, S). Refuses tensors that don't fit one another."""
    (batch, heads, rows, width), (kv_batch, kv_heads, keys, key_width) = query.shape, key.shape
    for name, tensor in (("q", query), ("k", key), ("v", value), ("output", output)):
        _refuse_empty(at + name, tensor)
    shapes = f"{at}q (B, H, L, E) {tuple(query.shape)} and k {tuple(key.shape)}"
    if batch != kv_batch:
        refuse_file(f"{shapes} have batches of {batch} and {kv_batch}", "Repeat the one of them that serves all.")
    if width != key_width:
        refuse_file(
            f"{shapes} have heads of {width} and {key_width} features", "Both enter one product: check the layout."
        )
    if heads % kv_heads:  # grouped heads: heads // kv_heads of q share one of k
        refuse_file(
            f"{shapes}: {heads} heads of q can't share {kv_heads} of k", "Hq is a multiple of H: check the layout."
        )
    if value.shape[:3] != key.shape[:3]:
        refuse_file(
            f"{at}v {tuple(value.shape)} does not fit k {tuple(key.shape)}", "B, H and S are the same for both."
        )
    wanted = (batch, heads, rows, value.shape[3])
    if output.shape != wanted:
        refuse_file(f"{at}output has shape {tuple(output.shape)}; q and v make it {wanted}")
    return batch, heads, rows, keys


def _refuse_empty(name: str, tensor: Tensor) -> None:
    """Refuse a vector (B, H, L, E) without a row, a head or a feature: no softmax ran over it."""
    if 0 in tensor.shape:
        refuse_file(
            f"{name} (B, H, L, E) {tuple(tensor.shape)} has no numbers",
            "Leave a call without rows, keys or features out, or give it 'missing' with the reason and no tensors.",
        )


def _vector(entry: VectorEntry, name: str, layout: str, source: TensorSource) -> Vector:
    values = _laid_out(name, layout, source)
    factors = source.take(name + ".factor", FLOAT_DTYPES)  # a number in JSON, or a tensor that broadcasts
    if factors is not None and entry.factor is not None:
        refuse_file(f"{name} has its factor as a number and as a tensor")
    if factors is not None:
        _check_broadcast(name + ".factor", tuple(factors.shape), tuple(values.shape))
    factor = factors if factors is not None else 1.0 if entry.factor is None else entry.factor
    steps = tuple(
        Waypoint(step.name, step.detail or "", _on_the_way(f"{name}.steps.{place}", layout, values, source))
        for place, step in enumerate(entry.steps or ())
    )
    projected = _on_the_way(name + ".projected", layout, values, source)
    return Vector(values, factor, projected, steps, _projection(entry.projection, name, values, source))


def _on_the_way(name: str, layout: str, values: Tensor, source: TensorSource) -> Tensor | None:
    """Return an earlier state of a vector, or None. Heads and features may differ: heads are repeated later."""
    if name not in source:
        return None
    tensor = _laid_out(name, layout, source)
    _refuse_empty(name, tensor)
    if (tensor.shape[0], tensor.shape[2]) != (values.shape[0], values.shape[2]):
        refuse_file(f"{name} (B, H, L, E) {tuple(tensor.shape)} does not fit what it became, {tuple(values.shape)}")
    return tensor


def _projection(name: str | None, begin: str, values: Tensor, source: TensorSource) -> Projection | None:
    """Return the projection of a vector from its tensors in the file; None if it has none.

    Raises:
        TraceFileError: A tensor is missing, or the shapes don't fit.
    """
    if name is None:
        return None
    given, weight, bias = (source.take(f"{begin}.{part}", FLOAT_DTYPES) for part in ("input", "weight", "bias"))
    features = source.take(begin + ".features", INTEGER_DTYPES)
    if given is None or features is None:
        refuse_file(f"the projection of {begin} lacks its {'input' if given is None else 'features'}")
    shapes = [tuple(part.shape) for part in (given, weight, bias, features) if part is not None]
    fits = given.numel() > 0 and features.numel() > 0
    fits = fits and given.dim() == 3 and given.shape[:2] == (values.shape[0], values.shape[2]) and features.dim() == 2
    if weight is not None:
        fits = fits and weight.dim() == 3 and weight.shape[2] == given.shape[2] and weight.shape[:2] == features.shape
    if bias is not None:
        fits = fits and bias.shape == features.shape
    if not fits:
        refuse_file(
            f"the parts of the projection of {begin} don't fit: {', '.join(map(str, shapes))}",
            "input (B, L, D), weight (H, E, D), bias and features (H, E).",
        )
    return Projection(name, given, weight, bias, features)


def _term(entry: TermEntry, at: str, logits: Shape, source: TensorSource, local: RankPlaces | None) -> Term:
    value: Tensor | float | None
    if entry.name == "mask" or entry.shape is not None:
        value = _mask(entry, at, logits, source, local)
    else:
        tensor = source.take(at, FLOAT_DTYPES)
        if tensor is not None and entry.value is not None:
            refuse_file(f"{at} has its value as a number and as a tensor")
        if tensor is not None and entry.name == "sinks" and tensor.shape != (logits[1],):
            refuse_file(f"{at}, sinks, has shape {tuple(tensor.shape)}; one logit a query head is ({logits[1]},)")
        if tensor is not None and entry.name != "sinks":
            _check_broadcast(at, tuple(tensor.shape), logits)
        value = entry.value if tensor is None else tensor
    # JSON has no infinity, so the usual fill is the absent one.
    fill = float("-inf") if entry.fill is None else entry.fill
    return Term(entry.name, value, entry.detail or "", fill, bool(entry.added))


def _mask(
    entry: MaskEntry, at: str, logits: Shape, source: TensorSource, local: RankPlaces | None = None
) -> Tensor | None:
    """Return a mask from the file; None if there is none.

    It has one of three forms: a bool tensor; packed bits with a shape; or bounds of i - j, with padding or without.

    Raises:
        TraceFileError: It has several forms, or its shape does not fit the logits.
    """
    plain, padding = source.bits(at), source.bits(at + ".padding")
    bits = source.take(at + ".bits", _U8)
    shape, least, greatest = entry.shape, entry.least, entry.greatest
    bounds = least is not None or greatest is not None
    if any(bound is not None and abs(bound) > MAX_SIDE for bound in (least, greatest)):
        refuse_file(f"{at} has bounds {least} and {greatest}; they are at most {MAX_SIDE} from 0")
    # the three forms of a mask: a bool tensor, packed bits, or bounds of i - j with padding
    parts = (plain is not None, bits is not None, bounds or padding is not None)
    if sum(parts) > 1:
        refuse_file(f"{at} is told twice", "Give its tensor, or its bits with a shape, or bounds and padding.")
    if plain is not None:
        if shape is not None:
            refuse_file(f"{at} has a shape beside its tensor")
        _check_broadcast(at, tuple(plain.shape), logits)
        return plain
    if shape is None and bits is not None:
        refuse_file(f"{at}.bits have no shape", "Give the mask its 'shape', a list of 4 numbers.")
    if shape is None:
        if not bounds and padding is None:
            return None
        # bounds alone cover all rows and keys of one batch entry; padding may bring its own batch dimension
        shape = (1 if padding is None or padding.dim() < 4 else padding.shape[0], 1, *logits[2:])
    _check_broadcast(at, shape, logits)
    if bits is not None and bits.shape != (bits_needed(shape),):
        refuse_file(f"{at}.bits has shape {tuple(bits.shape)}; a mask {shape} takes ({bits_needed(shape)},) bytes")
    if padding is not None:
        _check_broadcast(at + ".padding", tuple(padding.shape), shape)
    if bits is None and len(shape) < 2:
        refuse_file(f"{at} has shape {shape} and no bits; its last two dimensions are rows and keys")
    if bounds and shape[-2:] != logits[2:]:
        refuse_file(f"{at} has bounds and shape {shape}; bounds are of {logits[2]} rows and {logits[3]} keys")
    shift = 0 if local is None or not bounds else local.shift()
    if shift is None:  # zigzag, striped: the band is none of the tensors
        assert local is not None
        whole = source.mask(at, PackedMask(shape, None, None, padding, bits))
        return whole if whole.is_meta else whole & band_of_places(local.rows, local.keys, (least, greatest))
    least, greatest = (None if bound is None else bound - shift for bound in (least, greatest))
    return source.mask(at, PackedMask(shape, least, greatest, padding, bits))


def band_of_places(rows: Sequence[int], keys: Sequence[int], bounds: Bounds) -> Tensor:
    """Return (rows, keys), true where the distance of the places is within the bounds.

    Example:
        >>> band_of_places([1, 3], [0, 2], (0, None)).tolist()
        [[True, False], [True, True]]
    """
    distance = torch.tensor(rows)[:, None] - torch.tensor(keys)
    least, greatest = bounds
    shown = torch.ones_like(distance, dtype=torch.bool)
    shown = shown if least is None else shown & (distance >= least)
    return shown if greatest is None else shown & (distance <= greatest)


def _dropout_mask(entry: MaskEntry | None, at: str, logits: Shape, source: TensorSource) -> Tensor | None:
    if entry is None and at not in source:
        return None
    return _mask(entry or MaskEntry(), at, logits, source)


def _check_broadcast(name: str, shape: Shape, whole: Shape) -> None:
    ends = zip(reversed(shape), reversed(whole), strict=False)
    if len(shape) > len(whole) or any(side not in (1, all_of) for side, all_of in ends):
        refuse_file(f"{name} has shape {shape}, which does not broadcast to {whole}")


def _record(name: str, source: TensorSource) -> AttentionCall | None:
    text = source.take(name, _U8, small=True)
    if text is None:
        return None
    if text.dim() != 1:
        refuse_file(f"{name} has shape {tuple(text.shape)}; it is a text, (bytes,)")
    at_most(text.numel(), MAX_RECORD_BYTES, f"bytes in {name}")
    if text.is_meta:  # shapes alone: there is no text to parse yet
        return None
    return trace_record(AttentionCall, parse_trace_json(text.numpy().tobytes(), name), name)


def _cut(cut: Cut | None, what: str, logits: Shape) -> Cut | None:
    if cut is None:
        return None
    if cut.rows is not None and (cut.rows != logits[2] or (cut.rows_of or 0) < cut.rows):
        refuse_file(f"{what} has {cut.rows} rows of {quote(cut.rows_of)}, and q has {logits[2]}")
    heads = cut.heads
    if heads is not None and (len(heads) != logits[1] or not all(0 <= head < (cut.heads_of or 0) for head in heads)):
        refuse_file(f"{what} has the heads {quote(list(heads))} of {quote(cut.heads_of)}, and q has {logits[1]}")
    return cut
