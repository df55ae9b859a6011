"""ALiBi (Press et al. 2021): a bias that falls linearly with the distance, one slope a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.positions._term import check_block, offsets, wide_dtype
from sqrtdk.scales._numbers import whole

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """ALiBi's bias; made by `alibi`.

    Attributes:
        slopes: (Hq,), per token of distance.
        symmetric: whether keys ahead of the row are lowered as well.
    """

    slopes: Float[Tensor, " Hq"]
    symmetric: bool

    @property
    def content(self) -> bool:
        """False: a bias, which the scale does not multiply."""
        return False

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "Hq R S"]:
        """The bias (Hq, R, S), float32 (float64 for a float64 query); see `PositionTerm`."""
        check_block("ALiBi", query, key, rows, columns, heads=len(self.slopes))
        distance = offsets(rows, columns)
        if self.symmetric:
            distance = distance.abs()
        slopes = self.slopes.to(device=query.device, dtype=wide_dtype(query))
        return -slopes[:, None, None] * distance


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of the paper: 2^(-8 h / heads), h = 1..heads, for a power of two.

    Other head counts take the slopes of the power of two below, then every second slope of the power of two above.

    Args:
        heads: query heads, at least 1.

    Returns:
        One slope a head.

    Raises:
        InvalidTypeError: `heads` is no int.
        InvalidValueError: `heads` is less than 1.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> len(alibi_slopes(12))
        12

    Reference:
        Press, Smith, Lewis: Train Short, Test Long, 2021, and the code published with it.
    """
    whole(heads, "heads", 1)
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    return slopes + [2.0 ** (-4.0 * h / below) for h in range(1, 2 * (heads - below), 2)]


def alibi(
    heads: int | None = None, *, slopes: Sequence[float] | Float[Tensor, " Hq"] | None = None, symmetric: bool = False
) -> Alibi:
    """ALiBi's bias, -m_h (i - j) for row i and key j of head h.

    It is for causal attention: a key ahead of the row, were it visible, would be raised. `symmetric=True` gives
    -m_h |i - j|, for attention in both directions.

    Args:
        heads: query heads; the slopes are those of `alibi_slopes`.
        slopes: in place of `heads`: one slope a head, numbers or a tensor (Hq,), which may carry a gradient.
        symmetric: whether the distance counts in both directions; default False.

    Returns:
        A term that is not content: the scale does not multiply it.

    Raises:
        InvalidTypeError: `heads` is no int, or a slope is no real number.
        InvalidValueError: both or neither of `heads` and `slopes`; slopes not finite, or not of shape (Hq,).

    Example:
        >>> q, at = torch.zeros(2, 3, 4), torch.arange(3)
        >>> alibi(2).term(q, q, at, at)[0].tolist()[2]
        [-0.125, -0.0625, -0.0]

    Reference:
        Press, Smith, Lewis: Train Short, Test Long, 2021.
    """
    if (heads is None) == (slopes is None):
        raise InvalidValueError(
            f"ALiBi takes either heads or slopes; got heads={heads} and slopes={slopes}", hint="Pass one of them."
        )
    if heads is not None:
        return Alibi(torch.tensor(alibi_slopes(heads), dtype=torch.float64), symmetric)
    if not isinstance(slopes, Tensor):
        given = list(slopes or ())
        if not all(isinstance(m, int | float) and not isinstance(m, bool) for m in given):
            raise InvalidTypeError(f"slopes are numbers; got {given}", hint="Pass one number a head.")
        if not all(math.isfinite(m) for m in given):
            raise InvalidValueError(f"slopes are finite; got {given}", hint="Leave out what is not finite.")
        slopes = torch.tensor(given, dtype=torch.float64)
    check_class("slopes", slopes)
    if not slopes.is_floating_point():
        raise InvalidTypeError(f"slopes are a floating point tensor; got {slopes.dtype}", hint="Convert the slopes.")
    if slopes.dim() != 1 or len(slopes) == 0:
        raise InvalidValueError(
            f"slopes have shape (H,), at least one head; got {tuple(slopes.shape)}", hint="Pass one slope a head."
        )
    return Alibi(slopes, symmetric)
