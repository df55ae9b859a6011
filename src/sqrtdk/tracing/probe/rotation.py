"""A rotary embedding, fitted to the values before and after it.

A pair of channels is a complex number; what it was multiplied by is that of least squares over heads, and over batches
where their tables are one. The pairs are those of the layout that gives the values after: pairs of "half" are R / 2
apart, and each distance is tried; those of "interleaved" are neighbours. An amplitude that is the same everywhere is
part of the table; only where that fails is one left free for each pair and row.

Where no pairs turn so, cos and sin may be laid over the channels in the order of the other layout:
`x * cos + rotate_half(x) * sin` with angles of neighbours. It changes lengths, so that it is no rotation, and is told
by a `spread` that is not the layout.

What can't be told from values: at R = 2 both layouts are one ("half" is said); a pair that turns by less than rounding
does not show. Of neighbours such pairs at the end are counted as turning where, by the frequencies of those before,
they would not show, and the base is a usual one with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.probe.tables import LOOSE_LAW, frequencies, law_of

LIMIT = 12.0  # roundings: two products, their sum, two numbers of the table, and what the amplitude's own adds
ROWS = 64  # rows by which layout and width are searched, evenly spaced
USUAL = (1e4, 1e6, 5e5, 5e6, 1e7, 1.6e5, 1e5, 1e3, 1e2)  # bases, the likeliest first
NEAR = 0.1  # of a base, as well as half precision tells it
STILL = 3.0  # roundings that a channel which does not turn may be off by


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A rotary embedding, with the amplitude of its table.

    Attributes:
        table: (B or 1, L, R / 2) complex: by what pair i at row l is multiplied.
        layout: "half": channel i with channel i + R / 2; "interleaved": 2 i with 2 i + 1.
        first: the first channel that turns; R channels do from there on.
        spread: the layout by whose pairs the table is laid over the channels; "" for that of the pairs themselves.
    """

    table: Tensor
    layout: str
    first: int = 0
    spread: str = ""

    @property
    def width(self) -> int:
        """R, the channels that turn."""
        return 2 * self.table.shape[-1]


def apply_rotation(rotation: Rotation, values: Tensor) -> Tensor:
    """Values (B, H, L, E) after a rotary embedding; channels outside `first : first + width` stay.

    Example:
        >>> quarter = Rotation(torch.full((1, 1, 1), 1j), "half")
        >>> apply_rotation(quarter, torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).flatten().tolist()
        [-4.0, 3.0]
    """
    result, order = values.double().clone(), rotation.spread or rotation.layout
    turning = result[..., rotation.first : rotation.first + rotation.width]  # a view of `result`
    table = rotation.table.to(torch.complex128)[:, None]
    cos, sin = (over_channels(part, order) for part in (table.real, table.imag))
    turning.copy_(turning * cos + _beside(turning, rotation.layout) * sin)
    return result


def halves(channels: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second channels of all pairs, of channels in the last axis.

    Example:
        >>> [halves(torch.arange(4), layout)[1].tolist() for layout in ("half", "interleaved")]
        [[2, 3], [1, 3]]
    """
    if layout == "half":
        return channels[..., : channels.shape[-1] // 2], channels[..., channels.shape[-1] // 2 :]
    return channels[..., ::2], channels[..., 1::2]


def over_channels(pairs: Tensor, layout: str) -> Tensor:
    """One number a pair, (..., R / 2), at both of its channels, (..., R)."""
    return torch.cat([pairs, pairs], -1) if layout == "half" else pairs.repeat_interleave(2, -1)


def _beside(channels: Tensor, layout: str) -> Tensor:
    """What the sines multiply: (a, b) of each pair as (-b, a)."""
    result = torch.empty_like(channels)
    for place, part, sign in zip(halves(result, layout), reversed(halves(channels, layout)), (-1.0, 1.0), strict=True):
        place.copy_(sign * part)
    return result


# -- fitted to values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RotationFit:
    """A rotation that gives the values after from those before.

    Attributes:
        rotation: the step.
        amplitude: of its table; None where it is not the same everywhere.
        residual: largest difference from the values after, in roundings of the pair's length.
    """

    rotation: Rotation
    amplitude: float | None
    residual: float


def fit_rotation(before: Tensor, after: Tensor, *, dtype: torch.dtype | None = None) -> RotationFit | None:
    """The rotation between two tensors (B, H, L, E); None where there is none, or nothing turned.

    Args:
        before: values before it.
        after: values after it.
        dtype: in which it was computed; None: that of the values after.

    Example:
        >>> x, angles = torch.randn(2, 4, 16, 8), torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> turned = apply_rotation(Rotation(torch.polar(torch.ones(16, 2), angles)[None], "half"), x).float()
        >>> fit = fit_rotation(x, turned)
        >>> fit.rotation.layout, fit.rotation.width, round(fit.amplitude, 6)
        ('half', 4, 1.0)
    """
    u = torch.finfo(dtype or after.dtype).eps / 2
    x, y = before.double(), after.double()
    if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()):
        return None
    turning = _turning(x, y, u)
    if not turning:
        return None
    found = _search(x, y, u, turning)
    return None if found is None else _whole(x, y, u, *found)


def _turning(x: Tensor, y: Tensor, u: float) -> list[int]:
    """Channels that differ from what they were by more than rounding."""
    beside = ((x - y).abs() > STILL * u * x.abs()).flatten(0, 2).any(0)
    return [int(i) for i in beside.nonzero()[:, 0]]


def _search(x: Tensor, y: Tensor, u: float, turning: list[int]) -> tuple[str, int, int, str] | None:
    """Layout, first channel, width and spread of the least residual, on a sample of rows; of equals the first."""
    features, first, last = x.shape[-1], turning[0], turning[-1]
    rows = _informative(x, y)
    x, y = x[:, :, rows], y[:, :, rows]
    tried = [("half", first, width) for width in range(2 * ((last - first) // 2 + 1), features - first + 1, 2)]
    even = first - first % 2
    width = last - last % 2 + 2 - even
    if width > 2 or first % 2 or last % 2 == 0:
        tried.append(("interleaved", even, width))
    tried += [("half", begin, 2 * half) for begin, half in _halves(turning, features)]
    for spread in ({}, {"half": "interleaved", "interleaved": "half"}):
        fits = {}
        for layout, begin, wide in dict.fromkeys(tried):
            candidate = (layout, begin, wide, spread.get(layout, ""))
            if (fit := _fit(x, y, u, *candidate)) is not None:
                fits[candidate] = fit.residual
        if fits:
            return min(fits, key=lambda one: fits[one])
    return None


def _halves(turning: list[int], features: int) -> list[tuple[int, int]]:
    """First channel and half width where the first pairs, or the last ones, turn too little to show."""
    first, last = turning[0], turning[-1]
    return [
        (begin, half)
        for begin in (0, first)
        for half in range(1, (features - begin) // 2 + 1)
        if begin + 2 * half > last
    ]


def _informative(x: Tensor, y: Tensor) -> Tensor:
    """Rows that turned most among evenly spaced ones, and at most ROWS."""
    length = x.shape[2]
    if length <= ROWS:
        return torch.arange(length)
    spaced = torch.arange(0, length, max(1, length // (4 * ROWS)))
    moved = (x[:, :, spaced] - y[:, :, spaced]).square().sum((0, 1, 3))
    return spaced[moved.argsort(descending=True)[:ROWS]].sort().values


def _fit(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int, spread: str = "") -> RotationFit | None:
    """The table of one layout: of one amplitude or of many, of all batches or of each."""
    order, (before, after) = spread or layout, (values[..., first : first + width] for values in (x, y))
    beside = _beside(before, layout)

    def over_pairs(one: Tensor, other: Tensor) -> Tensor:
        """Sums over heads and the two channels that have one number of the table, (B, L, R / 2)."""
        return sum(halves(one * other, order)).sum(1)  # type: ignore[union-attr]

    # least squares of after = cos * before + sin * beside; of pairs that turn `crossed` is 0
    squares = over_pairs(before, before), over_pairs(beside, beside)
    crossed, along, across = over_pairs(before, beside), over_pairs(before, after), over_pairs(beside, after)
    overdetermined = x.shape[0] * x.shape[1] > 1
    for together in (True, False) if x.shape[0] > 1 else (True,):
        sums = [part.sum(0, keepdim=True) if together else part for part in (*squares, crossed, along, across)]
        free = _solved(*sums)
        for one in (True, False):
            if not one and (spread or not (overdetermined and (together or x.shape[1] > 1))):
                continue
            amplitude = _amplitude(free, sums[0])
            table = free / free.abs().clamp(min=1e-300) * amplitude if one else free
            rotation = Rotation(table, layout, first, spread)
            residual = _residual(x, y, rotation, u)
            if residual <= LIMIT:
                return RotationFit(rotation, amplitude if one else None, residual)
    return None


def _solved(xx: Tensor, rr: Tensor, xr: Tensor, xy: Tensor, ry: Tensor) -> Tensor:
    """The table, cos + i sin, of the normal equations; 1 where nothing is known."""
    size = xx * rr - xr * xr
    known = size > 0
    size = size.masked_fill(~known, 1.0)
    return torch.where(known, torch.complex((xy * rr - ry * xr) / size, (ry * xx - xy * xr) / size), 1.0)


def _amplitude(table: Tensor, weight: Tensor) -> float:
    """That of least squares: of the lengths of all pairs, by their weight; 1 where it is 1 in float32."""
    amplitude = float((table.abs() * weight).sum() / weight.sum().clamp(min=1e-300))
    return 1.0 if abs(amplitude - 1.0) < torch.finfo(torch.float32).eps else amplitude


def _residual(x: Tensor, y: Tensor, rotation: Rotation, u: float) -> float:
    span = slice(rotation.first, rotation.first + rotation.width)
    length = torch.hypot(*halves(x[..., span], rotation.layout))
    amplitude = over_channels(rotation.table.abs()[:, None], rotation.spread or rotation.layout)
    sizes = x.abs()
    sizes[..., span] = over_channels(length, rotation.layout) * amplitude
    off = (apply_rotation(rotation, x) - y).abs()
    return float((off / (u * sizes).clamp(min=1e-300)).masked_fill(off == 0, 0.0).max())


def _whole(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int, spread: str = "") -> RotationFit | None:
    """The fit on all rows; of neighbours, of the width whose base is a usual one, if the rest would not show."""
    fit = _fit(x, y, u, layout, first, width, spread)
    rest = (x.shape[-1] - first) // 2 * 2
    if fit is None or layout == "half" or spread or width == rest:
        return fit
    rows = fit.rotation.table.shape[1]
    law = law_of(frequencies(fit.rotation.table), rows, LOOSE_LAW)
    if law is None or law.factor / law.base * (rows - 1) >= u * STILL:  # the pair after the last would show
        return fit
    quarters = [q for q in (x.shape[-1] * share // 4 for share in (4, 3, 2, 1)) if q % 2 == 0 and width <= q <= rest]
    for usual in USUAL:
        for wider in quarters:
            if abs(law.base ** (wider / width) / usual - 1.0) < NEAR:
                whole = _fit(x, y, u, layout, first, wider)
                if whole is not None and (whole.amplitude is not None or fit.amplitude is None):
                    return whole
    return fit
