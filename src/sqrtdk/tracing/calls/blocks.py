"""Attention in blocks of keys: the scale of each block, the scale of all, and one record for several calls.

Blocks are either separate products under one softmax (`tell_blocks`), or separate attentions, each with a softmax,
whose outputs were weighted by their sums of exponentials (`merge_blocks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.messages import Message, joined
from sqrtdk.stats._partial import ROW_STATS_FIELDS, RowStats
from sqrtdk.tracing.calls.scale import tell_scale
from sqrtdk.tracing.readback.blocks import SCALE_TOLERANCE
from sqrtdk.tracing.readback.reading import Cell, Reading
from sqrtdk.tracing.records import BY_BLOCK, AttentionCall, EffectiveScale, Factor, KeyBlock, Mask, Stage
from sqrtdk.tracing.tensors import CallRows

_MASK_NAMES = ("causal_lower_right", "causal", "window", "padding", "mask")
# "softmax(0.125 * rope(q).rope(k))": the group is the formula without its number.
_SCALED = re.compile(r"softmax\((?:[\d.e+-]+ \* )?((?:\w+\()*q\)*\..*)\)")


def tell_blocks(reading: Reading, width: int, *, measure_slope: bool) -> tuple[KeyBlock, ...]:
    """Return the scale of each block of keys, read in both ways. Blocks of rows are merged.

    Args:
        reading: The attention.
        width: E of the query, without padding.
        measure_slope: Read the scale from the logits as well.
    """
    keys: dict[tuple[int, int], list[Cell]] = {}
    for cell in reading.blocks:
        keys.setdefault((cell.key, cell.key + cell.reading.layout.columns - 1), []).append(cell)
    blocks = []
    for (first, last), cells in sorted(keys.items()):
        scales: list[EffectiveScale] = []
        # One block of rows is enough to measure the slope. Blocks near the diagonal come first, because there rows and
        # keys are rotated alike; then the last rows, from which a causal mask hides the fewest keys.
        for cell in sorted(cells, key=lambda cell: (abs(cell.reading.offset or 0), -cell.row)):
            wanted = measure_slope and all(scale.numeric is None for scale in scales)
            scales.append(tell_scale(cell.reading, cell.reading.steps, width, measure=wanted))
        blocks.append(KeyBlock(first, last, _together(scales)))
    return tuple(blocks)


def scale_of_blocks(blocks: Sequence[KeyBlock]) -> EffectiveScale:
    """Return the effective scale of a call from the scales of its blocks of keys.

    It has no value, and a reason instead, if the scales of the blocks differ.
    """
    scales = [block.scale for block in blocks]
    if any(scale.effective is None or scale.agree is False for scale in scales) or scales_are_alike(scales):
        return _together(scales)
    unlike = (Factor(None, "logits", BY_BLOCK),)
    reason = Message("trace.scale.blocks", blocks=_text(blocks))
    return EffectiveScale(None, None, None, None, None, unlike, reason=reason)


def _text(blocks: Sequence[KeyBlock]) -> str:
    """Return the scales as text, with equal neighbours joined: "keys 0 to 3 are scaled by 1, key 4 by 2"."""
    runs: list[KeyBlock] = []
    for block in blocks:
        if runs and runs[-1].last + 1 == block.first and scales_are_alike([runs[-1].scale, block.scale]):
            runs[-1] = replace(runs[-1], last=block.last)
        else:
            runs.append(block)
    parts: list[str] = []
    for run in runs:
        scale = f"{run.scale.effective:.4g}"
        if run.first == run.last:
            id = "trace.scale.next_key" if parts else "trace.scale.of_key"
            parts.append(Message(id, key=run.first, scale=scale))
        else:
            id = "trace.scale.next_keys" if parts else "trace.scale.of_keys"
            parts.append(Message(id, first=run.first, last=run.last, scale=scale))
    return joined(parts, "comma")


def _together(scales: Sequence[EffectiveScale]) -> EffectiveScale:
    """Return one scale for blocks that should have the same one.

    A block whose scale is unknown, or whose readings disagree, decides the result.
    """
    if len(scales) == 1:
        return scales[0]
    for scale in scales:
        if scale.effective is None or scale.agree is False:
            return scale
    read = [scale for scale in scales if scale.numeric is not None]
    if not read:
        return scales[0]
    numeric = sum(scale.numeric or 0.0 for scale in read) / len(read)
    fit = min(scale.r_squared or 0.0 for scale in read)
    return replace(scales[0], numeric=numeric, r_squared=fit, agree=read[0].agree, reason=None)


def scales_are_alike(scales: Sequence[EffectiveScale]) -> bool:
    """Return whether scales agree within rounding, head by head; unknown ones count as 0."""
    first, *others = (scale.per_head or (scale.effective or 0.0,) for scale in scales)
    return all(
        len(other) == len(first)
        and all(abs(a - b) <= SCALE_TOLERANCE * abs(b) for a, b in zip(other, first, strict=True))
        for other in others
    )


# -- records of blocks -------------------------------------------------------------------------------------------------


def merge_blocks(calls: Sequence[AttentionCall]) -> AttentionCall | None:
    """Return one record for several attentions to consecutive blocks of keys.

    Statistics, the weight on future keys and the RMS of the output are not known for all keys together, and are None.

    Args:
        calls: the records, in the order of their keys.

    Returns:
        The record, with one `KeyBlock` for each call in `blocks`, or those of a call that consists of blocks itself;
        None if the sizes of the calls differ.
    """
    first = calls[0]
    if any(_sizes(call) != _sizes(first) for call in calls):
        return None
    starts = [sum(call.key_len for call in calls[:i]) for i in range(len(calls))]
    blocks = tuple(
        KeyBlock(start + block.first, start + block.last, block.scale)
        for start, call in zip(starts, calls, strict=True)
        for block in call.blocks or (KeyBlock(0, call.key_len - 1, call.scale),)
    )
    made = replace(
        first,
        key_len=sum(call.key_len for call in calls),
        scale=scale_of_blocks(blocks),
        blocks=blocks,
        mask=_mask(calls, starts),
        stages=(
            *(stage for stage in first.stages if not (first.blocks and stage.name == "joined")),
            Stage("logits", "joined", Message("trace.step.blocks_of_keys", count=len(blocks))),
        ),
        unknown=tuple(dict.fromkeys(name for call in calls for name in call.unknown)),
        faults=tuple(dict.fromkeys(fault for call in calls for fault in call.faults)),
        dropout=max(call.dropout for call in calls),
        max_product=max((call.max_product for call in calls if call.max_product is not None), default=None),
        future_weight=None,
        output_rms=None,
        stats=None,
        stats_reason=first.stats_reason or Message("trace.statistics.blocks"),
    )
    return replace(made, formula=formula_of_blocks(made))


def merge_rows(blocks: Sequence[CallRows | None]) -> CallRows | None:
    """Return the statistics of rows over all keys, merged from their statistics over consecutive blocks of keys.

    Returns:
        The merged statistics; None if those of a block are missing, or if the blocks were measured on different rows.
    """
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks) or len({(block.total_rows, block.rows.keys.shape) for block in known}) > 1:
        return None
    keys = [block.key_nonfinite for block in known if block.key_nonfinite is not None]
    return replace(
        known[0],  # all blocks share the same q
        rows=RowStats(
            *(torch.stack([getattr(block.rows, name) for block in known]) for name in ROW_STATS_FIELDS)
        ).merged(0),
        max_product=_largest([block.max_product for block in known]),
        key_nonfinite=torch.stack(keys).sum() if len(keys) == len(known) else None,
        stored_product=_largest([block.stored_product for block in known]),
    )


def _largest(products: Sequence[Tensor | None]) -> Tensor | None:
    known = [product for product in products if product is not None]
    return torch.stack(known).amax() if len(known) == len(products) else None


def _sizes(call: AttentionCall) -> tuple[object, ...]:
    return (
        *(call.site, call.batch, call.heads, call.kv_heads, call.head_dim, call.query_len, call.value_dim),
        *(call.score, call.norm, call.rope, call.softcap, call.bias, call.sinks),
    )


def _mask(calls: Sequence[AttentionCall], starts: Sequence[int]) -> Mask | None:
    """Return the mask of all blocks together, with the distances that rows see over all keys."""
    masks = [call.mask for call in calls if call.mask is not None]
    if not masks:
        return None
    # Least and greatest i - j of each block's visible keys. j counts over all blocks, so a block's start is subtracted.
    least: list[int | None] = []
    greatest: list[int | None] = []
    for call, start in zip(calls, starts, strict=True):
        whole = Mask("", "", least=1 - call.key_len, greatest=call.query_len - 1)  # every row sees every key
        mask = call.mask or whole
        least.append(None if mask.least is None else mask.least - start)
        greatest.append(None if mask.greatest is None else mask.greatest - start)
    return Mask(
        kind="padding" if {mask.kind for mask in masks} == {"padding"} else "mask",
        form=masks[0].form,
        masked_weight=_extreme(max, [mask.masked_weight for mask in masks]),
        fill=masks[0].fill,
        scaled_by=masks[0].scaled_by,
        least=_extreme(min, least),
        greatest=_extreme(max, greatest),
    )


def _extreme(choose: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """Return the chosen extreme, or None if one of the values is unknown."""
    return None if None in values else choose(list(values))


def formula_of_blocks(call: AttentionCall) -> str:
    """Return the formula of the first block, with the masks of all blocks as one."""
    text = call.formula
    for name in _MASK_NAMES:
        text = text.replace(f" + {name}", "")
    scaled = _SCALED.fullmatch(text) if call.unlike_blocks else None
    text = f"softmax(scale[block] * {scaled[1]})" if scaled else text
    return text if call.mask is None else f"{text[:-1]} + {call.mask.kind})"
