"""Tails of a sum of products of Gaussian pairs, from its characteristic function, to full relative accuracy.

Units: sqrt(vq vk) is 1. A sum of `dim` products q_i k_i is half the difference of two sums of squares, of
(q_i + k_i) / sqrt 2 and (q_i - k_i) / sqrt 2, so that its cumulant function is, for |t| < 1,

    K(t) = dim (-1/2 log(1 - t^2) + A t / (1 - t) - B t / (1 + t)),    A, B = (mq / sqrt(vq) +- mk / sqrt(vk))^2 / 4

and P(X > y) = 1/(2 pi i) int e^{K(t) - t y} dt / t over any path from -i inf to i inf that crosses the real axis
between 0 and 1. Gil-Pelaez takes the path along the imaginary axis, where at dim = 1 the integrand falls like 1/t^2
and oscillates. Here the path is a hyperbola t = c + ... + i beta sinh(s) through the saddle point c of the integrand,
bent towards the side where e^{-ty} decays: the trapezoid rule in s then converges exponentially, at every dimension,
and far in the tails as well, since the factor e^{K(c) - c y} is taken out and kept as a logarithm.

References: J. Gil-Pelaez 1951, Biometrika 38, 481; S. O. Rice 1980, SIAM J. Sci. Stat. Comput. 1, 438 (saddle-point
integration); L. N. Trefethen and J. A. C. Weideman 2014, SIAM Review 56, 385 (the trapezoid rule).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Complex

PATH_STEP = 0.05
LEAN = math.tan(math.radians(25.0))  # slope of the path's ends against the vertical
BISECTIONS = 60
PATH_DECADES = 20.0  # the path ends where the integrand has fallen by this many decades


@dataclass(frozen=True, slots=True)
class PairSum:
    """Sum of `dim` products of independent Gaussian pairs, in units of sqrt(vq vk)."""

    dim: int
    plus: float  # A
    minus: float  # B

    @property
    def mean(self) -> float:
        """Expectation, dim (A - B)."""
        return self.dim * (self.plus - self.minus)

    @property
    def std(self) -> float:
        """Standard deviation, sqrt(dim (1 + 2 A + 2 B))."""
        return math.sqrt(self.dim * (1.0 + 2.0 * (self.plus + self.minus)))

    def mirrored(self) -> PairSum:
        """Return the distribution of -X."""
        return PairSum(self.dim, self.minus, self.plus)

    def log_above(self, excess: float) -> float:
        """Return the natural logarithm of P(X - mean > excess)."""
        if math.isinf(excess):
            return -math.inf if excess > 0 else 0.0
        if excess < 0.0:
            return math.log1p(-min(1.0, math.exp(self.mirrored().log_above(-excess))))
        c, rest = self._crossing(excess)  # rest = 1 - c
        beta = min(c, rest)
        reach = math.sqrt(math.expm1(min(700.0, 2.0 * PATH_DECADES * math.log(10.0) / self.dim)))
        steps = math.ceil(math.asinh(max(1.0, reach) / beta) / PATH_STEP)
        s = torch.arange(steps + 1, dtype=torch.float64) * PATH_STEP
        side = LEAN if excess + self.mean >= 0.0 else -LEAN
        offset = torch.complex(beta * side * (s.cosh() - 1.0), beta * s.sinh())
        slope = torch.complex(beta * side * s.sinh(), beta * s.cosh())
        t = c + offset
        exponent = self._exponent(t, rest - offset) - excess * t
        vertex = exponent[0].real
        terms = ((exponent - vertex).exp() * slope / t).imag
        terms[0] *= 0.5
        total = float(terms.sum()) * PATH_STEP / math.pi
        # Beyond about 1e18 dim the sum is lost in rounding; e^{K(c) - c y}, Chernoff's bound, is then returned.
        return min(0.0, float(vertex) + (math.log(total) if total > 0.0 else 0.0))

    def _exponent(
        self, t: Complex[Tensor, " steps"], one_minus_t: Complex[Tensor, " steps"]
    ) -> Complex[Tensor, " steps"]:
        """Return K(t) - mean t, without cancellation."""
        square = t * t
        below = torch.where(square.abs() < 0.25, torch.log1p(-square), (one_minus_t * (1.0 + t)).log())
        return float(self.dim) * (-0.5 * below + square * (self.plus / one_minus_t + self.minus / (1.0 + t)))

    def _slope(self, c: float, rest: float) -> float:
        """Return K'(c) - mean, as a sum of positive terms."""
        pairs = c / (rest * (1.0 + c))
        means = self.plus * c * (1.0 + rest) / rest**2 + self.minus * c * (2.0 + c) / (1.0 + c) ** 2
        return self.dim * (pairs + means)

    def _crossing(self, excess: float) -> tuple[float, float]:
        """Return (c, 1 - c): the saddle point K'(c) = y, but at least 1 / std away from the pole at 0."""
        low, high = -100.0, 100.0  # of logit(c)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            c, rest = 1.0 / (1.0 + math.exp(-middle)), 1.0 / (1.0 + math.exp(middle))
            low, high = (middle, high) if self._slope(c, rest) < excess else (low, middle)
        least = min(0.5, 1.0 / self.std)
        c, rest = 1.0 / (1.0 + math.exp(-low)), 1.0 / (1.0 + math.exp(low))
        return (c, rest) if c > least else (least, 1.0 - least)


def log_normal_above(deviations: float) -> float:
    """Return the natural logarithm of P(x > deviations) of a standard normal.

    Example:
        >>> log_normal_above(0.0) == math.log(0.5), round(log_normal_above(100.0), 1)
        (True, -5005.5)
    """
    if math.isinf(deviations):
        return -math.inf if deviations > 0 else 0.0
    return float(torch.special.log_ndtr(torch.tensor(-deviations, dtype=torch.float64)))
