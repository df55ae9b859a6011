"""Scale and softcap, from the output of an attention, or from its lse.

Of each head the scale that gives the output best: on a grid first, from which no scale is further than `RATIO`, then by
Gauss-Newton in its logarithm, steps halved where they make things worse. Derivatives are central differences of the
float64 attention, which any formula has: bias, mask and sinks may be there already. With a softcap, its logarithm is a
second unknown, which all heads share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.compute import attend, some_rows
from sqrtdk.compare.program import Formula

RATIO = 1.25  # from one scale of the grid to the next
ROWS = 32  # rows that are looked at, evenly spaced
CAPS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
STEP = 1e-4  # of the logarithm, for the differences
FAR, SLOW = 1e6, 0.99  # of mean squares: to rounding's, and to what they were a step before
COMMON = 4.0  # standard errors that heads of one scale may be apart


@dataclass(frozen=True, slots=True, eq=False)
class ScaleFit:
    """Scale and softcap that give the output.

    Attributes:
        scale: of each head, (Hq,).
        error: its standard error by what is left, relative, (Hq,); infinite where the output does not depend on it.
        common: the one scale of all heads; None where they differ.
        softcap: None where there is none.
        softcap_error: its standard error, relative.
        residual: largest difference from the output (or the lse) on the rows that were looked at.
    """

    scale: Tensor
    error: Tensor
    common: float | None
    residual: float
    softcap: float | None = None
    softcap_error: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """`left(log scale (Hq,), log cap)`: difference from what was recorded, (Hq, rows, n), finite."""

    left: Callable[[Tensor, float | None], Tensor]
    features: int
    heads: int
    noise: Tensor  # (Hq,), mean square of one rounding


def fit_scale(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    visible: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    formula: Formula | None = None,
) -> ScaleFit | None:
    """The scale of each head, from the output or, where it is known, the lse; None where they say nothing of it.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), H that divides Hq.
        value: (B, H, S, Ev).
        output: (B, Hq, L, Ev).
        visible: True where the row sees the key.
        lse: (B, Hq, L), sinks among it.
        formula: all but the scale, whose `scale` and `visible` are not read where `visible` is given; None: no more.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
        >>> round(fit_scale(q, k, v, out).common, 4)
        0.5
    """
    problem = _problem(query, key, value, output, lse, _with(formula, visible))
    start = None if problem is None else _grid(problem, None)
    return None if problem is None or start is None else _polish(problem, start, None)


def fit_softcap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    visible: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    formula: Formula | None = None,
    caps: Sequence[float] = CAPS,
) -> ScaleFit | None:
    """Scale of each head and softcap of all, as `fit_scale`; the softcap acts where `formula.softcap_at` says.

    `caps` are the softcaps from which it is looked for.
    """
    problem = _problem(query, key, value, output, lse, _with(formula, visible))
    if problem is None:
        return None
    best: ScaleFit | None = None
    for cap in caps:
        start = _grid(problem, math.log(cap), coarser=2)
        fit = None if start is None else _polish(problem, start, math.log(cap))
        if fit is not None and (best is None or fit.residual < best.residual):
            best = fit
    return best


def _with(formula: Formula | None, visible: Tensor | None) -> Formula:
    formula = formula or Formula()
    return formula if visible is None else replace(formula, visible=visible)


def _problem(q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor | None, formula: Formula) -> _Problem | None:
    length, heads = q.shape[-2], q.shape[1]
    rows = torch.linspace(0, length - 1, min(length, ROWS)).long() if length else torch.arange(0)
    formula = some_rows(formula, rows, length)
    recorded = (output if lse is None else lse[..., None])[:, :, rows].double()
    finite = torch.isfinite(recorded)
    if not bool(finite.any()) or k.shape[-2] < 2:
        return None
    q = q[:, :, rows]

    def left(scale: Tensor, cap: float | None) -> Tensor:
        trial = replace(formula, scale=scale.exp()[:, None, None])
        if cap is not None:
            trial = replace(trial, softcap=math.exp(cap))
        its, its_lse = attend(q, k, v, trial)
        its = its if lse is None else its_lse[..., None]
        beside = torch.where(finite & torch.isfinite(its), recorded - its, 0.0)
        return beside.transpose(0, 1).flatten(1, 2)

    u = torch.finfo((output if lse is None else lse).dtype).eps / 2
    sizes = torch.where(finite, recorded, 0.0).transpose(0, 1).flatten(1).square().mean(1)
    return _Problem(left, q.shape[-1], heads, sizes * (u * u / 3.0))


def _grid(problem: _Problem, cap: float | None, coarser: int = 1) -> Tensor | None:
    """Logarithm of the scale that is best on the grid, (Hq,); None where no scale is better than another."""
    low, high = math.log(1 / (8 * problem.features)), math.log(8.0)
    count = max(2, int((high - low) / (coarser * math.log(RATIO))) + 1)
    usual = [0.0, -0.5 * math.log(problem.features), -math.log(problem.features)]
    trials = torch.tensor(sorted([*torch.linspace(low, high, count).tolist(), *usual]), dtype=torch.float64)
    costs = torch.stack([_squares(problem.left(t.expand(problem.heads), cap)) for t in trials])
    return None if bool((costs == costs[0]).all()) else trials[costs.argmin(0)]


def _polish(problem: _Problem, scale: Tensor, cap: float | None) -> ScaleFit:
    left = problem.left(scale, cap)
    for _ in range(40):
        step, cap_step, _, _ = _newton(problem, scale, cap, left)
        if float(step.abs().max()) < 1e-13 and abs(cap_step) < 1e-13:
            break
        damped = 1.0
        while True:
            trial = scale + damped * step
            trial_cap = None if cap is None else cap + damped * cap_step
            beside = problem.left(trial, trial_cap)
            better = _squares(beside) < _squares(left)
            if cap is not None:
                better = better.new_full(better.shape, bool(beside.square().sum() < left.square().sum()))
            if bool(better.any()) or damped < 1e-4:
                break
            damped /= 2
        if not bool(better.any()):
            break
        scale, cap = torch.where(better, trial, scale), trial_cap
        old, left = left, torch.where(better[:, None, None], beside, left)
        if _hopeless(problem, old, left):
            break
    _, _, error, cap_error = _newton(problem, scale, cap, left)
    return _told(problem, scale, cap, error, cap_error)


def _hopeless(problem: _Problem, old: Tensor, left: Tensor) -> bool:
    """Whether what is left is far above rounding, and hardly less than before: no scale gives what was recorded."""
    size = left.square().mean((1, 2))
    return bool((size > FAR * problem.noise).all() and size.sum() > SLOW * old.square().mean((1, 2)).sum())


def _newton(problem: _Problem, scale: Tensor, cap: float | None, left: Tensor) -> tuple[Tensor, float, Tensor, float]:
    """Steps of the logarithms of scale and cap, at most 1 each, and the standard errors of both."""
    slope = (problem.left(scale - STEP, cap) - problem.left(scale + STEP, cap)) / (2 * STEP)
    squares = _squares(slope)
    safe = squares.masked_fill(squares == 0, 1.0)
    cap_step, cap_error, rest = 0.0, 0.0, left
    if cap is not None:
        cap_slope = (problem.left(scale, cap - STEP) - problem.left(scale, cap + STEP)) / (2 * STEP)
        apart = cap_slope - slope * ((slope * cap_slope).sum((1, 2)) / safe)[:, None, None]
        curvature = float(apart.square().sum())
        cap_error = math.inf
        if curvature > 0:
            cap_step = max(-1.0, min(1.0, float((apart * left).sum()) / curvature))
            cap_error = float(_scatter(apart, left, problem.noise).square().sum().sqrt()) / curvature
        rest = left - cap_step * cap_slope
    step = ((slope * rest).sum((1, 2)) / safe).clamp(-1.0, 1.0)
    error = (_scatter(slope, rest, problem.noise) / safe).masked_fill(squares == 0, math.inf)
    return step, cap_step, error, cap_error


def _squares(left: Tensor) -> Tensor:
    return left.square().sum((1, 2))


def _scatter(slope: Tensor, left: Tensor, noise: Tensor) -> Tensor:
    """Standard deviation of slope . left, of each head: what is left of a row has one cause, its logits."""
    rows = (slope * left).sum(2).square().sum(1)
    alone = _squares(slope) * torch.maximum(left.square().mean((1, 2)), noise)
    return torch.maximum(rows, alone).sqrt()


def _told(problem: _Problem, scale: Tensor, cap: float | None, error: Tensor, cap_error: float) -> ScaleFit:
    residual = float(problem.left(scale, cap).abs().max())
    known = torch.isfinite(error)
    common: float | None = None
    if bool(known.any()):
        weight = error[known].clamp(min=1e-12).square().reciprocal()
        mean = (scale[known] * weight).sum() / weight.sum()
        if bool(((scale[known] - mean).abs() <= COMMON * error[known] + 1e-12).all()):
            common = float(mean.exp())
    return ScaleFit(scale.exp(), error, common, residual, None if cap is None else math.exp(cap), cap_error)
