"""What a position term is: something added to the logits, computed for a block of rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@runtime_checkable
class PositionTerm(Protocol):
    """A term that depends on positions, and perhaps on q and k."""

    @property
    def content(self) -> bool:
        """True: a part of the score, which the scale multiplies (Shaw). False: a bias, which it does not (ALiBi)."""

    def term(
        self,
        query: Float[Tensor, "*#BHq R E"],
        key: Float[Tensor, "*#BHq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*#BHq #R #S"]:
        """The term, broadcastable to (..., Hq, R, S).

        Args:
            query: (..., Hq, R, E), unscaled, the rows of the block.
            key: (..., Hq, S, E), key heads already repeated to the query's.
            rows: (R,) int64 positions of the rows.
            columns: (S,) int64 positions of the keys.
        """
