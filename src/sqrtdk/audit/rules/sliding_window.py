"""The window that config or module declare, against the one that the layer's mask shows.

Formula: the most keys that a row sees, its own included, is the greatest i - j of the visible keys and 1. Threshold:
the declared number (`audit.windows`), to the key; without a causal mask it is what a row sees on either side.
A mask that is no band (tokens of an image see one another, the first keys stay visible) is not judged. Rows that are
not longer than the window do not tell it: not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding
from sqrtdk.audit.windows import Window, declared_window
from sqrtdk.tracing.records import AttentionCall, NotMeasured

SOURCE = "Jiang et al. 2023, figure 1: W tokens; transformers sliding_window_overlay: j > i - sliding_window"


def _judge(call: AttentionCall, window: Window) -> Finding | None:
    """The finding of one call with a window that its rows are long enough to tell."""
    mask, length = call.mask, call.key_len
    before = length - call.query_len
    sides = [length]
    if mask is not None and mask.least is not None and mask.greatest is not None:
        if not mask.band:
            return None
        sides = [mask.greatest + before + 1]
        if mask.least + before < 0 and sides[0] < length and not window.left:
            sides.append(1 - mask.least - before)
    admitted = window.sides(two=len(sides) > 1)
    off = [side for side in sides if side not in admitted]
    near = any(abs(side - number) == 1 for side in off for number in admitted)
    if not off or not (window.sure or near):
        return None
    seen, expected = off[0], admitted[0]
    if len(sides) > 1:
        message = f"rows see {seen - 1} keys on one side of their own: {window.by} lets them see {expected - 1}"
    elif seen >= length:
        message = f"rows see all {length} keys: {window.by} is not applied"
    else:
        message = f"rows see up to {seen} keys, their own included: {window.by} lets them see {expected}"
    return Finding(
        rule="sliding_window",
        severity="fail",
        site=call.site,
        value=float(seen),
        threshold=float(expected),
        message=message,
        fix="hide the keys j <= i - sliding_window: a row sees sliding_window keys, its own included",
        source=SOURCE,
    )


def check(context: Context) -> Iterable[Finding | NotMeasured]:
    """One finding for each call with another window; what could not be judged is listed once for each window."""
    short: dict[str, int] = {}
    unread: Counter[str] = Counter()
    for judged in context.calls:
        call = judged.call
        window = declared_window(call.site, context.module(call.site), context.config(call.site))
        if window is None or not window.keys or call.self_attention is False or call.query_len < 2:
            continue
        longest = context.tokens.longest(call)
        if longest <= window.keys + (call.mask is None):  # without a mask it may be one on two sides
            short[window.by] = max(longest, short.get(window.by, 0))
        elif call.mask is not None and call.mask.least is None:
            unread[window.by] += 1
        elif (finding := _judge(call, window)) is not None:
            yield finding
    for by, count in unread.items():
        yield NotMeasured("", f"{by} was not held against the masks of {count} calls: their values are not known")
    for by, longest in short.items():
        yield NotMeasured("", f"the window of {by} is not reached by rows of {longest} tokens: give longer ones")
