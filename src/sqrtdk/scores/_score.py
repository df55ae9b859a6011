"""What a score function is: it either turns q and k so that their dot product is the score, or scores pairs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from sqrtdk.scales import ScaleRule


@runtime_checkable
class FoldedScore(Protocol):
    """A score that is the dot product of a changed query and a changed key: it runs on every kernel."""

    @property
    def default_scale(self) -> ScaleRule:
        """The rule that holds where no scale is given."""

    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query (..., Hq, L, E') and key (..., Hkv, S, E') whose dot product is the score."""


@runtime_checkable
class PairScore(Protocol):
    """A score of pairs, which no dot product gives exactly: it runs block by block."""

    @property
    def default_scale(self) -> ScaleRule:
        """The rule that holds where no scale is given."""

    @property
    def width(self) -> int | None:
        """Numbers held at once for one pair of a query and a key; None: as many as a prepared query has features."""

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What is done once, before the blocks: whole query (..., Hq, L, E) and key (..., Hkv, S, Ek), changed.

        Shapes are checked here, and projections made. Both keep their heads and lengths; half types come back as
        float32, so that nothing is rounded between here and the softmax.
        """

    def pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores (..., H, R, S) of prepared queries (..., H, R, A) and keys (..., H, S, A), key heads repeated."""
