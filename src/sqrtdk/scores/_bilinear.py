"""score = q^T W k, folded into q: (q W) . k. Luong et al. 2015 call it "general", arXiv:1508.04025, section 3.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sqrtdk.scales import ScaleRule, none, sqrt_dk
from sqrtdk.scores._score import project_heads, store_weight

if TYPE_CHECKING:
    from jaxtyping import Float


class Bilinear(nn.Module):
    """See `bilinear` and `luong_general`.

    Attributes:
        weight: (E, Ek) or (Hq, E, Ek).
    """

    weight: Float[Tensor, "E Ek"] | Float[Tensor, "Hq E Ek"]

    def __init__(self, weight: Float[Tensor, "E Ek"] | Float[Tensor, "Hq E Ek"], rule: ScaleRule) -> None:
        super().__init__()
        store_weight(self, "weight", weight, "the weight of a bilinear score", {2: "(E, Ek)", 3: "(Hq, E, Ek)"})
        self._rule = rule

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule: 1 / sqrt(E) of the query for `bilinear`, 1 for `luong_general`."""
        return self._rule

    def fold(
        self, query: Float[Tensor, "*#BHq L E"], key: Float[Tensor, "*BH S Ek"]
    ) -> tuple[Float[Tensor, "*BHq L Ek"], Float[Tensor, "*BH S Ek"]]:
        """Return q W, (..., Hq, L, Ek), and the key unchanged: q^T W k is their dot product.

        Raises:
            InvalidValueError: The weight has other features or heads than the query.
        """
        return project_heads(query, self.weight, "the weight of a bilinear score", "query"), key

    def extra_repr(self) -> str:
        """Return the shape of the weight and the scale rule, which `print(module)` shows."""
        return f"weight={tuple(self.weight.shape)}, default_scale={self._rule}"


def bilinear(weight: Float[Tensor, "E Ek"] | Float[Tensor, "Hq E Ek"]) -> Bilinear:
    """A bilinear form, score = q^T W k, scaled by 1 / sqrt(E) of the query unless a scale is given.

    Args:
        weight: W, (E, Ek), or (Hq, E, Ek) for each query head; a Parameter is trained with the module. It is cast to
            the query's dtype.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, Ek).

    Raises:
        InvalidTypeError: the weight is not a floating tensor.
        InvalidValueError: the weight has other dimensions, or, in a call, does not fit the query.

    Example:
        >>> import torch
        >>> query, key = bilinear(2 * torch.eye(3, 5)).fold(torch.ones(1, 3), torch.ones(1, 5))
        >>> query @ key.mT
        tensor([[6.]])

    Reference:
        Luong et al. 2015, arXiv:1508.04025.
    """
    return Bilinear(weight, sqrt_dk())


def luong_general(weight: Float[Tensor, "E Ek"] | Float[Tensor, "Hq E Ek"]) -> Bilinear:
    """Luong's general score, q^T W k; not scaled unless a scale is given, as in the paper.

    Args:
        weight: W, (E, Ek), or (Hq, E, Ek) for each query head.

    Returns:
        The score, an nn.Module; see `bilinear`, which differs only in its scale.

    Raises:
        InvalidTypeError: the weight is not a floating tensor.
        InvalidValueError: the weight has other dimensions, or, in a call, does not fit the query.

    Example:
        >>> import torch
        >>> luong_general(torch.eye(4)).default_scale
        Unscaled()

    Reference:
        Luong et al. 2015, arXiv:1508.04025.
    """
    return Bilinear(weight, none())
