"""A normalisation, from the values before and after it.

After = gain * x / sqrt(m + eps) + shift, with x the values before (of "layer" less their mean) and m their mean square.
For a given eps that is linear in gain and shift. Errors are relative to the size of what is rounded, so the least
squares are weighted by its inverse. eps is found on a grid, then by Gauss-Newton: with gain and shift eliminated, the
values change by `-gain x / (2 (m + eps)^1.5)` with it. How far tokens differ in m decides how well it is known; its
standard error comes from the residuals of each token summed, as all channels of one share the error of its length. The
one token that decides it, where there is one, leaves no residual: the error is never less than that of rounding, one of
each entry, independent, and those of its length (`_of_length`), which all channels of a token share.

"l2" is "rms" of no eps with a gain of 1/sqrt(E); it is told by that gain being the same everywhere and exactly so.
The simplest gain that fits is taken: none, one for all heads, one for each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.program import Norm

LIMIT = 16.0  # roundings: a norm in half precision takes six, of which the mean square and its root are shared
ENTRIES = 2**18  # that are looked at, in rows evenly spaced
FEWEST = 3  # numbers that a gain must explain
SIGMAS = 5.0  # of the interval of eps
GRID = (0.0, *(10.0**k for k in range(-12, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class NormFit:
    """A normalisation that gives the values after from those before.

    Attributes:
        norm: the step; its eps is the best guess, the interval's middle.
        residual: largest difference from the values after, in roundings of what each was made of.
        eps_low: least eps that the values allow.
        eps_high: greatest; far above `eps_low` where the eps is lost in rounding.
    """

    norm: Norm
    residual: float
    eps_low: float
    eps_high: float

    def allows(self, eps: float) -> bool:
        """Whether the values could have been made with this eps."""
        return self.eps_low <= eps <= self.eps_high


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """x (H, N, E) centred if need be, m (H or 1, N, 1), y (H, N, E) and the size (H, N, E) of x before centring."""

    x: Tensor
    m: Tensor
    y: Tensor
    size: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Solution:
    gain: Tensor
    shift: Tensor | None
    eps: float
    error: float  # standard error of eps
    residual: float


def fit_norm(
    before: Tensor, after: Tensor, kind: str | None = None, *, dtype: torch.dtype | None = None
) -> NormFit | None:
    """The normalisation between two tensors (B, H, L, E); None where none gives the values after.

    Args:
        before: values before it.
        after: values after it.
        kind: "rms", "layer" or "l2"; None tries all.
        dtype: in which the values after were computed; None: their own.

    Example:
        >>> x = torch.randn(2, 4, 16, 8)
        >>> fit = fit_norm(x, torch.nn.functional.rms_norm(x, (8,), eps=1e-3))
        >>> fit.norm.kind, fit.norm.over, fit.allows(1e-3), fit.allows(1e-5)
        ('rms', 'head', True, False)
    """
    finfo = torch.finfo(dtype or after.dtype)
    keep = _chosen(before)
    x, y = (t.transpose(0, 1).flatten(1, 2)[:, keep].double() for t in (before, after))
    if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()) or not bool(y.any()):
        return None
    best: NormFit | None = None
    for over in ("head", "heads") if x.shape[0] > 1 else ("head",):
        for name in ("rms", "layer") if kind is None else ("rms" if kind == "l2" else kind,):
            fit = _fit(_tokens(x, y, name, over), Norm(name, torch.ones(1, 1), over=over), finfo)
            if fit is not None and (best is None or fit.residual < best.residual):
                best = fit
    return None if best is None else _as_length(best, x, kind, finfo.eps)


def _chosen(values: Tensor) -> Tensor:
    """Numbers of some of the B * L rows."""
    batch, heads, length, features = values.shape
    count, most = batch * length, max(FEWEST + 1, ENTRIES // max(1, heads * features))
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).long()


def _tokens(x: Tensor, y: Tensor, kind: str, over: str) -> _Tokens:
    axes, size = ((0, 2) if over == "heads" else (2,)), x.abs()
    if kind == "layer":
        mean = x.mean(axes, keepdim=True)
        x = x - mean
        size = size + mean.abs() + 0.1 * x.square().mean(axes, keepdim=True).sqrt()  # the mean's own error
    return _Tokens(x, x.square().mean(axes, keepdim=True), y, size)


def _fit(tokens: _Tokens, norm: Norm, finfo: torch.finfo) -> NormFit | None:
    """The simplest gain whose residual is that of rounding."""
    heads, rows, _ = tokens.x.shape
    shifted = norm.kind == "layer"
    gains: tuple[tuple[int, ...] | None, ...] = ((), (0,), None) if norm.over == "head" else ((), None)
    for shared in gains:
        if rows * (1 if shared is None else heads) < FEWEST + shifted:
            continue
        found = _solve(tokens, shared, shifted and shared != (), finfo)
        if found.residual <= LIMIT:
            low, high = max(0.0, found.eps - SIGMAS * found.error), found.eps + SIGMAS * found.error
            norm = replace(norm, gain=found.gain, shift=found.shift, eps=found.eps)
            return NormFit(norm, found.residual, low, high)
    return None


def _solve(tokens: _Tokens, shared: tuple[int, ...] | None, shifted: bool, finfo: torch.finfo) -> _Solution:
    """Gain, shift and eps. `shared`: () a gain of one number, (0,) one for all heads, None one a head."""
    axes = (1,) if shared is None else (0, 1) if shared else (0, 1, 2)
    weight = torch.ones_like(tokens.y) / tokens.y.square().mean()
    eps = min(GRID, key=lambda e: _linear(tokens, e, weight, axes, shifted)[-1])
    for _ in range(12):
        gain, shift, unit, _ = _linear(tokens, eps, weight, axes, shifted)
        floor = finfo.tiny / finfo.eps + 1e-3 * tokens.y.square().mean().sqrt()
        sizes = _sizes(tokens, gain, shift, eps)
        weight = (sizes + floor).reciprocal().square()
        step, error = _newton(tokens, gain, shift, unit, eps, weight, axes, finfo.eps / 2)
        if abs(step) <= 0.01 * error:
            break
        eps = max(0.0, eps + step)
    gain, shift, unit, _ = _linear(tokens, eps, weight, axes, shifted)
    beside = (tokens.y - gain * unit - (0.0 if shift is None else shift)).abs()
    sizes = _sizes(tokens, gain, shift, eps)
    residual = float((beside / (sizes * (finfo.eps / 2) + finfo.tiny * finfo.eps)).max())
    features = tokens.x.shape[-1]
    full = gain.expand(gain.shape[0], 1, features)[:, 0]
    return _Solution(full, None if shift is None else shift[:, 0], eps, error, residual)


def _sizes(tokens: _Tokens, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """Sum of the sizes of what an entry was made of: rounding is relative to them."""
    sizes = gain.abs() * tokens.size / _length(tokens, eps)
    return sizes if shift is None else sizes + shift.abs()


def _length(tokens: _Tokens, eps: float) -> Tensor:
    return (tokens.m + eps).sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def _linear(
    tokens: _Tokens, eps: float, weight: Tensor, axes: tuple[int, ...], shifted: bool
) -> tuple[Tensor, Tensor | None, Tensor, float]:
    """Weighted least squares at one eps: gain, shift, x / sqrt(m + eps), and the squares that are left."""
    unit, y = tokens.x / _length(tokens, eps), tokens.y
    shift: Tensor | None = None
    if shifted:
        total = weight.sum(axes, keepdim=True)
        x_mean = (weight * unit).sum(axes, keepdim=True) / total
        y_mean = (weight * y).sum(axes, keepdim=True) / total
        gain = _ratio(
            (weight * (unit - x_mean) * (y - y_mean)).sum(axes, keepdim=True), weight * (unit - x_mean) ** 2, axes
        )
        shift = y_mean - gain * x_mean
        left = y - gain * unit - shift
    else:
        gain = _ratio((weight * unit * y).sum(axes, keepdim=True), weight * unit.square(), axes)
        left = y - gain * unit
    return gain, shift, unit, float((weight * left.square()).sum())


def _ratio(upper: Tensor, squares: Tensor, axes: tuple[int, ...]) -> Tensor:
    lower = squares.sum(axes, keepdim=True)
    return upper / lower.masked_fill(lower == 0, 1.0)


def _newton(
    tokens: _Tokens,
    gain: Tensor,
    shift: Tensor | None,
    unit: Tensor,
    eps: float,
    weight: Tensor,
    axes: tuple[int, ...],
    u: float,
) -> tuple[float, float]:
    """Step of eps, with gain and shift eliminated, and its standard error."""
    slope = -0.5 * gain * unit / _length(tokens, eps).square()
    made = gain * unit
    left = tokens.y - made
    if shift is not None:
        left = left - shift
        total = weight.sum(axes, keepdim=True)
        slope = slope - (weight * slope).sum(axes, keepdim=True) / total
        unit = unit - (weight * unit).sum(axes, keepdim=True) / total
    slope = slope - unit * _ratio((weight * unit * slope).sum(axes, keepdim=True), weight * unit.square(), axes)
    curvature = float((weight * slope.square()).sum())
    if curvature == 0.0:
        return 0.0, math.inf
    scores = weight * slope * left
    channels = (0, 2) if tokens.m.shape[0] == 1 else (2,)
    scattered = float(scores.sum(channels).square().sum().sqrt()) / curvature
    by_length = float(((weight * slope * made).sum(channels) / curvature).square().sum())
    summed = math.prod(slope.shape[axis] for axis in channels)
    rounding = u * math.sqrt((1.0 / curvature + _of_length(summed) * by_length) / 3.0)
    return float(scores.sum()) / curvature, max(scattered, rounding)


def _of_length(count: int) -> float:
    """Variance of what rounding makes of sqrt(m + eps), relative, in u^2 / 3; the mean of so many squares is m.

    The root and the division round once each. The sum, of m and of eps, counts by the half, as the root halves an
    error: with squares of normal numbers, added one after the other, `count / 3 + 3 / 2` of the additions (`rounding`)
    and `3 / count` of the squares.
    """
    return 2.0 + (count / 3.0 + 1.5 + 3.0 / count + 1.0) / 4.0


def _as_length(fit: NormFit, x: Tensor, kind: str | None, unit: float) -> NormFit | None:
    """The fit as an l2 norm, where it is one or was asked for."""
    if kind not in (None, "l2") or fit.norm.kind != "rms":
        return fit
    count = x.shape[2] * (x.shape[0] if fit.norm.over == "heads" else 1)
    gain = fit.norm.gain * math.sqrt(count)
    ones = bool(((gain.abs() - 1.0).abs() <= 4 * unit).all())
    if kind is None and not (ones and fit.eps_low == 0.0):
        return fit
    axes = (0, 2) if fit.norm.over == "heads" else (2,)
    shortest = float(x.square().sum(axes).sqrt().min())
    return NormFit(replace(fit.norm, kind="l2", gain=gain, eps=0.0), fit.residual, 0.0, shortest)
