"""Negative distances as scores: squared, exact for pairs and as a dot product, which every kernel computes; absolute.

-|q - k|^2 = 2 q . k - |q|^2 - |k|^2 holds for every origin. From the keys' mean the three terms are small;
`sqrtdk.impl.product` bounds what they lose against each other there, and chooses between the two forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, fixed, none
from sqrtdk.scores._score import check_same_features, heads_of, widened

if TYPE_CHECKING:
    from jaxtyping import Float

_CDIST_DEVICES = ("cpu", "cuda", "meta")
_FEATURES_AT_ONCE = 8  # of the formula, whose tensors hold as many numbers a pair


class _OfDifferences:
    """A score that is summed up from the differences of q and k, feature by feature."""

    __slots__ = ()

    @property
    def width(self) -> int:
        """1, as in a matrix product: the differences of a pair are summed up one by one."""
        return 1

    def prepare(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Return query and key unchanged, half types as float32.

        Raises:
            InvalidValueError: Query and key have different features.
        """
        check_same_features(query, key, "a distance score")
        return widened(query), widened(key)


@dataclass(frozen=True, slots=True)
class Distance(_OfDifferences):
    """The score -|q - k|^2 of a query and a key; see `distance` and `rbf`.

    Attributes:
        factor: The scale unless the caller gives one.
    """

    factor: float = 1.0

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `fixed(factor)`, `none()` for 1: only the caller knows the unit of distances."""
        return none() if self.factor == 1.0 else fixed(self.factor)

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Return -|q - k|^2 for every pair of query and key, (..., Hq, R, S).

        It is computed from the differences, so nothing cancels for points that are far from the origin.
        """
        return -_powers(query, key, 2)

    def product(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E+2"], Float[Tensor, "*BH S E+2"]]:
        """Return (2 q, -1, -|q|^2) and (k, |k|^2, 1) of a prepared query and key, seen from the keys' mean.

        Their dot product is the score. The mean carries no gradient, since no distance depends on it.
        """
        centre, of_query = _centres(query, key)
        query, key = query - of_query, key - centre
        squares, key_squares = (t.square().sum(-1, keepdim=True) for t in (query, key))
        one, key_one = torch.ones_like(squares), torch.ones_like(key_squares)
        return torch.cat([2.0 * query, -one, -squares], -1), torch.cat([key, key_squares, key_one], -1)


@dataclass(frozen=True, slots=True)
class Laplace(_OfDifferences):
    """The score -|q - k|_1 of a query and a key; see `laplace`."""

    @property
    def default_scale(self) -> ScaleRule:
        """The scale rule `none()`: only the caller knows the unit of distances."""
        return none()

    def pairs(self, query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"]) -> Float[Tensor, "*BHq R S"]:
        """Return -|q - k|_1 for every pair of query and key, (..., Hq, R, S)."""
        return -_powers(query, key, 1)


def _powers(
    query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"], power: int
) -> Float[Tensor, "*BHq R S"]:
    """Return sum_i |q_i - k_i|^power for every pair, (..., Hq, R, S), from the differences."""
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type in _CDIST_DEVICES for t in (query, key))
    followed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    if not plain or followed or torch.compiler.is_compiling():
        return _by_formula(query, key, power)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    query, key = (t.expand(*lead, *t.shape[-2:]) for t in (query, key))
    powers: Tensor = _Powers.apply(query, key, power)  # type: ignore[no-untyped-call]
    return powers


def _centres(
    query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
) -> tuple[Float[Tensor, "*#BH 1 E"], Float[Tensor, "*#BHq 1 E"]]:
    """Return the mean of each head's keys, and the same for the query's heads; one mean for all where the query lacks a
    dimension of the key."""
    if not key.shape[-2]:
        zero = key.new_zeros(key.shape[-1])
        return zero, zero
    mean = key.detach().mean(-2, keepdim=True)
    group = heads_of(query) // heads_of(key) if heads_of(key) > 1 else 1
    grown = mean.repeat_interleave(group, -3) if group > 1 else mean
    sizes = zip(reversed(grown.shape[:-2]), reversed(query.shape[:-2]), strict=False)
    if grown.ndim > query.ndim or any(size not in (1, wanted) for size, wanted in sizes):
        mean = grown = mean.flatten(0, -2).mean(0)
    return mean, grown


def _by_formula(
    query: Float[Tensor, "*#BHq R A"], key: Float[Tensor, "*#BHq S A"], power: int
) -> Float[Tensor, "*BHq R S"]:
    """Return the same in operations that torch's compiler and transforms follow, a few features at a time."""
    parts = []
    for at in range(0, query.shape[-1], _FEATURES_AT_ONCE):
        q, k = (t[..., at : at + _FEATURES_AT_ONCE] for t in (query, key))
        apart = q.unsqueeze(-2) - k.unsqueeze(-3)
        parts.append((apart.square() if power == 2 else apart.abs()).sum(-1))
    return sum(parts[1:], parts[0])


class _Powers(torch.autograd.Function):
    """`_powers` by torch's `cdist`, one number a pair, with derivatives of any order.

    `cdist` alone has a first derivative only, which for squares is NaN at a distance that overflowed.
    """

    @staticmethod
    def forward(ctx: Any, query: Float[Tensor, "*lead R A"], key: Float[Tensor, "*lead S A"], power: int) -> Tensor:
        distance = torch.cdist(query, key, float(power), compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(query, key, distance)
        ctx.power = power
        return distance.square() if power == 2 else distance

    @staticmethod
    def backward(ctx: Any, given: Float[Tensor, "*lead R S"]) -> tuple[Tensor, Tensor, None]:
        query, key, distance = ctx.saved_tensors
        if torch.is_grad_enabled():  # it shall be differentiated again
            apart = query.unsqueeze(-2) - key.unsqueeze(-3)
            along = given.unsqueeze(-1) * (2.0 * apart if ctx.power == 2 else apart.sign())
            return along.sum(-2), -along.sum(-3), None
        along = given
        if ctx.power == 2:
            along = (2.0 * given * distance).masked_fill(distance.isinf(), 0.0)
        turned, far = along.mT.contiguous(), distance.mT.contiguous()
        back, power = torch.ops.aten._cdist_backward, float(ctx.power)
        return back(along.contiguous(), query, key, power, distance), back(turned, key, query, power, far), None


def distance() -> Distance:
    """The negative squared distance, score = -|q - k|^2; not scaled unless a scale is given.

    A Gaussian kernel of standard deviation sigma is `rbf(sigma)`, which is `scale=fixed(0.5 / sigma**2)` here.

    `attention` computes it as a dot product, which every kernel runs, where that rounds no logit by more than 2^-11 in
    float32; else in float64 or pair by pair, and `explain` says why.

    Returns:
        The score; it takes query (..., Hq, L, E) and key (..., H, S, E). Half types are computed in float32.

    Raises:
        InvalidValueError: in a call, q and k of different features.

    Example:
        >>> import torch
        >>> score = distance()
        >>> score.pairs(*score.prepare(torch.tensor([[1e6, 0.0]]), torch.tensor([[1e6, 0.5]])))
        tensor([[-0.2500]])
        >>> query, key = score.product(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 2.0], [3.0, 6.0]]))
        >>> query @ key.mT
        tensor([[-4., -4.]])

    Reference:
        Tsai et al. 2019, arXiv:1908.11775; Kim et al. 2021, arXiv:2006.04710.
    """
    return Distance()


def rbf(sigma: float = 1.0) -> Distance:
    """The exponent of a Gaussian kernel (an RBF): `distance` with the scale 1 / (2 sigma^2) unless a scale is given.

    Args:
        sigma: Standard deviation, in the unit of the features; above 0.

    Raises:
        InvalidValueError: `sigma` is not above 0, or not finite.

    Example:
        >>> import torch, sqrtdk
        >>> q, k = torch.tensor([[[[0.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
        >>> output = sqrtdk.attention(q, k, k, score=rbf(0.5))
        >>> torch.allclose(output, torch.tensor(-2.0).sigmoid())
        True
    """
    if not 0.0 < sigma < math.inf:
        raise InvalidValueError(f"sigma of an RBF is above 0 and finite; got {sigma}", hint="A standard deviation.")
    return Distance(0.5 / sigma**2)


def laplace() -> Laplace:
    """The negative sum of absolute differences, score = -|q - k|_1, of a Laplace kernel; not scaled unless a scale is
    given: a length l is `scale=fixed(1 / l)`.

    It has no form as a dot product: it is computed pair by pair.

    Returns:
        The score; it takes query (..., Hq, L, E) and key (..., H, S, E). Half types are computed in float32.

    Raises:
        InvalidValueError: In a call, q and k of different features.

    Example:
        >>> import torch
        >>> laplace().pairs(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 2.0], [2.0, 6.0]]))
        tensor([[-2., -3.]])

    Reference:
        Kim et al. 2019, arXiv:1901.05761, "Laplace attention".
    """
    return Laplace()
