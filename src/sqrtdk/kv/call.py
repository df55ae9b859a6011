"""The forecast for one attention: its rows again, in float64, with k and v as each way stores them.

One key head of one sequence is computed at a time, in blocks of rows of at most `BLOCK_LOGITS` logits (of one row at
least): beside the tensors of the run, that head's k and v and a dozen such blocks are all that is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.audit.cache import CacheCall, StoredWay
from sqrtdk.kv.blame import blamed, key_heads
from sqrtdk.kv.formats import BLOCK, limit_of
from sqrtdk.kv.rows import Place, Sums, Weighed, add, weigh
from sqrtdk.kv.ways import Way, normalised, ways
from sqrtdk.tracing import CallTensors, Term

BLOCK_LOGITS = 2**20  # 8 MiB in float64
MOST_ROWS, LEAST_ROWS = 256, 16
ALL_LOGITS = 2**24  # of a call, for each way to store


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: the format, the grain of its scales or one fixed scale, most rows a call, newest exact keys.

    Without a number of rows it is `MOST_ROWS`, and fewer, down to `LEAST_ROWS`, where they pass `ALL_LOGITS` logits.
    """

    dtype: str
    scale: str
    rows: int | None
    residual: int

    def rows_of(self, row: int) -> int:
        """How many rows to compute where all heads have `row` logits each."""
        return self.rows or min(MOST_ROWS, max(LEAST_ROWS, ALL_LOGITS // max(1, row)))


def unfit(call: CallTensors, request: Request) -> str | None:
    """Why there is no forecast for a call; None where there is one."""
    if call.missing is not None or call.terms is None:
        return call.missing or "its formula is not known"
    k, v = call.key.values, call.value.values
    if k.dim() != 4 or not call.query.values.numel() or not k.numel() or not v.numel():
        return "it has no numbers"
    if call.dropout:
        return "its weights were dropped at random"
    odd = [f"{name} has {x.shape[-1]}" for name, x in (("k", k), ("v", v)) if x.shape[-1] % BLOCK]
    if k.shape[-2] <= request.residual:
        return f"all of its {k.shape[-2]} keys are among the newest {request.residual}, in full precision"
    if request.dtype == "q8_0" and odd:
        return f"q8_0 stores blocks of {BLOCK} channels, {' and '.join(odd)}: llama.cpp refuses such heads"
    if not all(bool(x.isfinite().all()) for x in (call.query.values, k, v)):
        return "q, k or v holds NaN or infinity"
    return None


def forecast_of(call: CallTensors, request: Request) -> CacheCall:
    """The forecast for a call that is fit for one."""
    call = as_cached(call)
    query, key = call.query.values, call.key.values
    batch, heads, length, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[-2]
    first = keys - request.residual
    rows = spread_rows(length, max(1, request.rows_of(heads * keys) // batch), query.device)
    found, folded = ways(call, request.dtype, request.scale, first)
    told: list[StoredWay] = []
    seeing: tuple[int, ...] = ()
    for way in found:
        sums = _errors(call, way, rows)
        told.append(StoredWay(way.name, tuple(one.figures() for one in sums)))
        seeing = tuple(sum(len(part) for part in one.divergences) for one in sums)
    stored, *others = told
    limit = limit_of(request.dtype, request.scale)
    described = key_heads(key[:, :, :first], call.value.values[:, :, :first], limit)
    return CacheCall(
        site=call.site,
        index=call.index,
        kv_heads=kv_heads,
        head_dim=width,
        key_len=keys,
        stored_keys=first,
        rows=batch * len(rows),
        rows_of=batch * length,
        seeing_rows=seeing,
        stored=stored,
        others=tuple(others),
        keys=described,
        blame=blamed(stored, others, described, seeing, limit),
        folded=folded,
    )


def as_cached(call: CallTensors) -> CallTensors:
    """The call with k and v as a cache has them: each head once, where the run repeated it for its query heads."""
    k, v = call.key.values, call.value.values
    times = 1 if call.call is None else k.shape[1] // max(1, call.call.kv_heads)
    if times < 2 or k.shape[1] != v.shape[1] or k.shape[1] % times:
        return call
    once = [x[:, ::times] for x in (k, v)]
    if not all(torch.equal(one.repeat_interleave(times, 1), x) for one, x in zip(once, (k, v), strict=True)):
        return call
    return replace(call, key=replace(call.key, values=once[0]), value=replace(call.value, values=once[1]))


def spread_rows(length: int, most: int, device: torch.device | None = None) -> Tensor:
    """At most `most` rows of `length`, evenly spread, the last among them.

    Example:
        >>> spread_rows(10, 3).tolist(), spread_rows(10, 1).tolist(), spread_rows(2, 8).tolist()
        ([0, 4, 9], [9], [0, 1])
    """
    if most == 1:
        return torch.tensor([length - 1], device=device)
    return torch.linspace(0, length - 1, min(length, most), dtype=torch.float64).long().to(device)


def _errors(call: CallTensors, way: Way, rows: Tensor) -> list[Sums]:
    """What a way does to every query head."""
    assert call.terms is not None
    query, key, value = call.query.values, call.key.values, call.value.values
    batch, heads, length, width = query.shape
    group = heads // key.shape[1]
    sums = [Sums() for _ in range(heads)]
    terms: Sequence[Term] = _unscaled(call.terms, width) if way.normed else call.terms
    for sequence in range(batch):
        for head in range(key.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            k, v = key[sequence, head].double(), value[sequence, head].double()
            k = normalised(k) if way.normed else k
            k_stored, v_stored = way.key(sequence, head), way.value(sequence, head)
            for part in _parts(rows, group * key.shape[-2]):
                place = Place(sequence, mine, part, length)
                q = query[sequence, mine][:, part].double()
                q = normalised(q) if way.normed else q
                exact = weigh(q, k, terms, place)
                add(sums[mine], exact, _seen(weigh(q, k_stored, terms, place), exact), v, v_stored)
    return sums


def _seen(stored: Weighed, exact: Weighed) -> Weighed:
    """Of a row that sees no key nothing is known on either side."""
    return Weighed(stored.logits, stored.weights, stored.lse, exact.seeing)


def _parts(rows: Tensor, row: int) -> Iterator[Tensor]:
    """The rows in blocks; `row` logits are one row of all heads."""
    step = max(1, BLOCK_LOGITS // max(1, row))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _unscaled(terms: Sequence[Term], width: int) -> list[Term]:
    """The terms with 1/sqrt(E) in place of the scales before any other: q and k have unit rows then."""
    kept = list(terms)
    while kept and kept[0].name == "scale":
        del kept[0]
    return [Term("scale", 1.0 / math.sqrt(width)), *kept]
