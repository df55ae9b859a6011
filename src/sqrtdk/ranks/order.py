"""The order of tokens that lie on several ranks, without which the mask of their attention says nothing.

    given    a rank's inputs hold the positions of its tokens (`position_ids`)
    plain    rank r has the tokens that follow those of rank r - 1
    zigzag   of 2 n equal chunks rank r has chunk r and chunk 2 n - 1 - r, so that causal work is even
    striped  rank r has the tokens r, r + n, r + 2 n, ...

Without positions the mask itself shows the order: that in which it is a band. A mask in which one row sees another and
is seen by it is causal in no order at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.masks.band import band_around, mask_pattern

_NAMES_OF_POSITIONS = ("position_ids", "positions", "pos", "input_pos", "cache_position")


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """Where the rows and keys of all ranks stand in the sequence.

    Attributes:
        name: "given", "plain", "zigzag" or "striped"; "unknown" if the mask has no meaning in any of them.
        rows: Position of each row, (L,) int64, rank after rank.
        keys: Position of each key, (S,) int64, in the order of the keys.
    """

    name: str
    rows: Tensor
    keys: Tensor

    def sorted(self, visible: Tensor) -> Tensor:
        """Return a mask (b, h, L, S) with rows and keys in the order of the sequence."""
        return visible[..., self.rows.argsort(), :][..., self.keys.argsort()]


def positions_in(inputs: Any, length: int) -> list[int] | None:
    """Return the positions of a rank's tokens that its inputs hold, or None.

    Args:
        inputs: Inputs by name; others have no names.
        length: Number of its tokens.
    """
    for name in _NAMES_OF_POSITIONS if isinstance(inputs, Mapping) else ():
        value = inputs.get(name)
        if isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1:] == (length,):
            rows = value.reshape(-1, length)
            if bool((rows == rows[:1]).all()):
                return [int(place) for place in rows[0]]
    return None


def order_of(
    lengths: Sequence[int], keys: int, given: Sequence[Sequence[int] | None], own: bool, visible: Tensor | None
) -> TokenOrder:
    """Return the order of the tokens of several ranks.

    Args:
        lengths: Number of rows on each rank.
        keys: Number of keys of all ranks together.
        given: Positions that the inputs of each rank hold, or None.
        own: Whether keys lie as rows do; if not, they come out of a collective, in the order of ranks or of tokens.
        visible: (b, h, L, S), rows rank after rank and keys in their order; None if every row sees every key.
    """
    candidates = list(_candidates(lengths, keys, given, own))
    told = [one for one in candidates if one.name == "given"]
    if visible is None:
        return (told or candidates)[0]
    masks = [(one, one.sorted(visible)) for one in told or candidates]
    for order, mask in masks:
        if mask_pattern(mask) != "mask":
            return order
    for order, mask in masks:
        around = band_around(mask)
        if around is not None and around[0] >= 0:
            return order
    first, mask = masks[0]
    if told or (own and _is_mutual(mask)):
        return first
    return TokenOrder("unknown", first.rows, first.keys)


def _candidates(
    lengths: Sequence[int], keys: int, given: Sequence[Sequence[int] | None], own: bool
) -> Iterator[TokenOrder]:
    total, size = sum(lengths), len(lengths)
    named: list[tuple[str, Tensor]] = []
    places = [place for of_rank in given for place in of_rank or ()]
    if sorted(places) == list(range(total)):
        named.append(("given", torch.tensor(places)))
    named.append(("plain", torch.arange(total)))
    if size > 1 and len(set(lengths)) == 1 and lengths[0] % 2 == 0:
        chunks = torch.arange(total).chunk(2 * size)
        named.append(("zigzag", torch.cat([torch.cat((chunks[r], chunks[-1 - r])) for r in range(size)])))
    if size > 1 and len(set(lengths)) == 1:
        named.append(("striped", torch.cat([torch.arange(r, total, size) for r in range(size)])))
    for name, rows in named:
        if keys == total:
            yield TokenOrder(name, rows, rows)
        if keys != total or (not own and name != "plain"):
            yield TokenOrder(name, rows, torch.arange(keys))


def _is_mutual(visible: Tensor) -> bool:
    """Return whether some row sees the key of another whose row sees its own: no order makes that causal."""
    if visible.shape[-1] != visible.shape[-2]:
        return False
    both = visible & visible.mT
    return bool((both & ~torch.eye(visible.shape[-1], dtype=torch.bool)).any())
