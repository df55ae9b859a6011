"""Everything that a trace has of one attention, and of several to blocks of keys that turn out to be one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.calls.blocks import merge_blocks, merge_rows
from sqrtdk.tracing.calls.keep import BLOCKS_OF_KEYS, missing_tensors
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tape.travel import Journey
from sqrtdk.tracing.tensors import CallRows, CallTensors, Projection


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """Everything recorded about one attention."""

    call: AttentionCall
    rows: CallRows | None
    journey: Journey
    tensors: CallTensors | None = None
    projections: tuple[Projection | None, Projection | None] = (None, None)
    # numbers of k that are not finite, for each block of keys, and whether the block came from another rank
    nonfinite: tuple[tuple[bool, Tensor | None], ...] = ()


def merged_record(blocks: Sequence[TracedCall]) -> TracedCall | None:
    """Return one record for attentions to blocks of keys; None if they don't fit together.

    Args:
        blocks: in the order of their keys.
    """
    merged = merge_blocks([block.call for block in blocks])
    if merged is None:
        return None
    return replace(
        blocks[0],
        call=merged,
        rows=merge_rows([block.rows for block in blocks]),
        tensors=None if blocks[0].tensors is None else missing_tensors(merged, Message(BLOCKS_OF_KEYS)),
        journey=Journey.of_all(block.journey for block in blocks),
        nonfinite=tuple(each for block in blocks for each in block.nonfinite),
    )
