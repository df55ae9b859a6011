"""Which call of A belongs to which of B: by the map that was given, by site, and by order, numbers and shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tensors import CallTensors

_ALIKE = 1e-3  # of two rows of q or k that are one and the same, the relative difference at most
_WORTH = {"vectors": 4.0, "numbers": 2.0, "name": 1.0, "shape": 0.5}
_LARGEST = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Alignment:
    """Pairs of positions in the calls of A and of B, in A's order, and the positions that are left."""

    pairs: tuple[tuple[int, int], ...]
    alone_a: tuple[int, ...]
    alone_b: tuple[int, ...]


def name_of(call: CallTensors | AttentionCall) -> str:
    """The site, with the index where it is not the first: "layers.0.attn#1"."""
    return call.site if not call.index else f"{call.site}#{call.index}"


def align(a: Sequence[CallTensors], b: Sequence[CallTensors], mapping: Mapping[str, str]) -> Alignment:
    """Pair the calls of both sides.

    Args:
        a: calls of A.
        b: calls of B.
        mapping: from a site of A to one of B, "site#index" for others than the first.

    Raises:
        InvalidValueError: the map names a site that is not there.
    """
    pairs = _mapped(a, b, mapping)
    by_name = {name_of(call): j for j, call in enumerate(b)}
    for i, call in enumerate(a):
        j = by_name.get(name_of(call))
        if i not in pairs and j is not None and j not in pairs.values() and _fits(call, b[j]):
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


def _shape(call: CallTensors) -> tuple[int, ...]:
    record = call.call
    if record is not None:
        return record.batch, record.heads, record.query_len, record.key_len
    query = call.query.values
    return (*query.shape[:3], call.key.values.shape[2]) if query.dim() == 4 else ()


def _fits(one: CallTensors, other: CallTensors) -> bool:
    return _shape(one) == _shape(other)


def _in_order(
    a: Sequence[CallTensors], b: Sequence[CallTensors], places_a: Sequence[int], places_b: Sequence[int]
) -> dict[int, int]:
    """The pairing of two sequences that keeps their order and is worth most."""
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
    """How much speaks for two calls being one; 0 where their shapes can't be."""
    if not _fits(one, other):
        return 0.0
    worth = _WORTH["shape"]
    if _numbers(one.site) == _numbers(other.site):
        worth += _WORTH["numbers"]
    if one.site.rpartition(".")[2] == other.site.rpartition(".")[2]:
        worth += _WORTH["name"]
    return worth + (_WORTH["vectors"] if _same_vectors(one, other) else 0.0)


def _numbers(site: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", site))


def _same_vectors(one: CallTensors, other: CallTensors) -> bool:
    """Whether v, or as much of q and k as is known before any step, is the same on both sides."""
    return any(_near(getattr(one, name).values, getattr(other, name).values) for name in ("value", "query", "key"))


def _near(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or not x.numel():
        return False
    x, y = x[0, 0, :4].double(), y[0, 0, :4].double()
    return bool((x - y).norm() <= _ALIKE * x.norm()) and bool(torch.isfinite(x).all())


# -- the map that a user gives -----------------------------------------------------------------------------------------


def read_map(mapping: Mapping[str, str] | str | Path | None) -> dict[str, str]:
    """The map of sites, from a mapping or a JSON file.

    Raises:
        InvalidValueError: it is no JSON object of names to names.
    """
    if mapping is None:
        return {}
    hint = 'Write an object of names: {"layers.0.attn": "h.0.attn"}.'
    if isinstance(mapping, str | Path):
        path = Path(mapping)
        try:
            if path.stat().st_size > _LARGEST:
                raise InvalidValueError(f"the map {path} has more than {_LARGEST} bytes", hint=hint)
            mapping = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        except OSError as error:
            raise InvalidValueError(f"the map {path} can't be read: {error.strerror}", hint=hint) from error
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise InvalidValueError(f"the map {path} is no JSON", hint=hint) from error
    if not isinstance(mapping, Mapping) or not all(isinstance(x, str) for pair in mapping.items() for x in pair):
        raise InvalidValueError("the map is no object of names", hint=hint)
    return dict(mapping)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names are there once: of two partners none is the one that is meant."""
    once: dict[str, Any] = {}
    for name, value in pairs:
        if name in once:
            raise InvalidValueError(f"the map names {name[:200]!r} of A twice", hint="A call has one partner.")
        once[name] = value
    return once
