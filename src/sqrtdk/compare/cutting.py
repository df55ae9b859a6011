"""A call of a trace file may be a part of what ran: the other side's call is made the same part."""

from __future__ import annotations

from sqrtdk.recording.cut import cut_call
from sqrtdk.recording.records import Cut
from sqrtdk.tracing.tensors import CallTensors


def cut_alike(a: CallTensors, b: CallTensors, cut_a: Cut | None, cut_b: Cut | None) -> tuple[CallTensors, CallTensors]:
    """Both calls with the rows and heads that a file has of one; a call that is cut already stays.

    Args:
        a: call of A.
        b: call of B.
        cut_a: what a trace file has of A's; None where it is whole.
        cut_b: of B's.
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
