"""The parts of a mask: band, blocks, documents, padding, special rows, and the rest.

visible = (band or block) and document and padding and rest; a special row sees every key, no key, or its own key only

Row i sees the keys j of its band, least <= i - j <= greatest. Blocks are stretches of positions that see one another
whatever the band says: the tokens of an image in a causal model, or a prefix. Documents are stretches that do not see
beyond themselves. A row to which these parts leave no key is blind. Many codes let such a row see itself, or every
key, so that its softmax is not NaN. Two masks differ in one or more of these parts, and a part of one can be put into
the other. Rows are the last L of the S positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.masks.band import band_mask

NOT_APART, OPEN, CLOSED = -1, -2, -3  # codes in `apart`: the row sees what the other parts allow, every key, no key


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of one mask; `b` is its batch size, 1 if all entries are equal.

    Attributes:
        rows: L.
        keys: S.
        least: least i - j of a visible key; None if no key is hidden for coming too late.
        greatest: greatest i - j; None if no key is hidden for lying too far back.
        padding: (b, S), True at a token, False at a key that no row sees although band and document allow it.
        apart: (b, L), what a special row sees whatever the other parts say: `OPEN`, `CLOSED`, or the number of the one
            key that a blind row sees, its own. `NOT_APART` if the other parts decide.
        rest: broadcasts to (b, H, L, S), False where a key is hidden by none of the above; None if there is no rest.
        documents: (b, S), number of each position's document; None without documents.
        blocks: (b, S), number of each position's block, 0 outside blocks; None without blocks.
    """

    rows: int
    keys: int
    least: int | None
    greatest: int | None
    padding: Tensor
    apart: Tensor
    rest: Tensor | None
    documents: Tensor | None = None
    blocks: Tensor | None = None

    @property
    def symmetric(self) -> bool:
        """Whether the band is a window that reaches equally far ahead and back, least = -greatest with greatest > 0."""
        return self.least is not None and self.least < 0 and self.greatest == -self.least


def recompose(parts: Parts) -> Tensor | None:
    """Return the mask that the parts make; the inverse of `decompose`.

    Returns:
        Bool, (b, H, L, S), or (b, 1, L, S) for parts that are equal for all heads, True where the row sees the key.
        None if every key is visible.
    """
    inside = keys_within(parts)[:, None]
    if parts.rest is not None:
        inside = inside & parts.rest
    if bool((parts.apart != NOT_APART).any()):
        apart = parts.apart[:, None, :, None]
        own = apart == torch.arange(parts.keys, device=apart.device)
        inside = (inside & (apart == NOT_APART)) | (apart == OPEN) | own
    return None if bool(inside.all()) else inside


def pattern_mask(parts: Parts) -> Tensor:
    """Return the mask of band, blocks and documents alone: (band or block) and document.

    Returns:
        Bool, (b, L, S), or (1, L, S) without blocks and documents, True where these parts let the row see the key.
    """
    inside = band_mask(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)[None]
    if parts.blocks is not None:
        inside = inside | same_stretch(parts.blocks, parts.rows)
    return inside if parts.documents is None else inside & same_stretch(parts.documents, parts.rows)


def keys_within(parts: Parts) -> Tensor:
    """Return the mask of band, blocks, documents and padding, bool (b, L, S), without special rows and the rest."""
    return pattern_mask(parts) & parts.padding[:, None]


def same_stretch(numbers: Tensor, rows: int) -> Tensor:
    """Return True where the row and the key are in the same document, or in the same block.

    Args:
        numbers: int, (b, S), the number of each position's document or block; 0 is outside of all.
        rows: L; the rows are the last L of the S positions.

    Returns:
        Bool, (b, L, S); False wherever the row is outside of all.
    """
    own = numbers[:, numbers.shape[1] - rows :, None]
    return (own == numbers[:, None]) & (own > 0)


def blind(parts: Parts) -> Tensor:
    """Return True at the rows to which band, blocks, documents and padding leave no key, bool (b, L)."""
    return ~keys_within(parts).any(-1)


# -- a part of one mask put into another -------------------------------------------------------------------------------
#
# A row that becomes blind sees what the other side shows to blind rows; a row that is no longer blind sees what the
# parts allow. So putting in the parts of another mask one by one, in any order, ends with the other mask.


def with_pattern(parts: Parts, other: Parts, **changes: Any) -> Parts:
    """Return the parts with another band, blocks or documents, taken from another mask.

    Whether a key that appears or vanishes by the change is hidden by the rest is decided by the other mask; so is what
    a row sees that becomes blind. A row that is no longer blind sees what the parts allow.

    Args:
        parts: the parts to change.
        other: the parts of the other mask.
        changes: the new values of the fields `least`, `greatest`, `blocks` or `documents` of `Parts`.
    """
    moved = replace(parts, **changes)
    changed = (pattern_mask(parts) ^ pattern_mask(moved))[:, None]
    return _settled(parts, moved, other, torch.where(blind(parts), NOT_APART, parts.apart), changed)


def with_padding(parts: Parts, other: Parts) -> Parts:
    """Return the parts with the padding and the special rows of another mask.

    Whether a key that appears or vanishes by the change is hidden by the rest is decided by the other mask.

    Args:
        parts: the parts to change.
        other: the parts of the other mask.
    """
    moved = replace(parts, padding=other.padding)
    changed = (parts.padding ^ other.padding)[:, None, None]
    return _settled(parts, moved, other, torch.where(blind(other), NOT_APART, other.apart), changed)


def rows_differ(a: Parts, b: Parts) -> Tensor:
    """Return True at the special rows that differ between two masks, bool (b, L).

    A row that is blind in only one of the masks counts as equal: the different band or padding explains the difference.
    """
    return (a.apart != b.apart) & (blind(a) == blind(b))


def _settled(parts: Parts, moved: Parts, other: Parts, apart: Tensor, changed: Tensor) -> Parts:
    """Return the moved parts with their special rows and their rest.

    Args:
        parts: parts before the move.
        moved: parts with another band or padding.
        other: parts of the other mask.
        apart: codes of rows that are not blind after the move.
        changed: broadcasts to (b, H, L, S), True at keys that appeared or vanished.
    """
    blinded = blind(moved)
    apart = torch.where(blinded, _of_blind(other, parts) if bool(blinded.any()) else NOT_APART, apart)
    rest, others = parts.rest, other.rest
    if rest is not None or others is not None:
        changed = changed | ((parts.apart != NOT_APART) & (apart == NOT_APART))[:, None, :, None]
        true = torch.ones((), dtype=torch.bool, device=changed.device)
        rest = torch.where(changed, true if others is None else others, true if rest is None else rest)
    return replace(moved, apart=apart, rest=rest)


def _of_blind(other: Parts, parts: Parts) -> Tensor:
    """Return what the other mask shows to its blind rows, (b, L), extended to rows that are blind only here.

    The extension follows what most blind rows of the other mask do; if it has none, what most of these parts' do.
    """
    blinded = blind(other)
    rule = torch.full((other.rows,), NOT_APART, device=other.apart.device)
    for flags, apart in ((blinded, other.apart), (blind(parts), parts.apart)):
        if not bool(flags.any()):
            continue
        flags = flags.expand(apart.shape)
        codes, own = apart[flags], torch.arange(other.rows, device=apart.device)
        alone = codes >= 0
        if 2 * int(alone.sum()) > codes.numel():
            own = own + (codes - flags.nonzero()[:, 1])[alone].mode().values
            rule = torch.where((own >= 0) & (own < other.keys), own, NOT_APART)
        elif 2 * int((codes == OPEN).sum()) > codes.numel():
            rule = torch.full_like(rule, OPEN)
        break
    return torch.where(blinded, other.apart, rule)
