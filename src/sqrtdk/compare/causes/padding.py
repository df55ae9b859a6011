"""Padding is seen, or other keys are taken for it: the mask lost, or the left taken for the right.

A key of an entry of the batch that no row sees, although the band lets it, is padding. Rows of padding that see nothing
in one side and every key, or themselves, in the other are told apart here as well, where the keys are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sqrtdk.compare.bands import taken_apart
from sqrtdk.compare.causes.mask_offset import filled
from sqrtdk.compare.mask_changes import rows_differ, with_padding
from sqrtdk.compare.masks import CLOSED, NOT_APART, OPEN, Parts, recompose
from sqrtdk.compare.numbers import of_formula
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "padding"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's padding in A's mask."""
    a, b = sides.a.formula, sides.b.formula
    both = None if a is None or b is None else taken_apart(a, b)
    if both is None or b is None:
        return
    left, right = both
    keys_differ = not _equal(left.padding, right.padding)
    if not keys_differ and not bool(rows_differ(left, right).any()):
        return

    def change(formula: Formula) -> Formula:
        pair = taken_apart(formula, b)
        return formula if pair is None else filled(formula, b, recompose(with_padding(*pair)))

    said = (_keys, _keys_text) if keys_differ else (_rows, _rows_text)
    yield Suspicion(NAME, "mask", said[0](left), said[0](right), of_formula(change), said[1](left, right))


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool((a == b).all())


def _keys(parts: Parts) -> str:
    """Which keys are padding, of all entries: "none", "the last 1 to 3"."""
    hidden = ~parts.padding
    counts = hidden.sum(-1)
    if not bool(hidden.any()):
        return "none"
    most, fewest = int(counts.max()), int(counts[counts > 0].min())
    many = f"{most}" if most == fewest else f"{fewest} to {most}"
    if _packed(hidden):
        return f"the first {many}"
    return f"the last {many}" if _packed(hidden.flip(-1)) else f"{many} of {hidden.shape[-1]}"


def _packed(hidden: Tensor) -> bool:
    """Whether the hidden keys of every entry are its first."""
    return not bool((hidden[:, 1:] & ~hidden[:, :-1]).any())


def _keys_text(a: Parts, b: Parts) -> str:
    said_a, said_b = _keys(a), _keys(b)
    if said_b == "none":
        return f"leaves out the padding mask ({said_a} keys)"
    if said_a == "none":
        return f"hides keys as padding ({said_b}), which A does not"
    if {said_a[:8], said_b[:8]} == {"the firs", "the last"}:
        return f"takes {said_b} keys for padding, not {said_a}"
    return f"takes other keys for padding ({said_b} in place of {said_a})"


def _rows(parts: Parts) -> str:
    """What rows that stand apart see."""
    seen = {"every key": parts.apart == OPEN, "none": parts.apart == CLOSED, "their own": parts.apart > NOT_APART}
    said = [f"{int(rows.sum())} rows see {what}" for what, rows in seen.items() if bool(rows.any())]
    return ", ".join(said) or "all rows see what the mask lets them"


def _rows_text(a: Parts, b: Parts) -> str:
    other = rows_differ(a, b)
    if bool((other & (b.apart == OPEN)).any()):
        return "lets rows of padding see every key"
    if bool((other & (b.apart > NOT_APART)).any()):
        return "lets rows of padding see their own key alone"
    if bool((other & (b.apart == CLOSED)).any()):
        return "hides every key from other rows"
    what = "every key" if bool((other & (a.apart == OPEN)).any()) else "a key"
    return f"does not let rows of padding see {what}, as A does"
