"""score = q^T W k without a scale: Luong et al. 2015, arXiv:1508.04025, section 3.1, "general"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sqrtdk.scales import none
from sqrtdk.scores._bilinear import Bilinear

if TYPE_CHECKING:
    from jaxtyping import Float


def luong_general(weight: Float[Tensor, "E Ek"] | Float[Tensor, "Hq E Ek"]) -> Bilinear:
    """Luong's general score, q^T W k; not scaled where no scale is given, as in the paper.

    Args:
        weight: W, (E, Ek), or (Hq, E, Ek) for each query head.

    Returns:
        The score, an nn.Module; see `bilinear`, which differs by its scale alone.

    Raises:
        InvalidTypeError: the weight is no floating tensor.
        InvalidValueError: the weight has other dimensions, or, in a call, does not fit the query.

    Example:
        >>> import torch
        >>> luong_general(torch.eye(4)).default_scale
        Unscaled()

    Reference:
        Luong et al. 2015, arXiv:1508.04025.
    """
    return Bilinear(weight, none())
