"""Attentions of several ranks as one: formula, mask over the positions of all ranks, statistics over all keys.

Every rank takes part in every exchange, and computes the same records from the same figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.model_run import WholeCalls
from sqrtdk.audit.records import AttentionSplit
from sqrtdk.masks.band import TRIANGLES, mask_pattern, mask_reach
from sqrtdk.messages import Message
from sqrtdk.ranks.group import RankGroup
from sqrtdk.ranks.order import TokenOrder, order_of, positions_in
from sqrtdk.ranks.share import AttentionShare, share_of, weight_ahead
from sqrtdk.ranks.split import RowGroup, WholeAttention, whole_attentions
from sqrtdk.ranks.tokens import prints_of, run_start
from sqrtdk.stats import Histogram, RowStats, head_stats
from sqrtdk.tracing import AttentionCall, EffectiveScale, Mask, NotMeasured, Stage, Trace
from sqrtdk.tracing.calls.blocks import formula_of_blocks, scale_of_blocks, scales_are_alike
from sqrtdk.tracing.records import KeyBlock, numbers_by_site

# "rope(q).k": what k went through lies before the collective that brought it.
_K_ALONE = re.compile(r"(?<=q\))\.k\b")
_Shares = Sequence[dict[tuple[str, int], AttentionShare | None]]


@dataclass(frozen=True, slots=True, eq=False)
class _RowsOfAll:
    """The rows of one group: their shares, the keys that they see, and the order of the tokens."""

    group: RowGroup
    shares: tuple[AttentionShare, ...]
    visible: Tensor | None
    order: TokenOrder


def whole_calls(trace: Trace, inputs: Any, ranks: RankGroup) -> WholeCalls:
    """Put the attentions of this rank together with those of the others. Every rank must call this.

    Args:
        trace: A trace that has ended, with `keep`.
        inputs: The inputs of the model on this rank, which may hold the positions of its tokens.
        ranks: The ranks.

    Raises:
        RanksError: A rank raised, or did not arrive.
    """
    prints = prints_of(trace.calls, trace.tensors)
    places = {one.key: positions_in(inputs, len(one.rows)) for one in prints}
    told = ranks.gather((prints, places, trace.ranks > 1))
    wholes = whole_attentions([prints for prints, _, _ in told], any(exchange for _, _, exchange in told))
    mine = [one for one in wholes if ranks.rank in one.ranks and one.joins]
    wanted = {(one.site, one.number) for one in mine}
    shares: _Shares = ranks.gather(
        {one.key: share_of(one, trace.calls, trace.tensors) for one in prints if one.key in wanted}
    )
    given = [places for _, places, _ in told]
    rows = {(one.site, one.number): _rows_of_all(one, shares, given) for one in mine}
    ahead = _ahead(rows, trace, ranks)
    found: dict[int, tuple[AttentionCall, AttentionSplit]] = {}
    missed: list[NotMeasured] = []
    left_out: set[int] = set()
    own = {one.key: one for one in prints}
    for one in wholes:
        if ranks.rank not in one.ranks:
            continue
        # Of a rank that does the same as another, its own calls: it may have made more of them before.
        first, *others = [block.call for block in own[one.site, one.number].blocks]
        key, call, order = (one.site, one.number), trace.calls[first], ""
        joined = rows.get(key)
        if joined is not None:
            weight = [told.get(key) for told in ahead]
            known = [one for one in weight if one is not None]
            call, order = _one_call(joined, known if len(known) > 0 else None)
            left_out |= set(others)
            if call.part_of_row:
                missed.append(NotMeasured(one.site, Message("ranks.order_unknown")))
        elif key in wanted:
            missed.append(NotMeasured(one.site, Message("ranks.not_joined")))
        found[first] = call, AttentionSplit(one.site, 0, one.ranks, one.ways, order)
    pairs = []
    for at, call in enumerate(trace.calls):
        if at not in left_out:
            alone = AttentionSplit(call.site, 0, (ranks.rank,), ())
            call, split = found.get(at, (call, alone))
            gathered = trace.calls[at].part_of_row == "gathered"
            pairs.append(
                (replace(call, formula=_K_ALONE.sub(".gathered(k)", call.formula)) if gathered else call, split)
            )
    numbers = [*numbers_by_site(call.site for call, _ in pairs)]
    in_blocks = {site for (site, _), joined in rows.items() if joined is not None and _most_blocks(joined) > 1}
    return WholeCalls(
        tuple(replace(call, index=number) for (call, _), number in zip(pairs, numbers, strict=True)),
        tuple(replace(split, index=number) for (_, split), number in zip(pairs, numbers, strict=True)),
        tuple(dict.fromkeys(missed)),
        frozenset(in_blocks),
    )


def _most_blocks(joined: list[list[_RowsOfAll]]) -> int:
    """Return the largest number of blocks of keys that a rank's rows meet."""
    return max(len(share.calls) for heads in joined for part in heads for share in part.shares)


def _rows_of_all(
    whole: WholeAttention, shares: _Shares, given: Sequence[dict[Any, Any]]
) -> list[list[_RowsOfAll]] | None:
    """Return the rows of each group, by batch and heads; None if they can't be put together."""
    key = whole.site, whole.number
    found: list[list[_RowsOfAll]] = []
    for heads in whole.batches:
        found.append([])
        for group in heads:
            known = [shares[member.rank].get(key) for member in group.members]
            if not group.keys or any(one is None for one in known):
                return None
            parts = tuple(one for one in known if one is not None)
            # Rows whose sums go to other ranks have keys there, even if none of these is here.
            if len(parts) == 1 and any(call.part_of_row == "summed" for call in parts[0].calls):
                return None
            if not scales_are_alike([call.scale for part in parts for call in part.calls[:1]]):
                return None
            visible = _visible(group, parts)
            lengths = [len(member.printed.rows) for member in group.members]
            places = [given[member.rank].get(key) for member in group.members]
            order = order_of(lengths, len(group.keys), places, group.own, visible)
            found[-1].append(_RowsOfAll(group, parts, visible, order))
    return found


def _visible(group: RowGroup, shares: Sequence[AttentionShare]) -> Tensor | None:
    """Return the keys that the rows of all ranks see, (b, h, L, S), rank after rank; None if they see all."""
    packed = [[None if mask is None else mask.unpacked() for mask in share.visible] for share in shares]
    lead = [1, 1]
    for mask in (mask for masks in packed for mask in masks if mask is not None):
        lead = [max(a, b) for a, b in zip(lead, mask.shape[:2], strict=True)]
    total = sum(len(member.printed.rows) for member in group.members)
    visible = torch.zeros(*lead, total, len(group.keys), dtype=torch.bool)
    start = 0
    for member, masks in zip(group.members, packed, strict=True):
        for block, seen in zip(member.printed.blocks, masks, strict=True):
            key, row = run_start(block.keys, group.keys) or 0, start + block.rows[0]
            met = visible[:, :, row : row + block.rows[1], key : key + len(block.keys)]
            met |= torch.tensor(True) if seen is None else seen
        start += len(member.printed.rows)
    return None if bool(visible.all()) else visible


def _ahead(rows: Any, trace: Trace, ranks: RankGroup) -> list[dict[Any, tuple[float, int]]]:
    """Return, from every rank, the weight of its rows on later keys, where the mask shows any."""
    own: dict[Any, tuple[float, int]] = {}
    for key, joined in rows.items():
        for part in (part for heads in joined or () for part in heads):
            shown = part.visible is None or _pattern(part) not in TRIANGLES
            if not shown or part.order.name == "unknown" or len(part.order.rows) != len(part.order.keys):
                continue
            start = 0
            for member, share in zip(part.group.members, part.shares, strict=True):
                if member.rank == ranks.rank:
                    later = []
                    for block in member.printed.blocks:
                        row, at = start + block.rows[0], run_start(block.keys, part.group.keys) or 0
                        i = part.order.rows[row : row + block.rows[1]]
                        later.append(part.order.keys[at : at + len(block.keys)] > i[:, None])
                    own[key] = weight_ahead(member.printed, trace.tensors, share, later)
                start += len(member.printed.rows)
    return ranks.gather(own)


def _pattern(part: _RowsOfAll) -> str | None:
    return None if part.visible is None else mask_pattern(part.order.sorted(part.visible))


def _one_call(joined: list[list[_RowsOfAll]], ahead: Sequence[tuple[float, int]] | None) -> tuple[AttentionCall, str]:
    """Return the record of an attention of several ranks, and the order of its tokens."""
    parts = [part for heads in joined for part in heads]
    shares = [share for part in parts for share in part.shares]
    first, calls = shares[0].calls[0], [call for share in shares for call in share.calls]
    rows = _cat([_cat([_cat([s.rows for s in part.shares], 2) for part in heads], 1) for heads in joined], 0)
    batch, heads, length = rows.keys.shape
    keys = len(parts[0].group.keys)
    order = parts[0].order.name
    visible = None
    if any(part.visible is not None for part in parts):
        full = torch.ones(1, 1, length, keys, dtype=torch.bool)
        masks = [[full if p.visible is None else p.order.sorted(p.visible) for p in heads] for heads in joined]
        visible = _together([_together(row, 1, [p.shares[0].rows.keys.shape[1] for p in heads])
                             for row, heads in zip(masks, joined, strict=True)], 0,
                            [heads[0].shares[0].rows.keys.shape[0] for heads in joined])  # fmt: skip
    squares, count = (sum(values) for values in zip(*(share.squares for share in shares), strict=True))
    self_attention = next((call.self_attention for call in calls if call.self_attention), first.self_attention)
    stats = head_stats(rows, logit_histograms=_histograms(joined))
    weight = None if ahead is None else sum(w for w, _ in ahead) / max(1, sum(n for _, n in ahead))
    known = [call.max_product for call in calls if call.max_product is not None]
    scale, blocks = _scale(joined)
    made = replace(
        first,
        batch=batch,
        heads=heads,
        # Ranks with fewer key heads than ranks have copies of them.
        kv_heads=sum({part.group.keys: part.shares[0].calls[0].kv_heads for part in joined[0]}.values()),
        query_len=length,
        key_len=keys,
        self_attention=self_attention,
        scale=scale,
        blocks=blocks,
        mask=_mask(calls, visible, batch * heads),
        future_weight=weight,
        max_product=max(known, default=None),
        output_rms=math.sqrt(squares / count) if count else None,
        unknown=tuple(dict.fromkeys(name for call in calls for name in call.unknown)),
        faults=tuple(dict.fromkeys(fault for call in calls for fault in call.faults)),
        stats=stats,
        stats_reason=None,
        part_of_row="unordered" if order == "unknown" else None,
    )
    if (most := _most_blocks(joined)) > 1:
        joined_stage = Stage("logits", "joined", Message("trace.step.blocks_of_keys", count=most))
        made = replace(made, stages=(*first.stages, joined_stage))
    split = any(len(part.group.members) > 1 or part.shares[0].calls[0].part_of_row for part in parts)
    return replace(made, formula=formula_of_blocks(made)), order if split else ""


def _cat(rows: Sequence[RowStats], dim: int) -> RowStats:
    """Return the rows of several groups, along batch, heads or rows."""
    names = RowStats.__dataclass_fields__
    return RowStats(*(torch.cat([getattr(one, name) for one in rows], dim) for name in names))


def _together(masks: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> Tensor:
    """Return masks of several groups as one: the first if they are alike, else each expanded to its size."""
    if all(torch.equal(mask, masks[0]) for mask in masks):
        return masks[0]
    other = max(mask.shape[1 - dim] for mask in masks)
    shapes = [(size, other) if dim == 0 else (other, size) for size in sizes]
    wide = [mask.expand(*shape, -1, -1) for mask, shape in zip(masks, shapes, strict=True)]
    return torch.cat(wide, dim)


def _mask(calls: Sequence[AttentionCall], visible: Tensor | None, matrices: int) -> Mask | None:
    """Return the mask over the positions of all ranks."""
    masks = [call.mask for call in calls if call.mask is not None]
    if visible is None:
        return None
    copies = matrices // math.prod(visible.shape[:2])
    blind = int((~visible.any(-1)).sum()) * copies
    fill = masks[0].fill if masks else -math.inf
    weights = [mask.masked_weight for mask in masks]
    return Mask(
        kind=mask_pattern(visible) or "mask",
        form=masks[0].form if masks else "implicit",  # blocks of keys that rows do not meet
        blind_rows=blind,
        uniform_rows=blind if fill is not None and math.isfinite(fill) else 0,
        masked_weight=None if None in weights else max((weight or 0.0 for weight in weights), default=0.0),
        fill=fill,
        scaled_by=masks[0].scaled_by if masks else None,
        **mask_reach(visible, copies),
    )


def _scale(joined: list[list[_RowsOfAll]]) -> tuple[EffectiveScale, tuple[KeyBlock, ...]]:
    """Return the scale of an attention, and its blocks of keys where they have different ones."""
    for share in (share for heads in joined for part in heads for share in part.shares):
        scales = [call.scale for call in share.calls]
        if len(scales) > 1 and not scales_are_alike(scales):
            stops = [sum(call.key_len for call in share.calls[: n + 1]) for n in range(len(scales))]
            sizes = [call.key_len for call in share.calls]
            blocks = tuple(
                KeyBlock(stop - size, stop - 1, scale) for stop, size, scale in zip(stops, sizes, scales, strict=True)
            )
            return scale_of_blocks(blocks), blocks
    scales = [part.shares[0].calls[0].scale for part in joined[0]]
    heads = [part.shares[0].rows.keys.shape[1] for part in joined[0]]
    known = [scale.per_head or (scale.effective,) * count for scale, count in zip(scales, heads, strict=True)]
    alike = scales_are_alike(scales)
    if len(scales) == 1 or any(one is None for each in known for one in each) or (alike and not scales[0].per_head):
        return scales[0], ()
    each = tuple(float(one or 0.0) for heads in known for one in heads)
    mean = math.exp(sum(math.log(abs(one)) for one in each) / len(each)) if all(each) else None
    ratio = None if mean is None else mean * (scales[0].ratio or 0.0) / (scales[0].effective or 1.0)
    return replace(scales[0], effective=mean, ratio=ratio, per_head=each), ()


def _histograms(joined: list[list[_RowsOfAll]]) -> list[Histogram]:
    """Return the histogram of each head over the rows of all ranks; a bin counts where its middle lies."""
    found = []
    for place in range(len(joined[0])):
        shares = [share for heads in joined for share in heads[place].shares]
        for each in zip(*(share.histograms for share in shares), strict=True):
            low, high = min(one.low for one in each), max(one.high for one in each)
            counts = [0] * len(each[0].counts)
            for one in each:
                width = (one.high - one.low) / len(counts)
                for bin_, count in enumerate(one.counts):
                    middle = one.low + (bin_ + 0.5) * width
                    at = int((middle - low) / (high - low) * len(counts)) if high > low else 0
                    counts[min(at, len(counts) - 1)] += count
            found.append(Histogram(low, high, tuple(counts)))
    return found
