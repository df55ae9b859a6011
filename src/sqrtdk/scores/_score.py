"""What a score function is: it either turns q and k so that their dot product is the score, or scores pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from sqrtdk.scales import ScaleRule

if TYPE_CHECKING:
    from jaxtyping import Float


@runtime_checkable
class FoldedScore(Protocol):
    """A score that is the dot product of a changed query and a changed key: it runs on every kernel."""

    @property
    def default_scale(self) -> ScaleRule:
        """The rule that holds where no scale is given."""

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """Query and key whose dot product is the score."""


@runtime_checkable
class PairScore(Protocol):
    """A score of pairs, which no dot product gives exactly: it runs block by block."""

    @property
    def default_scale(self) -> ScaleRule:
        """The rule that holds where no scale is given."""

    @property
    def width(self) -> int | None:
        """Numbers held at once for one pair of a query and a key; None: as many as a prepared query has features."""

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L A"], Float[Tensor, "*BH S A"]]:
        """What is done once, before the blocks: whole query and key, changed.

        Shapes are checked here, and projections made. Both keep their heads and lengths; half types come back as
        float32, so that nothing is rounded between here and the softmax.
        """

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Scores of prepared queries and keys, key heads repeated."""
