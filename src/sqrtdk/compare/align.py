"""Pairs the calls of A and B: by the user's map, by site, then by order, numbers in the path and shapes.

Paired calls are made comparable: the same rows and heads, query heads in the order of their projection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk import _files
from sqrtdk._records import parse_json
from sqrtdk.compare.records import Unpaired
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.recording.cut import cut_call
from sqrtdk.recording.records import Cut
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tensors import CallTensors, Projection, Term, Vector, Waypoint

_ROW_TOLERANCE = 1e-3  # relative difference up to which two rows of q or k are equal
# Evidence that two calls belong together. Equal vectors outweigh everything else: a port may rename and renumber all.
_EVIDENCE = {"vectors": 4.0, "numbers": 2.0, "name": 1.0, "shape": 0.5}
_MOST_MAP_BYTES = 2**20  # bytes of a map file


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which calls of A and B belong together, by index into the lists of calls.

    Attributes:
        pairs: (index in A, index in B), in A's order.
        alone_a: indices in A without a partner, ascending.
        alone_b: indices in B without a partner, ascending.
    """

    pairs: tuple[tuple[int, int], ...]
    alone_a: tuple[int, ...]
    alone_b: tuple[int, ...]


def name_of(call: CallTensors | AttentionCall) -> str:
    """Return the module path of a call, with the number of the call unless that is 0: "layers.0.attn#1"."""
    return call.site if not call.index else f"{call.site}#{call.index}"


def once_a_site(missed: Sequence[Unpaired]) -> tuple[Unpaired, ...]:
    """Return one entry for each site and reason, the one with the shortest formula, in the order of first appearance.

    A recurrence gives such an entry for each of its steps.
    """
    found: dict[tuple[str, str], Unpaired] = {}
    for entry in missed:
        known = found.setdefault((entry.site, entry.reason), entry)
        if len(entry.formula or "") < len(known.formula or ""):
            found[entry.site, entry.reason] = entry
    return tuple(found.values())


def align(a: Sequence[CallTensors], b: Sequence[CallTensors], mapping: Mapping[str, str]) -> Alignment:
    """Pair the calls of both sides: by the map, then by equal names, then in order by likeness.

    The last step keeps the order of both lists and maximises evidence: equal vectors, numbers in the path, the last
    part of the path. Calls of unequal sizes (`sizes_of`) are paired only by the map.

    Args:
        a: calls of A, in the order in which they ran.
        b: calls of B, in the order in which they ran.
        mapping: names in A to names in B, as `name_of` writes them: "site", or "site#index" for a call other than the
            first.

    Returns:
        The pairs and the calls without a partner.

    Raises:
        InvalidValueError: the map names a site that does not exist, or a site of B twice.
    """
    pairs = _mapped(a, b, mapping)
    # Calls of one name but unequal sizes are no pair; `_in_order` may still find a partner for each.
    by_name = {name_of(call): j for j, call in enumerate(b)}
    for i, call in enumerate(a):
        j = by_name.get(name_of(call))
        if i not in pairs and j is not None and j not in pairs.values() and sizes_of(call) == sizes_of(b[j]):
            pairs[i] = j
    left_a, left_b = (
        [i for i in range(len(calls)) if i not in used] for calls, used in ((a, pairs), (b, pairs.values()))
    )
    pairs |= _in_order([a[i] for i in left_a], [b[j] for j in left_b], left_a, left_b)
    alone_b = tuple(j for j in left_b if j not in pairs.values())
    return Alignment(tuple(sorted(pairs.items())), tuple(i for i in left_a if i not in pairs), alone_b)


def _mapped(a: Sequence[CallTensors], b: Sequence[CallTensors], mapping: Mapping[str, str]) -> dict[int, int]:
    places = [{name_of(call): i for i, call in enumerate(calls)} for calls in (a, b)]
    pairs: dict[int, int] = {}
    for source, target in mapping.items():
        for side, name, known in (("A", source, places[0]), ("B", target, places[1])):
            if name not in known:
                near = ", ".join(list(known)[:8]) or "none"
                raise InvalidValueError(
                    f"the map names {name!r}, and {side} has no such attention",
                    hint=f"{side} has: {near}{', ...' if len(known) > 8 else ''}.",
                )
        if places[1][target] in pairs.values():
            raise InvalidValueError(f"the map names {target!r} of B twice", hint="A call has one partner.")
        pairs[places[0][source]] = places[1][target]
    return pairs


def sizes_of(call: CallTensors) -> tuple[int, ...]:
    """Return the sizes (batch, query heads, queries, keys) of a call; () if there is no record and q is not 4-D."""
    record = call.call
    if record is not None:
        return record.batch, record.heads, record.query_len, record.key_len
    query = call.query.values
    return (*query.shape[:3], call.key.values.shape[2]) if query.dim() == 4 else ()


def _in_order(
    a: Sequence[CallTensors], b: Sequence[CallTensors], places_a: Sequence[int], places_b: Sequence[int]
) -> dict[int, int]:
    """Return the pairing of two sequences that keeps their order and has the largest total worth."""
    # Longest common subsequence by dynamic programming, with `_worth` as weights.
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    worth = [[_worth(one, other) for other in b] for one in a]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            skip = max(best[i + 1][j], best[i][j + 1])
            best[i][j] = max(skip, best[i + 1][j + 1] + worth[i][j]) if worth[i][j] > 0 else skip
    pairs: dict[int, int] = {}
    i = j = 0
    while i < len(a) and j < len(b):
        if worth[i][j] > 0 and best[i][j] == best[i + 1][j + 1] + worth[i][j]:
            pairs[places_a[i]] = places_b[j]
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _worth(one: CallTensors, other: CallTensors) -> float:
    """Return the evidence that two calls belong together; 0 if their shapes rule it out."""
    if sizes_of(one) != sizes_of(other):
        return 0.0
    worth = _EVIDENCE["shape"]
    if _numbers(one.site) == _numbers(other.site):
        worth += _EVIDENCE["numbers"]
    # "layers.3.self_attn" and "decoder.3.self_attn": a port that renamed only what is around
    if one.site.rpartition(".")[2] == other.site.rpartition(".")[2]:
        worth += _EVIDENCE["name"]
    return worth + (_EVIDENCE["vectors"] if _same_vectors(one, other) else 0.0)


def _numbers(site: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", site))


def _same_vectors(one: CallTensors, other: CallTensors) -> bool:
    """Return whether v, or q or k as far as known before any step, is equal on both sides."""
    for name in ("value", "query", "key"):
        x, y = getattr(one, name).values, getattr(other, name).values
        if x.shape == y.shape and x.numel() and not (x.is_meta or y.is_meta):
            # four rows of one head are enough to tell calls apart, and cost nothing beside a whole comparison
            x, y = x[0, 0, :4].double(), y[0, 0, :4].double()
            if bool((x - y).norm() <= _ROW_TOLERANCE * x.norm()) and bool(torch.isfinite(x).all()):
                return True
    return False


# -- calls made comparable ---------------------------------------------------------------------------------------------


def cut_alike(a: CallTensors, b: CallTensors, cut_a: Cut | None, cut_b: Cut | None) -> tuple[CallTensors, CallTensors]:
    """Return both calls with the same rows and heads.

    A trace file may hold only a part of a call. If exactly one side was cut, the other side's call is reduced to that
    part; else both are returned unchanged.

    Args:
        a: call of A.
        b: call of B.
        cut_a: rows and heads that A's file holds; None if its call is complete.
        cut_b: rows and heads that B's file holds; None if its call is complete.
    """
    if cut_a is not None and cut_b is None:
        b = _cut(b, cut_a)
    elif cut_b is not None and cut_a is None:
        a = _cut(a, cut_b)
    return a, b


def _cut(call: CallTensors, cut: Cut) -> CallTensors:
    if call.query.values.dim() != 4:
        return call
    count = call.query.values.shape[1]
    heads = None if cut.heads is None or cut.heads_of != count else cut.heads
    return cut_call(call, cut.rows, heads)[0]


def in_order(call: CallTensors) -> CallTensors:
    """Return the call with its query heads in the order of the features that they were projected to.

    Code that computes a group of query heads at once may order them freely next to their shared keys. Only the order
    of the projection is common to both sides. The call itself is returned if it is in this order, if its projection is
    unknown, or if no heads share keys.
    """
    projection = call.query.projection
    count = call.query.values.shape[1] if call.query.values.dim() == 4 else 0
    if projection is None or call.missing is not None or not _shares(call, count):
        return call
    first = projection.features[:, 0]
    order = first.argsort()
    # already in order, or heads of one projection under several numbers
    if bool((order == torch.arange(count, device=order.device)).all()) or len(set(first.tolist())) < count:
        return call

    def permuted(tensor: Any, axis: int = 1) -> Any:
        """Return the heads of an axis in order; shared heads are repeated, an axis without heads and None stay."""
        if tensor is None or axis < 0 or tensor.shape[axis] == 1 or count % tensor.shape[axis]:
            return tensor
        repeated = tensor.repeat_interleave(count // tensor.shape[axis], axis)
        return repeated.index_select(axis, order.to(tensor.device))

    def term(old: Term) -> Term:
        if not isinstance(old.value, Tensor):
            return old
        return replace(old, value=permuted(old.value, 0 if old.name == "sinks" else old.value.dim() - 3))

    def vector(old: Vector) -> Vector:
        known, factor = old.projection, old.factor
        if known is not None:
            weight, bias = permuted(known.weight, 0), permuted(known.bias, 0)
            known = Projection(known.name, known.input, weight, bias, permuted(known.features, 0))
        return replace(
            old,
            values=permuted(old.values),
            factor=permuted(factor) if isinstance(factor, Tensor) and factor.dim() == 4 else factor,
            projected=permuted(old.projected),
            steps=tuple(Waypoint(step.name, step.detail, permuted(step.values)) for step in old.steps),
            projection=known,
        )

    return replace(
        call,
        query=vector(call.query),
        key=vector(call.key),
        value=vector(call.value),
        output=permuted(call.output),
        lse=permuted(call.lse),
        kept=None if call.kept is None else permuted(call.kept, call.kept.dim() - 3),
        terms=None if call.terms is None else tuple(map(term, call.terms)),
    )


def _shares(call: CallTensors, count: int) -> bool:
    """Return whether query heads share keys."""
    projection = call.key.projection
    if call.key.values.shape[1] < count:
        return True
    return projection is not None and len({tuple(row) for row in projection.features.tolist()}) < count


# -- the map that a user gives -----------------------------------------------------------------------------------------


def read_map(mapping: Mapping[str, str] | str | Path | None) -> dict[str, str]:
    """Return the map from names in A to names in B as a new dict; {} for None.

    Args:
        mapping: a mapping, or the path of a JSON file that holds one, of at most 1 MiB.

    Raises:
        InvalidValueError: the file can't be read or is too large, or it is not an object of texts to texts.
    """
    if mapping is None:
        return {}
    hint = Message("errors.hint.map")
    if isinstance(mapping, str | Path):
        path = Path(mapping)
        try:
            if path.stat().st_size > _MOST_MAP_BYTES:
                raise InvalidValueError(
                    Message("errors.map.too_large", path=str(path), limit=_MOST_MAP_BYTES), hint=hint
                )
            mapping = parse_json(path.read_bytes(), f"the map {path}", InvalidValueError, hint)
        except OSError as error:
            raise InvalidValueError(
                Message("errors.map.unreadable", path=str(path), reason=_files.os_reason(error)), hint=hint
            ) from error
    if not isinstance(mapping, Mapping) or not all(isinstance(x, str) for pair in mapping.items() for x in pair):
        raise InvalidValueError(Message("errors.map.no_names"), hint=hint)
    return dict(mapping)


def other_shapes(a: CallTensors, b: CallTensors) -> Message | None:
    """Return why two calls can't be compared as one attention; None if they can.

    The number of heads of q is compared first, then the whole shapes of q and of the output.
    """
    one, other = a.query.values.shape, b.query.values.shape
    if one[1] != other[1]:
        return Message("compare.pair.heads", heads=one[1], other=other[1])
    if one == other and a.output.shape == b.output.shape:
        return None
    shapes = {"shape": one, "other": other, "out": a.output.shape, "out_b": b.output.shape}
    return Message("compare.pair.shapes", **{name: f"{tuple(shape)}" for name, shape in shapes.items()})
