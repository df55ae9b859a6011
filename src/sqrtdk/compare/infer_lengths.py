"""A norm and a rotation, both unknown, from the values before and after the two.

A rotation keeps the length of a pair, so that the gains of its two channels are found without the angles: with x what
is before, its mean square 1, and y what is after, |y|^2 of a pair is g1^2 x1^2 + g2^2 x2^2 where the norm comes first;
where it comes after, |x|^2 is (y1 / g1)^2 + (y2 / g2)^2. Both are linear in the squares. Signs of gains stay unknown,
they are taken as positive; an amplitude is taken as a part of the gain. Norms with a mean can't be found so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.agreement import Steps
from sqrtdk.compare.compute import apply_step, follow
from sqrtdk.compare.program import Norm, Way
from sqrtdk.tracing.probe.rotation import fit_rotation

EPS = (1e-6, 1e-5)  # what norms add: where it shows, the two differ
FEWEST = 3  # lengths a pair


def both_unknown(before: Tensor, after: Tensor, dtype: torch.dtype) -> Iterator[Steps]:
    """Steps that may give the values after (B, H, L, E) from those before: first the norm, then the rotation first."""
    features = before.shape[-1]
    if features % 2 or before[..., 0].numel() < FEWEST:
        return
    for eps in EPS:
        for order in _pairings(features):
            norm = Norm("rms", torch.ones(1, features, dtype=torch.float64), eps=eps)
            unit = apply_step(norm, before)
            for first in (True, False):
                gain = _gain(unit, after, order) if first else _gain(after, unit, order)
                if gain is None:
                    continue
                norm = Norm("rms", gain if first else 1 / gain, eps=eps)
                turned = (unit * gain, after) if first else (unit, after * gain)
                fit = fit_rotation(*turned, dtype=dtype)
                if fit is not None:
                    yield (norm, fit.rotation) if first else (fit.rotation, norm)


def _pairings(features: int) -> list[Tensor]:
    """(E / 2, 2): channels of each pair, where all turn."""
    channels = torch.arange(features)
    return [channels.view(2, -1).T, channels.view(-1, 2)]


def _gain(x: Tensor, y: Tensor, order: Tensor) -> Tensor | None:
    """(1, E): gains of x that give the pairs the lengths of those of y; None where squares are not above 0."""
    squares = x[..., order].square().flatten(0, 2).transpose(0, 1)
    lengths = y[..., order].square().sum(-1).flatten(0, 2).T[..., None]
    # errors are relative to the length: each equation is divided by it
    size = lengths.clamp_min(1e-12 * float(lengths.mean()) + torch.finfo(torch.float64).tiny)
    solved = torch.linalg.lstsq(squares / size, lengths / size).solution[..., 0]
    if not bool((solved > 0).all()):
        return None
    gain = torch.empty(1, x.shape[-1], dtype=torch.float64)
    gain[0, order.flatten()] = solved.flatten().sqrt()
    return gain


def other_eps(steps: Steps, place: int, before: Tensor, after: Tensor) -> float:
    """The eps of the norm at `place` of steps that are known but for it.

    Through rotations as well, each token is sqrt(m / (m + eps)) times what it is without eps, m its mean square there.
    """
    norm = steps[place]
    if not isinstance(norm, Norm) or norm.shift is not None:
        return norm.eps if isinstance(norm, Norm) else 0.0
    without = (*steps[:place], replace(norm, eps=0.0), *steps[place + 1 :])
    bare = follow(Way(steps=without), before)[-1]
    entering = follow(Way(steps=steps[:place]), before)[-1]
    axes = (1, 3) if norm.over == "heads" else (3,)
    if norm.kind == "layer":
        entering = entering - entering.mean(axes, keepdim=True)
    m = entering.square().mean(axes)
    ratio = (after * bare).sum(axes) / bare.square().sum(axes).clamp_min(torch.finfo(torch.float64).tiny)
    told = m * (ratio.clamp_min(1e-3) ** -2 - 1)
    weight = m.clamp_min(1e-12 * float(m.mean()) + torch.finfo(torch.float64).tiny) ** -2  # as far as each is off
    return max(0.0, float((weight * told).sum() / weight.sum()))
