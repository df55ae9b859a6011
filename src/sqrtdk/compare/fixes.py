"""What to change in B for a cause: the call, the argument or the key of a config (`messages/words/fixes.toml`).

A fix is found by the name of the cause and its codes, most particular first ("padding.on_rows"), else "set" or "drop".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sqrtdk.compare.inside.suspect import NO_VALUE
from sqrtdk.compare.records import Cause
from sqrtdk.messages import Message, catalogue_text, placeholders
from sqrtdk.messages._catalogue import topic

# sentences whose fix is that of another one; a key here is read before the catalogue
_SAME_FIX = {
    "scale.at_place": "scale.factors",
    "scale.range_by": "scale.factors",
    "padding.rows_see_all": "padding.rows",
    "padding.rows_see_own": "padding.rows",
    "padding.rows_see_none": "padding.rows",
    "padding.rows_no_longer": "padding.rows",
    "mask.inverts": "padding.inverts",
    "mask.of_others": "padding.of_others",
    "mask.own": "padding.own",
    "mask.documents.moved": "mask.documents.lost",
    "mask.chunks.moved": "mask.chunks.lost",
    "mask.prefix.moved": "mask.prefix.lost",
    "mask.blocks.moved": "mask.blocks.lost",
    "weights.gain_shift": "weights.gain",
    "positions.twice_beside": "positions.twice_not_once",
    "positions.cache_twice": "positions.cache_turned",
}
_NORMS = {"RMS": "nn.RMSNorm", "LayerNorm": "nn.LayerNorm", "L2": "F.normalize"}  # by the word for what A has


def fix_of(cause: Cause) -> Message | None:
    """Return what to change in B to remove a cause.

    None is returned for a changed input, for an unknown cause, if the change was tried on B's program and did not help,
    and if the catalogue has no advice for it.

    Example:
        >>> fix_of(Cause("softcap", None, 50.0, 1.0, "has a softcap (50), which A has not", "softcap"))
        'take the tanh out; attn_logit_softcapping=None in a Gemma 2 config'
    """
    if not cause.mends:
        return None
    known, values = topic("fixes"), _values(cause)
    for key in _keys(cause):
        key = _SAME_FIX.get(key, key)
        if key in known and (names := placeholders(catalogue_text(f"fixes.{key}").en)) <= values.keys():
            return Message(f"fixes.{key}", **{name: values[name] for name in sorted(names)})
    return None


def fixes_of(causes: Iterable[Cause]) -> dict[Message, Cause]:
    """Return the different fixes of some causes, each with the first cause that it is for, in the order of the causes.

    Causes without a fix are left out.
    """
    found: dict[Message, Cause] = {}
    for cause in causes:
        if (fix := fix_of(cause)) is not None:
            found.setdefault(fix, cause)
    return found


def _keys(cause: Cause) -> Iterator[str]:
    yield from (f"{cause.name}.{code}" for code in cause.codes)
    if cause.lacks == "a" or cause.a is None:
        yield f"{cause.name}.drop"
    yield f"{cause.name}.set"


def _values(cause: Cause) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, word in (("a", cause.a), ("b", cause.b)):
        shown = Message(NO_VALUE) if word is None else word
        values[name] = f"{shown:.6g}" if isinstance(shown, float) else shown
    for text in (cause.b, cause.text):  # the sentence has a number with its unit, or in more digits
        if isinstance(text, Message):
            values |= text.values
    if isinstance(cause.a, float | int):
        values["diagonal"] = f"{-cause.a:g}"
    if cause.a in _NORMS:
        values["module"] = _NORMS[cause.a]
    return values
