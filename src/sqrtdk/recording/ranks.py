"""Puts the trace files of N ranks together: each call says which rows, keys and heads of the whole its file holds.

    q[:, heads, rows], output[:, heads, rows] <- the file of a rank
    k[:, key heads, keys], v[:, key heads, keys]

A part that several ranks hold, such as keys that were gathered, must be the same on all of them up to rounding. What
ranks do differently, such as a scale of one of them, becomes a term of these rows and heads.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.errors import TraceFileError
from sqrtdk.messages import Message
from sqrtdk.recording.encode import is_empty
from sqrtdk.recording.limits import quote
from sqrtdk.recording.parts import RankPart, filled, refuse_ranks, terms_of_ranks
from sqrtdk.recording.read import read_trace_file
from sqrtdk.recording.records import Bounds, RankRows, Shard, TraceFile
from sqrtdk.tracing.tensors import CallTensors, Vector, Waypoint


class JoinedFiles(NamedTuple):
    """The files of N ranks as one.

    Attributes:
        file: the whole; its path is the pattern that named the files.
        ranks: for each call the parts of its output, by rank; empty for a single file.
    """

    file: TraceFile
    ranks: tuple[tuple[RankRows, ...], ...] = ()


def read_files(path: Path, *, shapes: bool = False) -> JoinedFiles:
    """Read one trace file, or those of all ranks where the path is a pattern; see `read_files_of_ranks`."""
    if "*" in path.name:
        return read_files_of_ranks(path, shapes=shapes)
    return JoinedFiles(read_trace_file(path, shapes=shapes))


def files_of_ranks(pattern: Path) -> list[Path]:
    """Return the files that a path with "*" names, in the order of the numbers in their names.

    Raises:
        TraceFileError: There is none.
    """
    found = sorted(pattern.parent.glob(pattern.name), key=_by_number)
    if not found:
        raise TraceFileError(f"no file is named {str(pattern)!r}", hint="Quote the pattern: 'run/rank*.safetensors'.")
    return found


def _by_number(path: Path) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def read_files_of_ranks(pattern: str | Path, *, shapes: bool = False) -> JoinedFiles:
    """Read the trace files of all ranks, and put their calls together by the places that they declare.

    Args:
        pattern: the files, "run/rank*.safetensors".
        shapes: whether tensors have shapes alone.

    Raises:
        TraceFileError: A file can't be read or declares no places; places are in no file, or in several that differ;
            or the ranks have other attentions.
    """
    pattern = Path(pattern)
    files = [read_trace_file(path, shapes=shapes) for path in files_of_ranks(pattern)]
    first = files[0]
    names = [file.path.name for file in files]
    places = [{(call.site, call.index): at for at, call in enumerate(file.calls)} for file in files]
    for name, of_file in zip(names[1:], places[1:], strict=True):
        if other := set(places[0]) ^ set(of_file):
            site, index = min(other)
            has, lacks = (names[0], name) if (site, index) in places[0] else (name, names[0])
            refuse_ranks(f"{has} has the attention {quote(site)}, index {index}, and {lacks} has not")
    calls, ranks, notes = [], [], [*dict.fromkeys(note for file in files for note in file.notes)]
    for place in places[0]:
        at = [of_file[place] for of_file in places]
        parts = [
            _part(name, file.calls[i], file.shards[i], file.bounds[i])
            for name, file, i in zip(names, files, at, strict=True)
        ]
        call, unlike = _joined(
            [part for part in parts if part is not None], [file.calls[i] for file, i in zip(files, at, strict=True)]
        )
        calls.append(call)
        notes += unlike
        ranks.append(tuple(RankRows(p.name, tuple(p.heads), tuple(p.rows)) for p in parts if p is not None))
    inputs = _inputs(files, [tuple(parts) for parts in ranks[:1]], notes)
    whole = replace(
        first,
        path=pattern,
        calls=tuple(calls),
        cuts=(None,) * len(calls),
        model_inputs=inputs,
        notes=tuple(notes),
    )
    return JoinedFiles(whole, tuple(ranks))


def _part(name: str, call: CallTensors, shard: Shard | None, bounds: tuple[Bounds | None, ...]) -> RankPart | None:
    """Return a rank's part of a call; None if the file has no tensors of it."""
    if is_empty(call):
        return None
    if shard is None:
        refuse_ranks(
            f"{name} does not say which rows, keys and heads of {quote(call.site)} it holds, and several files do"
        )
    (_, heads, rows, _), (_, kv, keys, _) = call.query.values.shape, call.key.values.shape
    try:
        of_rows, all_rows = shard.places("rows", rows)
        of_keys, all_keys = shard.places("keys", keys)
        of_heads, all_heads = shard.places("heads", heads)
    except TraceFileError as error:
        raise TraceFileError(f"{name}, {quote(call.site)}: {error.message}", hint=error.hint) from error
    share = heads // kv  # query heads that read one key head, on this rank as in the whole
    read = [of_heads[at * share] for at in range(kv)]
    if all_heads % share or any(of_heads[at] // share != read[at // share] // share for at in range(heads)):
        refuse_ranks(
            f"{name}, {quote(call.site)}: {heads} query heads {quote(of_heads[:8])} share {kv} key heads unevenly"
        )
    sizes = (all_heads, all_rows, all_heads // share, all_keys)
    return RankPart(name, call, bounds, of_rows, of_keys, of_heads, [head // share for head in read], sizes)


def _joined(parts: Sequence[RankPart], calls: Sequence[CallTensors]) -> tuple[CallTensors, list[str]]:
    """Return the whole call, and notes on what the ranks do differently."""
    missing = next((call for call in calls if is_empty(call)), None)
    if missing is not None:
        return missing, []
    one, site = parts[0], quote(calls[0].site)
    for part in parts[1:]:
        facts = {
            "heads, rows, key heads and keys in all": (part.sizes, one.sizes),
            "features": (part.call.query.values.shape[3], one.call.query.values.shape[3]),
            "sequences": (part.call.query.values.shape[0], one.call.query.values.shape[0]),
            "dtype": (part.call.dtype, one.call.dtype),
        }
        for what, (here, there) in facts.items():
            if here != there:
                refuse_ranks(f"{part.name} and {one.name} do not fit at {site}: {what} {here} and {there}")
    notes: list[str] = []
    query = _vector(parts, "query", site)
    key, value = (_vector(parts, name, site) for name in ("key", "value"))
    output = filled([(part, part.call.output) for part in parts], "query", "output", site)
    lses = [(part, part.call.lse) for part in parts]
    lse = None
    if all(each is not None for _, each in lses):
        lse = filled([(part, each[..., None]) for part, each in lses if each is not None], "query", "lse", site)[..., 0]
    terms = terms_of_ranks(parts, site, notes)
    whole = replace(one.call, query=query, key=key, value=value, output=output, lse=lse, terms=terms, call=None)
    dropped = any(part.call.kept is not None for part in parts)
    why = next((part.call.missing for part in parts if part.call.missing), None)
    if dropped:
        why = why or Message("recording.ranks_dropout")
    return replace(whole, kept=None, missing=why), notes


def _vector(parts: Sequence[RankPart], name: str, site: str) -> Vector:
    """Return q, k or v of the whole; what led to it is known as far as every rank tells it."""
    kind = "query" if name == "query" else "key"
    vectors = [getattr(part.call, name) for part in parts]

    def whole(tensors: Sequence[Tensor | None], what: str) -> Tensor | None:
        known = [(part, tensor) for part, tensor in zip(parts, tensors, strict=True) if tensor is not None]
        heads = all(tensor.shape[1] == len(part.indices(kind)[0]) for part, tensor in known)
        return filled(known, kind, what, site) if len(known) == len(parts) and heads else None

    values = whole([vector.values for vector in vectors], name)
    assert values is not None
    factors = {vector.factor if not isinstance(vector.factor, Tensor) else None for vector in vectors}
    if len(factors) > 1 or None in factors:
        refuse_ranks(f"the ranks multiply {name} of {site} by unlike factors", "Write them as the scale of each rank.")
    ways = [[(step.name, step.detail) for step in vector.steps] for vector in vectors]
    steps: tuple[Waypoint, ...] = ()
    if all(way == ways[0] for way in ways):
        between = zip(*(vector.steps for vector in vectors), strict=True)
        steps = tuple(replace(each[0], values=whole([step.values for step in each], name)) for each in between)
    projected = whole([vector.projected for vector in vectors], name)
    return Vector(values, vectors[0].factor, projected, steps)


def _inputs(files: Sequence[TraceFile], ranks: Sequence[Sequence[RankRows]], notes: list[str]) -> Mapping[str, Tensor]:
    """Return the inputs of the whole model: those that all ranks have, and those of tokens, put together by rows."""
    found: dict[str, Tensor] = {}
    for name in files[0].model_inputs:
        each = [file.model_inputs.get(name) for file in files]
        own = [tensor for tensor in each if tensor is not None]
        rows = [list(part.rows) for part in ranks[0]] if ranks and len(ranks[0]) == len(files) else []
        if len(own) == len(files) and all(torch.equal(own[0], tensor) for tensor in own[1:]):
            found[name] = own[0]
        elif len(own) == len(rows) and all(
            t.dim() > 1 and t.shape[1] == len(r) for t, r in zip(own, rows, strict=True)
        ):
            whole = own[0].new_zeros(own[0].shape[0], 1 + max(itertools.chain(*rows)), *own[0].shape[2:])
            for tensor, places in zip(own, rows, strict=True):
                whole[:, places] = tensor
            found[name] = whole
        else:
            notes.append(Message("recording.ranks_input", name=name))
    return found
