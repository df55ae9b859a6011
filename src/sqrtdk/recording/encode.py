"""Encodes `CallTensors` as names, tensors and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk import _json
from sqrtdk.errors import InvalidValueError
from sqrtdk.masks.packed import pack_mask
from sqrtdk.recording.decode import RankPlaces, band_of_places
from sqrtdk.recording.format import NAME_BY_DTYPE, prefix
from sqrtdk.recording.records import Bounds, Cut, Shard
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector

Entry = dict[str, Any]
_CALL_DEFAULTS = {field.name: field.default for field in dataclasses.fields(CallTensors)}


class Sheet:
    """Collects the tensors of a file by name, each equal tensor once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Add a tensor under a name; None is ignored.

        Raises:
            InvalidValueError: The tensor has no values, or a dtype that the format lacks.
        """
        if tensor is not None:
            self.tensors[name] = detached(name, tensor)


def detached(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor without its autograd history.

    Raises:
        InvalidValueError: The format can't hold this kind of tensor.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in NAME_BY_DTYPE:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
        raise InvalidValueError(
            f"{name} is a tensor that can't be written: {kind}",
            hint=f"These can be: {', '.join(map(str, NAME_BY_DTYPE))}.",
        )
    # Not copied: the file is written before the model runs again.
    return tensor.detach()


def encode_call(
    call: CallTensors, number: int, sheet: Sheet, *, projections: bool, cut: Cut | None, shard: Shard | None = None
) -> Entry:
    """Return the JSON of a call, and put its tensors on the sheet.

    Args:
        call: the call to write.
        number: the call's place in the file.
        sheet: receives the tensors.
        projections: whether to write weights and inputs of the projections too.
        cut: which part the call is of the attention that ran; None if it is whole.
        shard: which part of the attention over all ranks this rank had; None for one process.

    Raises:
        InvalidValueError: See `Sheet.put`.
    """
    at = prefix(number)
    entry: Entry = {"site": call.site, "index": call.index}
    for name, default in _CALL_DEFAULTS.items():
        if name in ("dtype", "logits_dtype", "weights_dtype"):
            entry[name] = getattr(call, name)
        # Defaults are left out: a file has thousands of calls, and its header is limited.
        elif name in ("dropout", "missing") and getattr(call, name) != default:
            entry[name] = _json.exact_data(getattr(call, name))
    if call.call is not None:
        # As a tensor of bytes: a header is limited in size, and a call's record may have megabytes.
        text = _json.exact_line(call.call).encode()
        sheet.put(at + "record", torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if shard is not None:
        entry["shard"] = {name: value for name, value in dataclasses.asdict(shard).items() if value is not None}
    if is_empty(call):
        return entry
    local = RankPlaces.of(shard, (0, *call.query.values.shape[1:3], call.key.values.shape[2]))
    for name, vector in (("q", call.query), ("k", call.key), ("v", call.value)):
        if described := _vector(vector, at + name, sheet, projections):
            entry[name] = described
    sheet.put(at + "output", call.output)
    sheet.put(at + "lse", call.lse)
    if call.terms is not None:
        entry["terms"] = [_term(term, f"{at}terms.{place}", sheet, local) for place, term in enumerate(call.terms)]
    if call.kept is not None:
        entry["kept"] = _mask(call.kept, at + "kept", sheet)
    if cut is not None:
        entry["cut"] = {name: value for name, value in dataclasses.asdict(cut).items() if value is not None}
    return entry


def is_empty(call: CallTensors) -> bool:
    """Return whether a call has no tensors, and a reason for that in `missing`."""
    parts = (call.query.values, call.key.values, call.value.values, call.output)
    return call.missing is not None and call.terms is None and all(part.shape == (0,) for part in parts)


def _vector(vector: Vector, at: str, sheet: Sheet, projections: bool) -> Entry:
    entry: Entry = {}
    sheet.put(at, vector.values)
    if isinstance(vector.factor, Tensor):
        sheet.put(at + ".factor", vector.factor)
    elif vector.factor != 1.0 or isinstance(vector.factor, int):  # 1.0 is the default; an int 1 must stay an int
        entry["factor"] = _json.exact_data(vector.factor)
    sheet.put(at + ".projected", vector.projected)
    if vector.steps:
        entry["steps"] = [{"name": step.name, "detail": step.detail} for step in vector.steps]
    for place, step in enumerate(vector.steps):
        sheet.put(f"{at}.steps.{place}", step.values)
    if vector.projection is not None and projections:
        entry["projection"] = _projection(vector.projection, at, sheet)
    return entry


def _projection(projection: Projection, at: str, sheet: Sheet) -> str:
    for name in ("input", "weight", "bias", "features"):
        sheet.put(f"{at}.{name}", getattr(projection, name))
    return projection.name


def _term(term: Term, at: str, sheet: Sheet, local: RankPlaces | None) -> Entry:
    entry: Entry = {"name": term.name}
    if term.detail:
        entry["detail"] = term.detail
    if term.fill != float("-inf"):
        entry["fill"] = _json.exact_data(term.fill)
    if term.added:
        entry["added"] = True
    if not isinstance(term.value, Tensor):
        return entry if term.value is None else entry | {"value": _json.exact_data(term.value)}
    # A mask as a term is packed like the mask of the call: a band of 8192 x 8192 is two numbers.
    if term.value.dtype is torch.bool:
        return entry | _mask(term.value, at, sheet, local)
    sheet.put(at, term.value)
    return entry


def _mask(mask: Tensor, at: str, sheet: Sheet, local: RankPlaces | None = None) -> Entry:
    if mask.dtype is not torch.bool:
        raise InvalidValueError(
            f"{at} is a mask of {mask.dtype}", hint="A mask is bool, True where the row sees the key."
        )
    # Packed on the CPU, as the bits go to the file from there.
    packed = pack_mask(detached(at, mask).cpu())
    shift = 0 if local is None else local.shift()
    if local is not None and shift is None:  # zigzag, striped: a band of places in the sequence is none of the tensors
        if (of_places := _bounds_of_places(mask, local)) is not None:
            named = zip(("least", "greatest"), of_places, strict=True)
            return {"shape": [1, 1, *mask.shape[-2:]]} | {name: bound for name, bound in named if bound is not None}
        if packed.bits is None and (packed.least is not None or packed.greatest is not None):
            sheet.put(at, mask)
            return {}
    entry: Entry = {"shape": list(packed.shape)}
    if packed.bits is not None:
        sheet.put(at + ".bits", packed.bits)
        return entry
    sheet.put(at + ".padding", packed.padding)
    bounds = {"least": packed.least, "greatest": packed.greatest}
    return entry | {name: bound + (shift or 0) for name, bound in bounds.items() if bound is not None}


def _bounds_of_places(mask: Tensor, local: RankPlaces) -> Bounds | None:
    """Return the bounds of row place - key place if a mask is these alone, as causal masks and windows are; else None.

    Example:
        >>> zigzag = RankPlaces([0, 3], [0, 3])
        >>> _bounds_of_places(torch.tensor([[True, False], [True, True]]), zigzag)
        (0, None)
    """
    if mask.dim() < 2 or not bool(mask.any()) or bool(mask.all()):
        return None
    distance = torch.tensor(local.rows)[:, None] - torch.tensor(local.keys)
    seen = distance.expand(mask.shape)[mask.cpu()]
    least, greatest = int(seen.min()), int(seen.max())
    for bounds in ((least, None), (None, greatest), (least, greatest)):
        if bool((mask.cpu() == band_of_places(local.rows, local.keys, bounds)).all()):
            return bounds
    return None


def number_sites(calls: Sequence[CallTensors]) -> None:
    """Check that no two calls have the same site and index.

    Raises:
        InvalidValueError: Two calls have.
    """
    places: set[tuple[str, int]] = set()
    for call in calls:
        if (call.site, call.index) in places:
            raise InvalidValueError(
                f"two calls are {call.site!r}, index {call.index}", hint="Count the calls of a site from 0 on."
            )
        places.add((call.site, call.index))
