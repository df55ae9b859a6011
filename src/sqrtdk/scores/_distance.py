"""score = -|q - k|^2, from the differences: |q|^2 + |k|^2 - 2 q . k cancels where q and k lie far out and close by.

Softmax of it is a Gaussian kernel smoother (Nadaraya 1964, Watson 1964), as attention in Tsai et al. 2019,
"Transformer Dissection", arXiv:1908.11775, and Kim et al. 2021, "The Lipschitz Constant of Self-Attention",
arXiv:2006.04710.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sqrtdk.scales import ScaleRule, none
from sqrtdk.scores._weights import check_same_features, widened

if TYPE_CHECKING:
    from jaxtyping import Float


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
