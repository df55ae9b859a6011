"""A norm and a rotation, both unknown, from the values before and after the two.

A rotation keeps the length of a pair, so that the gains of its two channels are found without the angles: with x what
is before, its mean square 1, and y what is after, |y|^2 of a pair is g1^2 x1^2 + g2^2 x2^2 where the norm comes first;
where it comes after, |x|^2 is (y1 / g1)^2 + (y2 / g2)^2. Both are linear in the squares. Signs of gains stay unknown,
they are taken as positive; an amplitude is taken as a part of the gain. Norms with a mean can't be found so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sqrtdk.compare.agreement import Steps
from sqrtdk.compare.compute import apply_step
from sqrtdk.compare.fit.rotation import fit_rotation
from sqrtdk.compare.program import Norm

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
