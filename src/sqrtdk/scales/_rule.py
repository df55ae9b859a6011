"""The interface of a scale rule: frozen data and one pure function, the factor on the score of every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Real

    from sqrtdk._shapes import Factor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes on which a rule may depend.

    Attributes:
        head_dim: E of the query.
        heads: query heads.
        query_len: L.
        key_len: S.
        dtype: of the query.
        device: of the query.
        visible_keys: returns the number of keys that each row sees, broadcastable to (..., Hq, L, 1), in float32 or
            float64; called only by rules that need it.
    """

    head_dim: int
    heads: int
    query_len: int
    key_len: int
    dtype: torch.dtype
    device: torch.device
    visible_keys: Callable[[], Factor]


@runtime_checkable
class ScaleRule(Protocol):
    """A rule for the factor that multiplies the score."""

    def beta(self, sizes: Sizes) -> float | Factor:
        """Return the factor: a number, or a tensor that broadcasts to (..., Hq, L, 1).

        A tensor is in float32 or float64, also for a half query, so that the factor is not rounded to it.

        Args:
            sizes: Head dimension, numbers of heads, rows and keys, and the visible keys of each row.
        """


def sizes(
    head_dim: int,
    heads: int = 1,
    query_len: int = 1,
    key_len: int = 1,
    *,
    visible: Real[Tensor, "..."] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Sizes:
    """Return the sizes of an imagined call, to see the factor that a rule gives for it.

    Args:
        head_dim: E of the query.
        heads: query heads.
        query_len: L.
        key_len: S.
        visible: keys that each row sees, broadcastable to (..., Hq, L, 1); None: each sees all S.
        dtype: of the query.
        device: of the query.

    Returns:
        Sizes.

    Example:
        >>> sizes(64, heads=8, key_len=10).visible_keys()
        tensor([[10.]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    place = torch.device(device)

    visible_keys = partial(_visible_keys, visible, key_len, wide, place)
    return Sizes(head_dim, heads, query_len, key_len, dtype, place, visible_keys)


def _visible_keys(visible: Real[Tensor, "..."] | None, keys: int, dtype: torch.dtype, device: torch.device) -> Factor:
    return torch.full((1, 1), float(keys), dtype=dtype, device=device) if visible is None else visible.to(dtype)
