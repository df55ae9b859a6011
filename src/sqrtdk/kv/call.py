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
    """One way to store k and v.

    Attributes:
        name: of the way, as reports show it.
        key: returns what is read back of the keys of one head.
        value: the same for values.
        normed: whether q and k are normalised before.
    """

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
    # A model with q/k norms shows already what the norm does.
    if call.call is None or call.call.norm is None:
        found.append(Storage(QK_NORM, stored_and_read(rms_normalised(k), dtype, scale, first), value, normed=True))
    return found, folded


def stored_and_read(x: Tensor, dtype: str, scale: str, first: int, by: Tensor | None = None) -> OneHead:
    """Return what is read back of k or v after it was stored in fewer bits, head by head.

    Args:
        x: (B, H, S, E) numbers.
        dtype: Name of the format, a key of `FORMATS`.
        scale: What shares a scale: a tensor, a head, a token, ...; or a fixed number.
        first: Number of tokens that are stored so; those after it stay exact.
        by: (H, 1, E) numbers to divide by before and multiply by after; None: none.
    """
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
        # The format rounds and clips as its engine does; what is read back differs from k by that alone.
        back = form.store(part, low, high)
        back = back if by is None else back * by[head : head + 1].double()
        return torch.cat([back, one[:, :, first:].double()], 2)[0, 0]

    return of_head


def channel_scale(call: CallTensors, first: int) -> tuple[Tensor, str]:
    """Return the largest |k| of each channel of each head, (H, 1, E), and a note.

    k is divided by it and q multiplied, so that the logits stay. Channels that a rotation turns together share the
    larger value, so that the scale can be moved into the weights of q and k.

    Args:
        call: The call.
        first: Number of keys that are stored in fewer bits.
    """
    k = call.key.values[:, :, :first]
    largest = k.abs().amax((0, 2))
    pairs = _pairs(call)
    if pairs is not None:
        one, other = pairs
        both = torch.maximum(largest[:, one], largest[:, other])
        # A rotation mixes the two channels of a pair, so that a scale commutes with it only if both have the same.
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
    """Return x / sqrt(mean(x^2)) over the last dimension, at least in float32; a row of zeros stays."""
    precise = in_float32(x)
    rms = precise.square().mean(-1, keepdim=True).sqrt()
    return precise / rms.masked_fill(rms == 0, 1.0)


BLOCK_LOGITS = 2**20  # 8 MiB in float64
# rows per call, by default
MOST_ROWS, LEAST_ROWS = 256, 16
ALL_LOGITS = 2**24  # of a call, for each storage


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """What to forecast.

    Attributes:
        dtype: name of the format, a key of `FORMATS`.
        scale: what shares a scale, such as "token"; or one fixed scale.
        rows: largest number of rows of a call that are computed; None: by the size of the call.
        residual: number of newest keys that stay exact.
    """

    dtype: str
    scale: str
    rows: int | None
    residual: int

    def rows_of(self, row: int) -> int:
        """Return the number of rows to compute.

        Args:
            row: Number of logits that one row has over all heads.
        """
        # Long contexts get fewer rows: the work grows with rows x keys x heads, and the mean over 16 rows is good
        # enough to rank the formats.
        return self.rows or min(MOST_ROWS, max(LEAST_ROWS, ALL_LOGITS // max(1, row)))


def unfit(call: CallTensors, request: ForecastRequest) -> str | None:
    """Return the reason why a call has no forecast; None if it has one."""
    if call.missing is not None or call.terms is None:
        return call.missing or Message("cache.reason.no_formula")
    k, v = call.key.values, call.value.values
    if k.dim() != 4 or not call.query.values.numel() or not k.numel() or not v.numel():
        return Message("cache.reason.no_numbers")
    # Dropout hides keys at random, and its errors would be added to those of the storage.
    if call.dropout:
        return Message("cache.reason.dropped")
    if k.shape[-2] <= request.residual:
        return Message("cache.reason.all_newest", keys=k.shape[-2], newest=request.residual)
    odd = [(name, x.shape[-1]) for name, x in (("k", k), ("v", v)) if x.shape[-1] % BLOCK_SIZE]
    if request.dtype == "q8_0" and odd:
        dims = joined([Message("cache.reason.dim", name=name, size=size) for name, size in odd], "and")
        return Message("cache.reason.no_blocks", block=BLOCK_SIZE, dims=dims)
    # One infinite key would set the scale of all others.
    if not all(bool(x.isfinite().all()) for x in (call.query.values, k, v)):
        return Message("cache.reason.not_finite")
    return None


def forecast_of(call: CallTensors, request: ForecastRequest) -> CacheCall:
    """Return how many bytes a cache in fewer bits takes for a call, and what errors it makes.

    Args:
        call: The call; `unfit(call, request)` must be None.
        request: Format and scale of the cache, and how many rows to compute.
    """
    call = as_cached(call)
    query, key = call.query.values, call.key.values
    batch, heads, length, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[-2]
    first = keys - request.residual
    rows = spread_rows(length, max(1, request.rows_of(heads * keys) // batch), query.device)
    found, folded = storages(call, request.dtype, request.scale, first)
    ways: list[StoredWay] = []
    seeing: tuple[int, ...] = ()
    for storage in found:
        sums = _errors(call, storage, rows)
        ways.append(StoredWay(storage.name, tuple(one.figures() for one in sums)))
        seeing = tuple(sum(len(part) for part in one.divergences) for one in sums)
    stored, *others = ways
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
    """Return the call with k and v as a cache stores them: each head once, even if the run repeated it for a group."""
    k, v = call.key.values, call.value.values
    times = 1 if call.call is None else k.shape[1] // max(1, call.call.kv_heads)
    if times < 2 or k.shape[1] != v.shape[1] or k.shape[1] % times:
        return call
    # repeat_kv copies each key head for its group, and a cache stores it before that; but a model may also have heads
    # that differ.
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
    """Return the errors of one way to store for every query head, from some rows of each."""
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
            # In blocks, as the logits of all rows in float64 would not fit in memory for a long context.
            for part in _row_blocks(rows, group * key.shape[-2]):
                place = RowsOfHeads(sequence, mine, part, length)
                q = query[sequence, mine][:, part].double()
                q = rms_normalised(q) if storage.normed else q
                exact = weigh_rows(q, k, terms, place)
                add(sums[mine], exact, _counting_rows_of(weigh_rows(q, k_stored, terms, place), exact), v, v_stored)
    return sums


def _counting_rows_of(stored: Weighed, exact: Weighed) -> Weighed:
    """Count only rows that see a key in the exact run; nothing is known of other rows."""
    # A stored key may be hidden where the exact one was seen (-inf after overflow); the rows that count stay the same,
    # so that such a row shows as an error.
    return Weighed(stored.logits, stored.weights, stored.lse, exact.seeing)


def _row_blocks(rows: Tensor, row: int) -> Iterator[Tensor]:
    """Yield the rows in blocks; `row` is the number of logits of one row of all heads."""
    step = max(1, BLOCK_LOGITS // max(1, row))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _unscaled(terms: Sequence[Term], width: int) -> list[Term]:
    """Replace the leading scales by 1/sqrt(E), as q and k have unit rows."""
    rest = list(terms)
    # The model's own scale, such as T5's 1.0, fits the sizes of its own q and k.
    while rest and rest[0].name == "scale":
        del rest[0]
    return [Term("scale", 1.0 / math.sqrt(width)), *rest]
