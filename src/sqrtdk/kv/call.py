"""The forecast for one attention: its rows are computed again in float64, with k and v as each storage returns them.

One key head of one sequence is computed at a time, in blocks of rows of at most `BLOCK_LOGITS` logits (at least one
row). Beside the tensors of the run, only that head's k and v and a dozen such blocks are in memory.

Storages of k and v: each grain of the format, a folded channel scale, and normalised q and k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.audit.cache import FOLD, QK_NORM, CacheCall, StoredWay
from sqrtdk.compare.infer.fit import fit_rotation
from sqrtdk.kv.blame import heads_at_fault, key_heads
from sqrtdk.kv.formats import BLOCK_SIZE, FORMATS, GRAINS, REDUCED_AXES, bounds, in_float32, limit_of
from sqrtdk.kv.rows import QueryHeadSums, RowsOfHeads, Weighed, add, weigh_rows
from sqrtdk.messages import Message, joined
from sqrtdk.tracing import CallTensors, Term

OneHead = Callable[[int, int], Tensor]  # (sequence, key head) -> (S, E) in float64


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: its name, and what it returns for k and v; `normed`: q and k are normalised before."""

    name: str
    key: OneHead
    value: OneHead
    normed: bool = False


def storages(call: CallTensors, dtype: str, scale: str, first: int) -> tuple[list[Storage], str]:
    """Return the requested storage, then the others; and which channels share a folded scale.

    Args:
        call: its tensors.
        dtype: the format.
        scale: the grain of its scales.
        first: number of keys that are stored; later keys stay in full precision.
    """
    k, v = call.key.values, call.value.values
    form = FORMATS[dtype]
    every = dict.fromkeys((scale, *form.grains))
    names = sorted(every, key=lambda name: (name != scale, GRAINS.index(name) if name in GRAINS else 0))
    found = [
        Storage(name, stored_and_read(k, dtype, name, first), stored_and_read(v, dtype, name, first)) for name in names
    ]
    by, folded = channel_scale(call, first)
    # Folding and normalisation act on q and k alone, so v keeps the requested storage.
    value = found[0].value
    found.append(Storage(FOLD, stored_and_read(k, dtype, scale, first, by), value))
    if call.call is None or call.call.norm is None:
        found.append(Storage(QK_NORM, stored_and_read(rms_normalised(k), dtype, scale, first), value, normed=True))
    return found, folded


def stored_and_read(x: Tensor, dtype: str, scale: str, first: int, by: Tensor | None = None) -> OneHead:
    """Return what is read back of k or v (B, H, S, E), head by head; `by` (H, 1, E): divide before, multiply after."""
    form, limit = FORMATS[dtype], limit_of(dtype, scale)
    grain = form.grains.get(scale, "fixed")

    def taken(part: Tensor, head: slice) -> Tensor:
        return part if by is None else part / by[head].to(part.dtype)

    # Scales of the whole tensor, a head or a channel need every sample and are computed once; finer grains are bounded
    # head by head, so that no second copy of k is in memory.
    shared = bounds(taken(x[:, :, :first], slice(None)), grain) if grain in REDUCED_AXES else None

    def of_head(batch: int, head: int) -> Tensor:
        one = x[batch : batch + 1, head : head + 1]
        part = taken(one[:, :, :first], slice(head, head + 1))
        if limit is not None:
            high = part.new_tensor(limit, dtype=torch.float64)  # the limit may overflow float16
            low = -high
        elif shared is None:
            low, high = bounds(part, grain)
        else:
            low, high = (edge[:, head : head + 1] if edge.shape[1] > 1 else edge for edge in shared)
        back = form.store(part, low, high)
        back = back if by is None else back * by[head : head + 1].double()
        return torch.cat([back, one[:, :, first:].double()], 2)[0, 0]

    return of_head


def channel_scale(call: CallTensors, first: int) -> tuple[Tensor, str]:
    """Return the largest |k| of each channel of each head, (H, 1, E); k is divided by it, and q multiplied.

    Channels that a rotation turns together share the larger value, so that the scale can be moved into the weights of q
    and k.
    """
    k = call.key.values[:, :, :first]
    largest = k.abs().amax((0, 2))
    pairs = _pairs(call)
    if pairs is not None:
        one, other = pairs
        both = torch.maximum(largest[:, one], largest[:, other])
        largest[:, one] = both
        largest[:, other] = both
    # a channel of zeros is divided by 1, which keeps it 0 and not NaN
    largest = largest.masked_fill(largest == 0, 1.0)[:, None]
    return largest, "channels" if pairs is None else "pairs"


def _pairs(call: CallTensors) -> tuple[Tensor, Tensor] | None:
    """Return the channels of k that a rotation turns together; None without a rotation, or if its layout is unknown."""
    before = call.key.projected
    for point in call.key.steps:
        if point.name == "rope" and before is not None and point.values is not None:
            fit = fit_rotation(before, point.values)
            if fit is None:
                return None
            rotation = fit.rotation
            turned = torch.arange(rotation.first, rotation.first + rotation.width, device=before.device)
            half = rotation.width // 2
            return (turned[:half], turned[half:]) if rotation.layout == "half" else (turned[::2], turned[1::2])
        before = point.values
    return None


def rms_normalised(x: Tensor) -> Tensor:
    """Scale each row (E numbers) to a root mean square of 1, as an RMS norm without a gain does."""
    precise = in_float32(x)
    rms = precise.square().mean(-1, keepdim=True).sqrt()
    return precise / rms.masked_fill(rms == 0, 1.0)


BLOCK_LOGITS = 2**20  # 8 MiB in float64
# rows per call, by default
MOST_ROWS, LEAST_ROWS = 256, 16
ALL_LOGITS = 2**24  # of a call, for each storage


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """A request: format, grain of its scales or one fixed scale, most rows per call, newest keys that stay exact.

    If `rows` is None, it is `MOST_ROWS`, or fewer, down to `LEAST_ROWS`, to stay below `ALL_LOGITS` logits.
    """

    dtype: str
    scale: str
    rows: int | None
    residual: int

    def rows_of(self, row: int) -> int:
        """Return the number of rows to compute if a row of all heads has `row` logits."""
        return self.rows or min(MOST_ROWS, max(LEAST_ROWS, ALL_LOGITS // max(1, row)))


def unfit(call: CallTensors, request: ForecastRequest) -> str | None:
    """Return why there is no forecast for a call; None if there is one."""
    if call.missing is not None or call.terms is None:
        return call.missing or Message("cache.reason.no_formula")
    k, v = call.key.values, call.value.values
    if k.dim() != 4 or not call.query.values.numel() or not k.numel() or not v.numel():
        return Message("cache.reason.no_numbers")
    if call.dropout:
        return Message("cache.reason.dropped")
    if k.shape[-2] <= request.residual:
        return Message("cache.reason.all_newest", keys=k.shape[-2], newest=request.residual)
    odd = [(name, x.shape[-1]) for name, x in (("k", k), ("v", v)) if x.shape[-1] % BLOCK_SIZE]
    if request.dtype == "q8_0" and odd:
        dims = joined([Message("cache.reason.dim", name=name, size=size) for name, size in odd], "and")
        return Message("cache.reason.no_blocks", block=BLOCK_SIZE, dims=dims)
    if not all(bool(x.isfinite().all()) for x in (call.query.values, k, v)):
        return Message("cache.reason.not_finite")
    return None


def forecast_of(call: CallTensors, request: ForecastRequest) -> CacheCall:
    """Return what a cache in fewer bits costs and errs for a call; `unfit(call, request)` must be None."""
    call = as_cached(call)
    query, key = call.query.values, call.key.values
    batch, heads, length, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[-2]
    first = keys - request.residual
    rows = spread_rows(length, max(1, request.rows_of(heads * keys) // batch), query.device)
    found, folded = storages(call, request.dtype, request.scale, first)
    told: list[StoredWay] = []
    seeing: tuple[int, ...] = ()
    for storage in found:
        sums = _errors(call, storage, rows)
        told.append(StoredWay(storage.name, tuple(one.figures() for one in sums)))
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
        blame=heads_at_fault(stored, others, described, seeing, limit),
        folded=folded,
    )


def as_cached(call: CallTensors) -> CallTensors:
    """Return the call with k and v as a cache stores them: each head once, even if the run repeated it."""
    k, v = call.key.values, call.value.values
    times = 1 if call.call is None else k.shape[1] // max(1, call.call.kv_heads)
    if times < 2 or k.shape[1] != v.shape[1] or k.shape[1] % times:
        return call
    once = [x[:, ::times] for x in (k, v)]
    if not all(torch.equal(one.repeat_interleave(times, 1), x) for one, x in zip(once, (k, v), strict=True)):
        return call
    return replace(call, key=replace(call.key, values=once[0]), value=replace(call.value, values=once[1]))


def spread_rows(length: int, most: int, device: torch.device | None = None) -> Tensor:
    """Return at most `most` rows of `length`, evenly spread, including the last.

    Example:
        >>> spread_rows(10, 3).tolist(), spread_rows(10, 1).tolist(), spread_rows(2, 8).tolist()
        ([0, 4, 9], [9], [0, 1])
    """
    if most == 1:
        return torch.tensor([length - 1], device=device)
    return torch.linspace(0, length - 1, min(length, most), dtype=torch.float64).long().to(device)


def _errors(call: CallTensors, storage: Storage, rows: Tensor) -> list[QueryHeadSums]:
    """Return the errors of a storage, for every query head."""
    assert call.terms is not None
    query, key, value = call.query.values, call.key.values, call.value.values
    batch, heads, length, width = query.shape
    group = heads // key.shape[1]
    sums = [QueryHeadSums() for _ in range(heads)]
    terms: Sequence[Term] = _unscaled(call.terms, width) if storage.normed else call.terms
    for sequence in range(batch):
        for head in range(key.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            k, v = key[sequence, head].double(), value[sequence, head].double()
            k = rms_normalised(k) if storage.normed else k
            k_stored, v_stored = storage.key(sequence, head), storage.value(sequence, head)
            for part in _row_blocks(rows, group * key.shape[-2]):
                place = RowsOfHeads(sequence, mine, part, length)
                q = query[sequence, mine][:, part].double()
                q = rms_normalised(q) if storage.normed else q
                exact = weigh_rows(q, k, terms, place)
                add(sums[mine], exact, _counting_rows_of(weigh_rows(q, k_stored, terms, place), exact), v, v_stored)
    return sums


def _counting_rows_of(stored: Weighed, exact: Weighed) -> Weighed:
    """Count only rows that see a key in the exact run; nothing is known of other rows."""
    return Weighed(stored.logits, stored.weights, stored.lse, exact.seeing)


def _row_blocks(rows: Tensor, row: int) -> Iterator[Tensor]:
    """Yield the rows in blocks; `row` is the number of logits of one row of all heads."""
    step = max(1, BLOCK_LOGITS // max(1, row))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _unscaled(terms: Sequence[Term], width: int) -> list[Term]:
    """Replace the leading scales by 1/sqrt(E), as q and k have unit rows."""
    kept = list(terms)
    # The model's own scale, such as T5's 1.0, fits the sizes of its own q and k.
    while kept and kept[0].name == "scale":
        del kept[0]
    return [Term("scale", 1.0 / math.sqrt(width)), *kept]
