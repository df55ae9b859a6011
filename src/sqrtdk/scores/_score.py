"""What a score function is, and the two that have no weights: the dot product and the distance.

A score either changes q and k so that their dot product is the score (`FoldedScore`), or scores pairs (`PairScore`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from sqrtdk.scales import ScaleRule, none, sqrt_dk
from sqrtdk.scores._weights import check_same_features, widened

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


@dataclass(frozen=True, slots=True)
class Dot:
    """See `dot`."""

    @property
    def default_scale(self) -> ScaleRule:
        """1 / sqrt(E)."""
        return sqrt_dk()

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Both as they are."""
        return query, key


def dot() -> Dot:
    """The dot product, score = q . k, scaled by 1 / sqrt(E) where no scale is given.

    Returns:
        The score; it takes query (..., Hq, L, E) and key (..., H, S, E).

    Example:
        >>> import torch
        >>> query, key = dot().fold(torch.eye(2), torch.ones(3, 2))
        >>> query @ key.mT
        tensor([[1., 1., 1.],
                [1., 1., 1.]])

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762.
    """
    return Dot()


@dataclass(frozen=True, slots=True)
class Distance:
    """See `distance`."""

    @property
    def default_scale(self) -> ScaleRule:
        """None: what unit distances are in is the caller's."""
        return none()

    @property
    def width(self) -> None:
        """As many as the query has features."""
        return

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Both as they are, half types as float32."""
        check_same_features(query, key, "a distance score")
        return widened(query), widened(key)

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """-|query - key|^2."""
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)


def distance() -> Distance:
    """The negative squared distance, score = -|q - k|^2; not scaled where no scale is given.

    A Gaussian kernel of standard deviation sigma is `scale=fixed(0.5 / sigma**2)`.

    Returns:
        The score; it takes query (..., Hq, L, E) and key (..., H, S, E). Half types are computed in float32.

    Raises:
        InvalidValueError: in a call, q and k of different features.

    Example:
        >>> import torch
        >>> score = distance()
        >>> score.pairs(*score.prepare(torch.tensor([[1e6, 0.0]]), torch.tensor([[1e6, 0.5]])))
        tensor([[-0.2500]])

    Reference:
        Tsai et al. 2019, arXiv:1908.11775; Kim et al. 2021, arXiv:2006.04710.
    """
    return Distance()
