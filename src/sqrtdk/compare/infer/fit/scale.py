"""Fits scale and softcap to the output of an attention, or to its lse.

For each head a grid is searched first, in which no scale is further than `GRID_RATIO` from the next. Then Gauss-Newton
refines the logarithm of the scale, with steps halved if they make things worse. Derivatives are central differences of
the float64 attention, so any formula works: bias, mask and sinks may be present. The logarithm of a softcap is a second
unknown, shared by all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.compute import compute_output, some_rows
from sqrtdk.compare.inside.program import Formula

GRID_RATIO = 1.25  # ratio of neighbouring scales in the grid
MOST_ROWS_FITTED = 32  # evenly spaced rows that are examined
USUAL_SOFTCAPS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)  # usual softcaps
USUAL_TRIALS = 64  # attentions that a fit computes: the grid, and some Newton steps
LOG_STEP = 1e-4  # step of the logarithms for central differences
FAR, SLOW = 1e6, 0.99  # of mean squares: relative to rounding, and to the step before; beyond both the fit is given up
COMMON_SCALE_ERRORS = 4.0  # standard errors that heads with a common scale may be apart
Residuals = Callable[
    [Tensor, float | None], Tensor
]  # from log scale (Hq,) and log cap to finite residuals (Hq, rows, n)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleFit:
    """Scale and softcap that fit the output.

    Attributes:
        scale: scale of each head, (Hq,).
        error: relative standard error of the scale, (Hq,); infinite if the output does not depend on it.
        common: scale shared by all heads; None if they differ.
        residual: largest difference from the output (or lse) on the examined rows.
        softcap: the cap; None if none was searched.
    """

    scale: Tensor
    error: Tensor
    common: float | None
    residual: float
    softcap: float | None = None


def fit_scale(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor | None = None,
    *,
    formula: Formula,
    caps: Sequence[float | None] = (None,),
) -> ScaleFit | None:
    """Return the scale of each head, from the output or from a known lse; None if these don't depend on it.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), where H divides Hq.
        value: (B, H, S, Ev).
        output: (B, Hq, L, Ev).
        lse: (B, Hq, L), with sinks included.
        formula: everything but the scale.
        caps: candidates for a softcap shared by all heads, at the place `formula.softcap_at`. None keeps the formula's.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
        >>> round(fit_scale(q, k, v, out, formula=Formula()).common, 4)
        0.5
    """
    length, heads = query.shape[-2], query.shape[1]
    rows = torch.linspace(0, max(0, length - 1), min(length, MOST_ROWS_FITTED)).long()
    some, formula = query[:, :, rows], some_rows(formula, rows, length)
    told = output if lse is None else lse[..., None]
    recorded = told[:, :, rows].double()
    finite = torch.isfinite(recorded)
    if not bool(finite.any()) or key.shape[-2] < 2:
        return None

    def left(scale: Tensor, cap: float | None) -> Tensor:
        trial = replace(formula, scale=scale.exp()[:, None, None])
        trial = trial if cap is None else replace(trial, softcap=math.exp(cap))
        its, its_lse = compute_output(some, key, value, trial)
        its = its if lse is None else its_lse[..., None]
        beside = torch.where(finite & torch.isfinite(its), recorded - its, 0.0)
        return beside.transpose(0, 1).flatten(1, 2)

    sizes = torch.where(finite, recorded, 0.0).transpose(0, 1).flatten(1).square().mean(1)
    noise = sizes * (torch.finfo(told.dtype).eps / 2) ** 2 / 3.0  # mean square of one rounding, by head
    fits = []
    for cap in (None if cap is None else math.log(cap) for cap in caps):
        # with a cap to search as well, half as many scales are tried for each
        trials = scale_grid(query.shape[-1], GRID_RATIO if cap is None else GRID_RATIO**2).log()
        costs = torch.stack([_squares(left(trial.expand(heads), cap)) for trial in trials])
        if not bool((costs == costs[0]).all()):
            fits.append(_polish(left, noise, trials[costs.argmin(0)], cap))
    return min(fits, key=lambda fit: fit.residual, default=None)


def fit_cost(query: Tensor, key: Tensor) -> int:
    """Return about how many logits `fit_scale` computes for one candidate of the softcap.

    Args:
        query: (B, Hq, L, E); only its shape matters.
        key: (B, H, S, E); only its shape matters.
    """
    batch, heads, rows = query.shape[:3]
    return USUAL_TRIALS * batch * heads * min(rows, MOST_ROWS_FITTED) * key.shape[-2]


def scale_grid(features: int, ratio: float = GRID_RATIO) -> Tensor:
    """Return scales from 1 / (8 E) to 8, ascending, in float64.

    Neighbours differ by at most the factor `ratio`; 1, 1 / sqrt(E) and 1 / E are among them.

    Args:
        features: width E of a head.
        ratio: largest quotient of neighbours.
    """
    low, high = math.log(1 / (8 * features)), math.log(8.0)
    grid = torch.linspace(low, high, 1 + math.ceil((high - low) / math.log(ratio)), dtype=torch.float64).exp()
    return torch.cat([grid, torch.tensor([1.0, features**-0.5, 1 / features], dtype=torch.float64)]).sort().values


def _polish(left: Residuals, noise: Tensor, scale: Tensor, cap: float | None) -> ScaleFit:
    here = left(scale, cap)
    for _ in range(40):
        step, cap_step, _ = _newton(left, noise, scale, cap, here)
        if float(step.abs().max()) < 1e-13 and abs(cap_step) < 1e-13:
            break
        # a full Newton step may overshoot where the softmax is nearly one-hot and the slope small
        for damped in (2.0**-halved for halved in range(15)):
            trial, trial_cap = scale + damped * step, None if cap is None else cap + damped * cap_step
            there = left(trial, trial_cap)
            better = _squares(there) < _squares(here)
            if cap is not None:  # all heads share the cap, so the step is taken for all or none
                better = better.new_full(better.shape, bool(there.square().sum() < here.square().sum()))
            if bool(better.any()):
                break
        else:
            break
        before = _squares(here).sum()
        scale, cap = torch.where(better, trial, scale), trial_cap
        here = torch.where(better[:, None, None], there, here)
        far = bool((here.square().mean((1, 2)) > FAR * noise).all())
        if far and _squares(here).sum() > SLOW * before:
            break  # far above rounding and hardly improving: no scale gives the record
    error = _newton(left, noise, scale, cap, here)[-1]
    residual = float(left(scale, cap).abs().max())
    softcap = None if cap is None else math.exp(cap)
    return ScaleFit(scale.exp(), error, _common(scale, error), residual, softcap)


def _newton(
    left: Residuals, noise: Tensor, scale: Tensor, cap: float | None, here: Tensor
) -> tuple[Tensor, float, Tensor]:
    """Return the steps of log scale and log cap, at most 1 each, and the standard error of log scale."""
    slope = (left(scale - LOG_STEP, cap) - left(scale + LOG_STEP, cap)) / (2 * LOG_STEP)
    squares = _squares(slope)
    safe = squares.masked_fill(squares == 0, 1.0)
    cap_step = 0.0
    if cap is not None:
        cap_slope = (left(scale, cap - LOG_STEP) - left(scale, cap + LOG_STEP)) / (2 * LOG_STEP)
        alone = cap_slope - slope * ((slope * cap_slope).sum((1, 2)) / safe)[:, None, None]
        curvature = float(alone.square().sum())
        cap_step = max(-1.0, min(1.0, float((alone * here).sum()) / curvature)) if curvature > 0 else 0.0
        here = here - cap_step * cap_slope
    step = ((slope * here).sum((1, 2)) / safe).clamp(-1.0, 1.0)
    # Residuals of a row are not independent: they share the errors of its logits.
    of_rows = (slope * here).sum(2).square().sum(1)
    by_itself = squares * torch.maximum(here.square().mean((1, 2)), noise)
    error = torch.maximum(of_rows, by_itself).sqrt() / safe
    return step, cap_step, error.masked_fill(squares == 0, math.inf)


def _squares(left: Tensor) -> Tensor:
    return left.square().sum((1, 2))


def _common(scale: Tensor, error: Tensor) -> float | None:
    """Return the common scale of all heads, from their log scales and standard errors; None if they disagree."""
    known = torch.isfinite(error)
    if not bool(known.any()):
        return None
    weight = error[known].clamp(min=1e-12).square().reciprocal()
    mean = (scale[known] * weight).sum() / weight.sum()
    alike = bool(((scale[known] - mean).abs() <= COMMON_SCALE_ERRORS * error[known] + 1e-12).all())
    return float(mean.exp()) if alike else None
