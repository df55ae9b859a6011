"""The padding of the inputs against what the masks hid.

Formula: with the positions that the attention mask marks as tokens and as padding, the keys of padding that the row of
a token sees in any head, and the keys of tokens that no row of a token sees. Threshold: 0 of both. What the rows of
padding see is of no account. Where no input has padding there is nothing to hold against.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.tracing.records import Mask

SOURCE = "transformers: attention_mask is 1 at tokens and 0 at padding; torch: key_padding_mask is True at padding"


def _fault(context: Context, judged: JudgedCall) -> tuple[int, str, str] | None:
    """The count, what is wrong, and the fix."""
    call = judged.call
    keys, seen, hidden = context.tokens.keys(call), call.padding_seen or 0, call.tokens_hidden or 0
    if keys is None or (not seen and not (hidden and _hides_ends(call.mask))):
        return None
    padding, tokens = int((~keys).sum()), int(keys.sum())
    if seen and hidden:
        return (
            seen + hidden,
            f"the padding mask looks inverted or shifted: tokens see {seen} of {padding} keys of padding, "
            f"and {hidden} of {tokens} keys of tokens are hidden from all",
            "hide the keys where attention_mask is 0: masked_fill wants True there, a bool attn_mask of SDPA False",
        )
    if seen:
        return (
            seen,
            f"padding is not hidden: tokens see {seen} of {padding} keys of padding",
            "add the padding mask to this call, as -inf over the keys where attention_mask is 0",
        )
    return (
        hidden,
        f"{hidden} of {tokens} keys of tokens are hidden from all rows, as if they were padding",
        "hide the keys where attention_mask is 0, and no others",
    )


def _hides_ends(mask: Mask | None) -> bool:
    """Whether a mask is a band along the diagonal but for keys that it hides from all rows.

    Keys that are chosen by their content may be hidden as well, and so is a row's own by a band beside the diagonal.
    """
    if mask is None or not mask.band or mask.least is None or mask.greatest is None:
        return False
    return mask.least <= 0 <= mask.greatest


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call whose masks are not those of the padding; the most keys first."""
    faults = [(judged.call.site, fault) for judged in context.calls if (fault := _fault(context, judged)) is not None]
    for site, (count, message, fix) in sorted(faults, key=lambda entry: -entry[1][0]):
        yield Finding("padding", "fail", site, float(count), 0.0, message, fix, SOURCE)
