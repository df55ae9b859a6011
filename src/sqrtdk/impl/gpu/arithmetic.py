"""Elementary functions that Triton's core lacks, accurate to a few units in the last place."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of `x`, elementwise.

    For |x| < 0.625 it is an odd polynomial from Cephes, because 1 - 2 / (e^2x + 1) would cancel there.
    """
    y = x * x
    small = -5.70498872745e-3
    small = small * y + 2.06390887954e-2
    small = small * y - 5.37397155531e-2
    small = small * y + 1.33314422036e-1
    small = small * y - 3.33332819422e-1
    small = small * y * x + x
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, elementwise, accurate also where 1 + x rounds to 1."""
    whole = 1.0 + x
    ratio = x / tl.where(whole == 1.0, 1.0, whole - 1.0)
    return tl.where(whole == 1.0, x, tl.where(whole == INF, INF, tl.log(whole) * ratio))
