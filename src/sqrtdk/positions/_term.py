"""What a position term is: something added to the logits, computed for a block of rows at a time."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class PositionTerm(Protocol):
    """A term that depends on positions, and perhaps on q and k."""

    @property
    def content(self) -> bool:
        """True: a part of the score, which the scale multiplies (Shaw). False: a bias, which it does not (ALiBi)."""

    def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The term, broadcastable to (..., H, R, S).

        Args:
            query: (..., H, R, E), unscaled, the rows of the block.
            key: (..., H, S, E), key heads already repeated to the query's.
            rows: (R,) int64 positions of the rows.
            columns: (S,) int64 positions of the keys.
        """
