"""One record of attentions to blocks of keys whose results were weighed by the logsumexp of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.stats._partial import FIELDS, RowStats
from sqrtdk.tracing.records import AttentionCall, KeyBlock, Mask, Stage
from sqrtdk.tracing.tell.blocks import of_blocks
from sqrtdk.tracing.tensors import CallRows

NO_STATS = "every block of keys had a softmax of its own; that of the whole was never computed"
_MASKS = ("causal_lower_right", "causal", "window", "padding", "mask")
_SCALED = re.compile(r"softmax\((?:[\d.e+-]+ \* )?((?:\w+\()*q\)*\..*)\)")


def merge(calls: Sequence[AttentionCall]) -> AttentionCall | None:
    """The attention that blocks of keys are together, in the order of running; None where they do not go together."""
    first = calls[0]
    if any(_sizes(call) != _sizes(first) or call.blocks for call in calls):
        return None
    starts = [sum(call.key_len for call in calls[:i]) for i in range(len(calls))]
    blocks = tuple(
        KeyBlock(start, start + call.key_len - 1, call.scale) for start, call in zip(starts, calls, strict=True)
    )
    made = replace(
        first,
        key_len=sum(call.key_len for call in calls),
        scale=of_blocks(blocks),
        blocks=blocks,
        mask=_mask(calls, starts),
        stages=(*first.stages, Stage("logits", "joined", f"logits of {len(calls)} blocks of keys")),
        unknown=tuple(dict.fromkeys(name for call in calls for name in call.unknown)),
        dropout=max(call.dropout for call in calls),
        max_product=max((call.max_product for call in calls if call.max_product is not None), default=None),
        future_weight=None,
        output_rms=None,
        stats=None,
        stats_reason=first.stats_reason or NO_STATS,
    )
    return replace(made, formula=_formula(made))


def merge_rows(blocks: Sequence[CallRows | None]) -> CallRows | None:
    """The statistics of rows whose keys were met in blocks; None where those of a block are not known."""
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks) or len({(block.of, block.rows.n.shape) for block in known}) > 1:
        return None
    rows = RowStats(*(torch.stack([getattr(block.rows, name) for block in known]) for name in FIELDS)).merged(0)
    keys = [block.key_nonfinite for block in known if block.key_nonfinite is not None]
    bad_keys = torch.stack(keys).sum() if len(keys) == len(known) else None
    first = known[0]  # every block has met the same q
    return CallRows(
        rows=rows,
        max_product=_largest([block.max_product for block in known]),
        of=first.of,
        padding=first.padding,
        query_nonfinite=first.query_nonfinite,
        key_nonfinite=bad_keys,
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
    """What hides keys in any of the blocks, with what is known of how far the rows see over all of them."""
    masks = [call.mask for call in calls if call.mask is not None]
    if not masks:
        return None
    reach = [_reach(call, start) for call, start in zip(calls, starts, strict=True)]
    known = [span for span in reach if span is not None]
    weights = [mask.masked_weight for mask in masks if mask.masked_weight is not None]
    return Mask(
        kind="padding" if {mask.kind for mask in masks} == {"padding"} else "mask",
        form=masks[0].form,
        masked_weight=max(weights) if len(weights) == len(masks) else None,
        fill=masks[0].fill,
        scaled_by=masks[0].scaled_by,
        least=min((least for least, _ in known), default=None) if len(known) == len(reach) else None,
        greatest=max((greatest for _, greatest in known), default=None) if len(known) == len(reach) else None,
    )


def _reach(call: AttentionCall, start: int) -> tuple[int, int] | None:
    """Least and greatest i - j of a block's visible keys, j counted over all blocks; None where it is not known."""
    mask = call.mask
    if mask is None:
        return 1 - call.key_len - start, call.query_len - 1 - start
    if mask.least is None or mask.greatest is None:
        return None
    return mask.least - start, mask.greatest - start


def _formula(call: AttentionCall) -> str:
    """That of the first block, with the masks of all as one."""
    text = call.formula
    for name in _MASKS:
        text = text.replace(f" + {name}", "")
    scaled = _SCALED.fullmatch(text) if call.unlike_blocks else None
    text = f"softmax(scale[block] * {scaled[1]})" if scaled else text
    return text if call.mask is None else f"{text[:-1]} + {call.mask.kind})"
