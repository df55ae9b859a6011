"""A rank of a ring in a trace file: its rows and its own keys, and the output of these rows over all keys.

The keys of the other ranks are in their files, so that each is written once; see "Files of ranks" in
docs/en/trace-file.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqrtdk.ranks.share import whole_rows
from sqrtdk.ranks.tokens import prints_of
from sqrtdk.tracing import AttentionCall, CallTensors
from sqrtdk.tracing.records import numbers_by_site


def own_blocks(calls: Sequence[AttentionCall], tensors: Sequence[CallTensors]) -> list[CallTensors]:
    """Return the tensors of a trace with one call in place of a ring's blocks: the first, with the merged output.

    In a ring the first block that a rank's rows meet is that of its own keys.

    Args:
        calls: The calls of the trace.
        tensors: Their tensors.
    """
    merged: dict[int, CallTensors] = {}
    others: set[int] = set()
    for printed in prints_of(calls, tensors):
        first, *later = [block.call for block in printed.blocks]
        readable = all(term.value is not None for block in printed.blocks for term in tensors[block.call].terms or ())
        if not later or not readable or printed.blocks[0].rows != (0, len(printed.rows)):
            continue
        rows, output = whole_rows(printed, tensors)
        lse = rows.lse.to(tensors[first].output.device)
        merged[first] = replace(tensors[first], output=output, lse=lse.float())
        others |= {*later}
    found = [merged.get(at, call) for at, call in enumerate(tensors) if at not in others]
    numbers = numbers_by_site(call.site for call in found)
    return [replace(call, index=number) for call, number in zip(found, numbers, strict=True)]
