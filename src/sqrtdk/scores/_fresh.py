"""New weights for the learned scores, uniform as in Glorot & Bengio 2010: +-sqrt(6 / (in + out))."""

from __future__ import annotations

import math

import torch
from torch import nn

from sqrtdk.scales._numbers import whole_number
from sqrtdk.scores._additive import Additive, additive
from sqrtdk.scores._bilinear import Bilinear, bilinear


def fresh_bilinear(
    query_dim: int,
    key_dim: int,
    *,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Bilinear:
    """A bilinear score with a new weight; see `bilinear`.

    Args:
        query_dim: E.
        key_dim: Ek.
        heads: query heads; None: one weight for all.
        dtype: of the parameter; None: torch's default.
        device: of the parameter.

    Returns:
        The score, with the parameter `weight`.

    Raises:
        InvalidTypeError: a size is not an integer.
        InvalidValueError: a size is below 1.

    Example:
        >>> fresh_bilinear(4, 6, heads=2).weight.shape
        torch.Size([2, 4, 6])

    Reference:
        Luong et al. 2015, arXiv:1508.04025; Glorot & Bengio 2010 for the start.
    """
    return bilinear(_weight(_lead(heads), _size(query_dim, "query_dim"), _size(key_dim, "key_dim"), dtype, device))


def fresh_additive(
    query_dim: int,
    key_dim: int,
    hidden: int,
    *,
    heads: int | None = None,
    key_heads: int | None = None,
    bias: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Additive:
    """An additive score with new weights; see `additive`.

    Args:
        query_dim: E.
        key_dim: Ek.
        hidden: A.
        heads: query heads; None: one set of weights for all.
        key_heads: key heads where they are fewer; None: `heads`.
        bias: whether to add a bias, which starts at 0.
        dtype: of the parameters; None: torch's default.
        device: of the parameters.

    Returns:
        The score, with the parameters `v`, `query_weight`, `key_weight` and, if requested, `bias`.

    Raises:
        InvalidTypeError: a size is not an integer.
        InvalidValueError: a size is below 1.

    Example:
        >>> {name: tuple(p.shape) for name, p in fresh_additive(4, 6, 8).named_parameters()}
        {'v': (8,), 'query_weight': (4, 8), 'key_weight': (6, 8)}

    Reference:
        Bahdanau et al. 2015, arXiv:1409.0473; Glorot & Bengio 2010 for the start.
    """
    width, lead = _size(hidden, "hidden"), _lead(heads)
    return additive(
        nn.Parameter(_weight(lead, width, 1, dtype, device).detach().squeeze(-1)),
        _weight(lead, _size(query_dim, "query_dim"), width, dtype, device),
        _weight(_lead(heads if key_heads is None else key_heads), _size(key_dim, "key_dim"), width, dtype, device),
        nn.Parameter(torch.zeros(*lead, width, dtype=dtype, device=device)) if bias else None,
    )


def _size(value: object, name: str) -> int:
    return whole_number(value, name, 1)


def _lead(heads: object) -> tuple[int, ...]:
    return () if heads is None else (_size(heads, "heads"),)


def _weight(
    lead: tuple[int, ...], inside: int, outside: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    weight = torch.empty(*lead, inside, outside, dtype=dtype, device=device)
    bound = math.sqrt(6.0 / (inside + outside))
    return nn.Parameter(weight.uniform_(-bound, bound))
