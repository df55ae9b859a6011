"""score = q . k; Vaswani et al. 2017, arXiv:1706.03762, and unscaled Luong et al. 2015 ("dot"), arXiv:1508.04025."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sqrtdk.scales import ScaleRule, sqrt_dk

if TYPE_CHECKING:
    from jaxtyping import Float


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
