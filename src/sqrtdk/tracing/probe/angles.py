"""A rotary embedding as data, and what its table says: frequencies, base, positions.

Angles are told modulo a turn. A frequency is the step from one row to the next, which is less than half a turn, and is
made sharper over steps of 2, 4, 8 rows, each of which is known well enough by the last to count its turns. It is the
median over rows, and no longer step is taken over a place where positions start anew. Positions go the other way
round: the slowest pair gives one without ambiguity, each faster one makes it sharper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TURN = 2 * math.pi
ANEW = 0.2  # radians that a step is off by where positions jump; half precision is off by less


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A rotary embedding, with the amplitude of its table.

    Attributes:
        table: (B or 1, L, R / 2) complex: by what pair i at row l is multiplied.
        layout: "half": channel i with channel i + R / 2; "interleaved": 2 i with 2 i + 1.
        first: the first channel that turns; R channels do from there on.
    """

    table: Tensor
    layout: str
    first: int = 0

    @property
    def width(self) -> int:
        """R, the channels that turn."""
        return 2 * self.table.shape[-1]


@dataclass(frozen=True, slots=True)
class BaseFit:
    """Frequencies `stretch * base ** (-2 i / R)`.

    Attributes:
        base: 10000 of the first rotary embedding.
        stretch: frequency of the first pair, 1 but for interpolated positions.
        residual: largest relative difference of a frequency from that.
    """

    base: float
    stretch: float
    residual: float


def apply_rotation(rotation: Rotation, values: Tensor) -> Tensor:
    """Values (B, H, L, E) after a rotary embedding; channels outside `first : first + width` stay.

    Example:
        >>> quarter = Rotation(torch.full((1, 1, 1), 1j), "half")
        >>> apply_rotation(quarter, torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).flatten().tolist()
        [-4.0, 3.0]
    """
    result, width = values.double().clone(), rotation.width
    turning = result[..., rotation.first : rotation.first + width]
    if rotation.layout == "half":
        first, second = turning[..., : width // 2], turning[..., width // 2 :]
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    turned = torch.complex(first, second) * rotation.table.to(torch.complex128)[:, None]
    first.copy_(turned.real)  # views of `result`
    second.copy_(turned.imag)
    return result


def frequencies(rotation: Rotation) -> Tensor:
    """Radians from one row to the next, of each pair, (R / 2,); of a single row, its angles.

    Example:
        >>> angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.01])
        >>> [round(float(f), 5) for f in frequencies(Rotation(torch.polar(torch.ones(64, 2), angles)[None], "half"))]
        [1.0, 0.01]
    """
    table = rotation.table.to(torch.complex128)
    length = table.shape[1]
    if length == 1:
        return table[:, 0].angle().median(0).values
    turned = (table[:, 1:] * table[:, :-1].conj()).angle()
    steps, lag = turned.flatten(0, 1).median(0).values, 2
    anew = (_wrapped(turned - steps).abs() > ANEW).any(-1).cumsum(1)  # how often positions jumped up to a row
    anew = torch.cat([torch.zeros_like(anew[:, :1]), anew], 1)
    while lag < length:
        going_on = anew[:, lag:] == anew[:, :-lag]
        if not bool(going_on.any()):
            break
        far = (table[:, lag:] * table[:, :-lag].conj()).angle()[going_on]
        steps, lag = steps + _wrapped(far - lag * steps).median(0).values / lag, 2 * lag
    return steps


def base_of(rotation: Rotation, *, width: int | None = None, tolerance: float = 0.03) -> BaseFit | None:
    """The base of geometric frequencies; None where they are none, or there is one pair.

    Pairs count as their angles are known: by what they turn over all rows.

    Args:
        rotation: of which table.
        width: R, where it is not the rotation's own, as the last pairs do not show.
        tolerance: largest residual.
    """
    steps, length = frequencies(rotation), rotation.table.shape[1]
    pairs = steps.numel()
    sign = 1.0 if float(steps[0]) >= 0 else -1.0
    known = (steps * sign > 0).nonzero()[:, 0]
    if pairs < 2 or known.numel() < 2:
        return None
    x, y = -2.0 * known.double() / (width or 2 * pairs), (steps[known] * sign).log()
    weight = (steps[known].abs() * length).clamp(max=1e3).square()
    x_mean, y_mean = (weight * x).sum() / weight.sum(), (weight * y).sum() / weight.sum()
    slope = (weight * (x - x_mean) * (y - y_mean)).sum() / (weight * (x - x_mean) ** 2).sum()
    stretch = (y_mean - slope * x_mean).exp()
    turns = (steps[known].abs() * length).clamp(max=1.0)  # what turns little is known less well
    residual = float((((y - stretch.log() - slope * x).expm1().abs()) * turns).max())
    return BaseFit(float(slope.exp()), float(stretch), residual) if residual <= tolerance else None


def shift_of(a: Rotation, b: Rotation, *, steps: Tensor | None = None, noise: float = 1e-2) -> Tensor | None:
    """By how many positions each row of B is ahead of A's, (B or 1, L); None where no shift of positions is it.

    Args:
        a: rotation of A.
        b: rotation of B, of the same width and layout.
        steps: frequencies; None: those of A.
        noise: radians that an angle may be off by.
    """
    if a.width != b.width or a.layout != b.layout or a.table.shape[1] != b.table.shape[1]:
        return None
    steps = frequencies(a) if steps is None else steps
    turned = b.table.to(torch.complex128) * a.table.to(torch.complex128).conj()
    shift = positions_of(turned, steps, noise=noise)
    beside = _wrapped(turned.angle() - shift[..., None] * steps)
    return shift if bool((beside.abs() <= noise + 1e-9).all()) else None


def positions_of(table: Tensor, steps: Tensor, *, noise: float = 1e-2) -> Tensor:
    """Positions (B or 1, L) at which pairs of such frequencies have the angles of a table (B or 1, L, R / 2).

    Whole numbers where the angles allow them.
    """
    order = steps.abs().argsort()
    order = order[steps.abs()[order] > 0]
    angles, position = table.to(torch.complex128).angle(), torch.zeros(table.shape[:2], dtype=torch.float64)
    for pair in order.tolist():
        step = float(steps[pair])
        position = position + _wrapped(angles[..., pair] - position * step) / step
    whole = position.round()
    fastest = float(steps.abs().max()) if steps.numel() else 0.0
    return torch.where((position - whole).abs() * fastest <= noise, whole, position)


def would_not_show(rotation: Rotation, noise: float) -> bool:
    """Whether the pair after the last, if frequencies go on as they do, would turn by less than the noise."""
    base = base_of(rotation)
    if base is None:
        return False
    return base.stretch / base.base * (rotation.table.shape[1] - 1) < noise


def _wrapped(angle: Tensor) -> Tensor:
    return angle - TURN * (angle / TURN).round()
