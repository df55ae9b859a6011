"""Fits a normalisation to the values before and after it.

After = gain * x / sqrt(m + eps) + shift, where x are the values before (for "layer" minus their mean) and m is their
mean square. For a given eps this is linear in gain and shift. Errors are relative to the size of what is rounded, so
the least squares are weighted by its inverse. eps is found on a grid, then by Gauss-Newton: with gain and shift
eliminated, its derivative is `-gain x / (2 (m + eps)^1.5)`. How well eps is known depends on how much tokens differ in
m. Its standard error comes from the residuals, summed over each token because all channels of a token share the error
of its length. A single token that decides eps leaves no residual. So the error is never below that of rounding: one
independent rounding of each entry, and those of its length (`_of_length`).

"l2" is "rms" without eps and with gain 1/sqrt(E). It is recognised by a gain that is the same everywhere, and exactly
that. The simplest gain that fits is taken: none, one for all heads, one for each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import NormStep

# roundings: a norm in half precision takes six, of which channels share those of mean square and root
NORM_ROUNDINGS = 16.0
MOST_ENTRIES = 2**18  # entries that are examined, in evenly spaced rows
LEAST_NUMBERS_PER_GAIN = 3  # numbers that each gain must explain
EPS_SIGMAS = 5.0  # half width of the interval of eps, in standard errors
EPS_GRID = (0.0, *(10.0**k for k in range(-12, 1)))  # start values of eps


@dataclass(frozen=True, slots=True, eq=False)
class NormFit:
    """A normalisation that leads from the values before to the values after.

    Attributes:
        norm: the step; its eps is the best estimate, the middle of the interval.
        residual: largest difference from the values after, in roundings of their parts.
        eps_low: least eps that the values allow.
        eps_high: greatest; far above `eps_low` if eps is lost in rounding.
    """

    norm: NormStep
    residual: float
    eps_low: float
    eps_high: float

    def allows(self, eps: float) -> bool:
        """Return whether a norm with this eps could have made the values: eps_low <= eps <= eps_high."""
        return self.eps_low <= eps <= self.eps_high


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """x (H, N, E), centred if needed; m (H or 1, N, 1); y (H, N, E); and the size (H, N, E) of x before centring."""

    x: Tensor
    m: Tensor
    y: Tensor
    size: Tensor

    def length(self, eps: float) -> Tensor:
        """Return the divisor of x."""
        return (self.m + eps).sqrt().clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True, slots=True)
class _Squares:
    """Weighted sums over some axes; with `shifted`, the weighted mean over these axes is subtracted first."""

    weight: Tensor
    axes: tuple[int, ...]
    shifted: bool

    def centred(self, values: Tensor) -> Tensor:
        if not self.shifted:
            return values
        mean = (self.weight * values).sum(self.axes, keepdim=True) / self.weight.sum(self.axes, keepdim=True)
        return values - mean

    def along(self, values: Tensor, other: Tensor) -> Tensor:
        """Return the factor of `other` that comes closest to the values."""
        upper, lower = ((self.weight * x * other).sum(self.axes, keepdim=True) for x in (values, other))
        return upper / lower.masked_fill(lower == 0, 1.0)


def fit_norm(
    before: Tensor, after: Tensor, kind: str | None = None, *, dtype: torch.dtype | None = None
) -> NormFit | None:
    """Return the normalisation between two tensors (B, H, L, E); None if none gives the values after.

    Args:
        before: values before it.
        after: values after it.
        kind: "rms", "layer" or "l2"; None tries all.
        dtype: dtype in which the values after were computed; None: their own.

    Example:
        >>> x = torch.randn(2, 4, 16, 8)
        >>> fit = fit_norm(x, torch.nn.functional.rms_norm(x, (8,), eps=1e-3))
        >>> fit.norm.kind, fit.norm.over, fit.allows(1e-3), fit.allows(1e-5)
        ('rms', 'head', True, False)
    """
    finfo = torch.finfo(dtype or after.dtype)
    batch, heads, length, features = before.shape
    count, most = batch * length, max(LEAST_NUMBERS_PER_GAIN + 1, MOST_ENTRIES // max(1, heads * features))
    keep = torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).long()
    x, y = (t.transpose(0, 1).flatten(1, 2)[:, keep].double() for t in (before, after))
    if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()) or not bool(y.any()):
        return None
    best: NormFit | None = None
    for over in ("head", "heads") if x.shape[0] > 1 else ("head",):
        for name in ("rms", "layer") if kind is None else ("rms" if kind == "l2" else kind,):
            fit = _fit(_tokens(x, y, name, over), NormStep(name, torch.ones(1, 1), over=over), finfo)
            if fit is not None and (best is None or fit.residual < best.residual):
                best = fit
    return None if best is None else _as_length(best, x, kind, finfo.eps)


def _tokens(x: Tensor, y: Tensor, kind: str, over: str) -> _Tokens:
    axes, size = ((0, 2) if over == "heads" else (2,)), x.abs()
    if kind == "layer":
        mean = x.mean(axes, keepdim=True)
        x = x - mean
        size = size + mean.abs() + 0.1 * x.square().mean(axes, keepdim=True).sqrt()  # the mean's own error
    return _Tokens(x, x.square().mean(axes, keepdim=True), y, size)


def _fit(tokens: _Tokens, norm: NormStep, finfo: torch.finfo) -> NormFit | None:
    """Return the fit with the simplest gain that leaves only rounding: one number, one per channel, also per head."""
    heads, rows, _ = tokens.x.shape
    shifted = norm.kind == "layer"
    gains = ((0, 1, 2), (0, 1), (1,)) if norm.over == "head" else ((0, 1, 2), (1,))
    for axes in gains:
        if rows * (1 if axes == (1,) else heads) >= LEAST_NUMBERS_PER_GAIN + shifted:
            found = _solved(tokens, norm, axes, shifted and len(axes) < 3, finfo)
            if found.residual <= NORM_ROUNDINGS:
                return found
    return None


def _solved(tokens: _Tokens, norm: NormStep, axes: tuple[int, ...], shifted: bool, finfo: torch.finfo) -> NormFit:
    """Return the norm with the gain, shift and eps of weighted least squares."""
    y = tokens.y
    sums = _Squares(torch.ones_like(y) / y.square().mean(), axes, shifted)
    floor = finfo.tiny / finfo.eps + 1e-3 * y.square().mean().sqrt()
    eps = min(EPS_GRID, key=lambda e: float(_linear(tokens, e, sums)[2].square().sum()))
    error = math.inf
    for _ in range(12):
        gain, shift, _ = _linear(tokens, eps, sums)
        weight = (_sizes(tokens, gain, shift, eps) + floor).reciprocal().square()
        sums = replace(sums, weight=weight)
        # Weights depend on the fit, so they are renewed each round: iteratively reweighted least squares.
        step, error = _newton(tokens, gain, shift, eps, sums, finfo.eps / 2)
        if abs(step) <= 0.01 * error:
            break
        eps = max(0.0, eps + step)
    gain, shift, left = _linear(tokens, eps, sums)
    sizes = _sizes(tokens, gain, shift, eps)
    residual = float((left.abs() / (sizes * (finfo.eps / 2) + finfo.tiny * finfo.eps)).max())
    full = gain.expand(gain.shape[0], 1, y.shape[-1])[:, 0]
    norm = replace(norm, gain=full, shift=shift[:, 0] if shifted else None, eps=eps)
    return NormFit(norm, residual, max(0.0, eps - EPS_SIGMAS * error), eps + EPS_SIGMAS * error)


def _sizes(tokens: _Tokens, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return the summed sizes of an entry's parts: rounding is relative to them."""
    return gain.abs() * tokens.size / tokens.length(eps) + shift.abs()


def _linear(tokens: _Tokens, eps: float, sums: _Squares) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain, shift (0 without one) and what is left of each entry, by weighted least squares at one eps."""
    unit = tokens.x / tokens.length(eps)
    gain = sums.along(tokens.y, sums.centred(unit))
    rest = tokens.y - gain * unit
    left = sums.centred(rest)
    return gain, (rest - left).mean(sums.axes, keepdim=True), left


def _newton(tokens: _Tokens, gain: Tensor, shift: Tensor, eps: float, sums: _Squares, u: float) -> tuple[float, float]:
    """Return the step of eps, with gain and shift eliminated, and its standard error."""
    unit = tokens.x / tokens.length(eps)
    made = gain * unit
    slope, spread = sums.centred(-0.5 * made / tokens.length(eps).square()), sums.centred(unit)
    slope = slope - spread * sums.along(slope, spread)
    curvature = float((sums.weight * slope.square()).sum())
    if curvature == 0.0:
        return 0.0, math.inf
    scores = sums.weight * slope * (tokens.y - made - shift)
    channels = (0, 2) if tokens.m.shape[0] == 1 else (2,)
    scattered = float(scores.sum(channels).square().sum().sqrt()) / curvature
    by_length = float(((sums.weight * slope * made).sum(channels) / curvature).square().sum())
    summed = math.prod(slope.shape[axis] for axis in channels)
    rounding = u * math.sqrt((1.0 / curvature + _of_length(summed) * by_length) / 3.0)
    return float(scores.sum()) / curvature, max(scattered, rounding)


def _of_length(count: int) -> float:
    """Return the relative variance that rounding gives sqrt(m + eps), in u^2 / 3; m is the mean of `count` squares.

    The root and the division round once each. The root halves the error of the sum of m and eps. With squares of
    normal numbers, added one after the other, the additions contribute `count / 3 + 3 / 2` (`rounding`) and the
    squares `3 / count`.
    """
    return 2.0 + (count / 3.0 + 1.5 + 3.0 / count + 1.0) / 4.0


def _as_length(fit: NormFit, x: Tensor, kind: str | None, unit: float) -> NormFit | None:
    """Return the fit as an l2 norm if it is one or was asked for."""
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
