"""Fits a rotary embedding to the values before and after it.

A pair of channels is a complex number, and its multiplier is fitted by least squares over heads, and over batches if
they share a table. Both layouts are tried: in "half" the channels of a pair are R / 2 apart, for each possible R; in
"interleaved" they are neighbours. The fit first assumes one amplitude for the whole table. If that fails, each pair and
row gets its own.

If neither layout fits, cos and sin may be spread over the channels in the order of the other layout:
`x * cos + rotate_half(x) * sin` with cos and sin repeated for neighbours. This changes lengths, so it is a mistake and
no rotation. It is reported by a `spread` that differs from the layout.

Two things can't be told from values. At R = 2 both layouts are equal, and "half" is reported. A pair that turns by less
than rounding is invisible. Such pairs at the end of an interleaved rotation are counted as turning if the frequencies
of the other pairs predict that they are invisible and the base is then a usual one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.probe.tables import LOOSE_FREQUENCY_TOLERANCE, frequencies, law_of

MOST_ROUNDINGS = 12.0  # roundings: two products, their sum, two table entries, and the rounding of the amplitude
SEARCHED_ROWS = 64  # rows used to search for layout and width, evenly spaced
USUAL_BASES = (1e4, 1e6, 5e5, 5e6, 1e7, 1.6e5, 1e5, 1e3, 1e2)  # usual bases, the likeliest first
BASE_TOLERANCE = 0.1  # relative error of a base that is read from half-precision values
STILL_ROUNDINGS = 3.0  # largest change, in roundings, of a channel that does not turn


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """A rotary embedding, with the amplitude of its table.

    Attributes:
        table: (B or 1, L, R / 2) complex, the multiplier of pair i at row l.
        layout: "half" pairs channel i with channel i + R / 2; "interleaved" pairs 2 i with 2 i + 1.
        first: First channel that turns. R channels turn from there on.
        spread: Layout in which cos and sin are spread over the channels; "" means the same as `layout`.
    """

    table: Tensor
    layout: str
    first: int = 0
    spread: str = ""

    @property
    def width(self) -> int:
        """R, the number of channels that turn."""
        return 2 * self.table.shape[-1]


def apply_rotation(rotation: Rotation, values: Tensor) -> Tensor:
    """Return values (B, H, L, E) after a rotary embedding. Channels outside `first : first + width` are unchanged.

    Example:
        >>> quarter = Rotation(torch.full((1, 1, 1), 1j), "half")
        >>> apply_rotation(quarter, torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).flatten().tolist()
        [-4.0, 3.0]
    """
    result, order = values.double().clone(), rotation.spread or rotation.layout
    turning = result[..., rotation.first : rotation.first + rotation.width]  # a view of `result`
    table = rotation.table.to(torch.complex128)[:, None]
    cos, sin = (to_both_channels(part, order) for part in (table.real, table.imag))
    turning.copy_(turning * cos + _beside(turning, rotation.layout) * sin)
    return result


def halves(channels: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second channels of all pairs in the last axis.

    Example:
        >>> [halves(torch.arange(4), layout)[1].tolist() for layout in ("half", "interleaved")]
        [[2, 3], [1, 3]]
    """
    if layout == "half":
        return channels[..., : channels.shape[-1] // 2], channels[..., channels.shape[-1] // 2 :]
    return channels[..., ::2], channels[..., 1::2]


def to_both_channels(pairs: Tensor, layout: str) -> Tensor:
    """Return one number per pair, (..., R / 2), repeated for both channels of the pair, (..., R).

    Args:
        pairs: the numbers.
        layout: "half" if channel i is paired with channel i + R / 2, "interleaved" if 2 i is paired with 2 i + 1.
    """
    return torch.cat([pairs, pairs], -1) if layout == "half" else pairs.repeat_interleave(2, -1)


def _beside(channels: Tensor, layout: str) -> Tensor:
    """Return the operand of the sines, with each pair (a, b) replaced by (-b, a): rotate_half(x)."""
    result = torch.empty_like(channels)
    for place, part, sign in zip(halves(result, layout), reversed(halves(channels, layout)), (-1.0, 1.0), strict=True):
        place.copy_(sign * part)
    return result


# -- fitted to values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RotationFit:
    """A rotation that maps the values before to those after.

    Attributes:
        rotation: The rotation.
        amplitude: Amplitude of the table; None if it varies.
        residual: Largest difference from the values after, in roundings of the pair's length.
    """

    rotation: Rotation
    amplitude: float | None
    residual: float


def fit_rotation(before: Tensor, after: Tensor, *, dtype: torch.dtype | None = None) -> RotationFit | None:
    """Return the rotation between two tensors (B, H, L, E), or None if none fits or nothing turned.

    Args:
        before: Values before the rotation.
        after: Values after the rotation.
        dtype: Dtype in which it was computed. Default: the dtype of `after`.

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
    """Return the channels that changed by more than rounding."""
    beside = ((x - y).abs() > STILL_ROUNDINGS * u * x.abs()).flatten(0, 2).any(0)
    return [int(i) for i in beside.nonzero()[:, 0]]


def _search(x: Tensor, y: Tensor, u: float, turning: list[int]) -> tuple[str, int, int, str] | None:
    """Return layout, first channel, width and spread with the least residual on a sample of rows."""
    features, first, last = x.shape[-1], turning[0], turning[-1]
    rows = _informative(x, y)
    x, y = x[:, :, rows], y[:, :, rows]
    tried = [("half", first, width) for width in range(2 * ((last - first) // 2 + 1), features - first + 1, 2)]
    even = first - first % 2
    width = last - last % 2 + 2 - even
    if width > 2 or first % 2 or last % 2 == 0:
        tried.append(("interleaved", even, width))
    tried += [("half", begin, 2 * half) for begin, half in _halves(turning, features)]
    # A true rotation is preferred: the mistaken spread is tried only if no candidate fits without it.
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
    """Return first channels and half widths that are possible if the first or last pairs turn invisibly little."""
    first, last = turning[0], turning[-1]
    return [
        (begin, half)
        for begin in (0, first)
        for half in range(1, (features - begin) // 2 + 1)
        if begin + 2 * half > last
    ]


def _informative(x: Tensor, y: Tensor) -> Tensor:
    """Return at most `SEARCHED_ROWS` rows: those that turned most among evenly spaced ones."""
    length = x.shape[2]
    if length <= SEARCHED_ROWS:
        return torch.arange(length)
    spaced = torch.arange(0, length, max(1, length // (4 * SEARCHED_ROWS)))
    moved = (x[:, :, spaced] - y[:, :, spaced]).square().sum((0, 1, 3))
    return spaced[moved.argsort(descending=True)[:SEARCHED_ROWS]].sort().values


def _fit(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int, spread: str = "") -> RotationFit | None:
    """Return the fit of one layout. A table shared by all batches and one amplitude are tried first."""
    order, (before, after) = spread or layout, (values[..., first : first + width] for values in (x, y))
    beside = _beside(before, layout)

    def over_pairs(one: Tensor, other: Tensor) -> Tensor:
        """Return sums over heads and over the two channels that share a table entry, (B, L, R / 2)."""
        return sum(halves(one * other, order)).sum(1)  # type: ignore[union-attr]

    # Least squares of after = cos * before + sin * beside. `crossed` is 0 for a true rotation.
    squares = over_pairs(before, before), over_pairs(beside, beside)
    crossed, along, across = over_pairs(before, beside), over_pairs(before, after), over_pairs(beside, after)
    overdetermined = x.shape[0] * x.shape[1] > 1
    for together in (True, False) if x.shape[0] > 1 else (True,):
        sums = [part.sum(0, keepdim=True) if together else part for part in (*squares, crossed, along, across)]
        free = _solved(*sums)
        for one in (True, False):
            # A free amplitude fits anything unless several heads or batches share the table.
            if not one and (spread or not (overdetermined and (together or x.shape[1] > 1))):
                continue
            amplitude = _amplitude(free, sums[0])
            table = free / free.abs().clamp(min=1e-300) * amplitude if one else free
            rotation = Rotation(table, layout, first, spread)
            residual = _residual(x, y, rotation, u)
            if residual <= MOST_ROUNDINGS:
                return RotationFit(rotation, amplitude if one else None, residual)
    return None


def _solved(xx: Tensor, rr: Tensor, xr: Tensor, xy: Tensor, ry: Tensor) -> Tensor:
    """Return the table cos + i sin that solves the normal equations, and 1 where they are singular."""
    size = xx * rr - xr * xr
    known = size > 0
    size = size.masked_fill(~known, 1.0)
    return torch.where(known, torch.complex((xy * rr - ry * xr) / size, (ry * xx - xy * xr) / size), 1.0)


def _amplitude(table: Tensor, weight: Tensor) -> float:
    """Return the weighted mean of the multipliers' lengths, rounded to 1 if it equals 1 in float32."""
    amplitude = float((table.abs() * weight).sum() / weight.sum().clamp(min=1e-300))
    return 1.0 if abs(amplitude - 1.0) < torch.finfo(torch.float32).eps else amplitude


def _residual(x: Tensor, y: Tensor, rotation: Rotation, u: float) -> float:
    span = slice(rotation.first, rotation.first + rotation.width)
    length = torch.hypot(*halves(x[..., span], rotation.layout))
    amplitude = to_both_channels(rotation.table.abs()[:, None], rotation.spread or rotation.layout)
    sizes = x.abs()
    sizes[..., span] = to_both_channels(length, rotation.layout) * amplitude
    off = (apply_rotation(rotation, x) - y).abs()
    return float((off / (u * sizes).clamp(min=1e-300)).masked_fill(off == 0, 0.0).max())


def _whole(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int, spread: str = "") -> RotationFit | None:
    """Return the fit on all rows.

    An interleaved rotation is widened to a width with a usual base, if the added pairs turn invisibly little.
    """
    fit = _fit(x, y, u, layout, first, width, spread)
    rest = (x.shape[-1] - first) // 2 * 2
    if fit is None or layout == "half" or spread or width == rest:
        return fit
    rows = fit.rotation.table.shape[1]
    law = law_of(frequencies(fit.rotation.table), rows, LOOSE_FREQUENCY_TOLERANCE)
    if law is None or law.factor / law.base * (rows - 1) >= u * STILL_ROUNDINGS:  # the next pair would turn visibly
        return fit
    # Models rotate a quarter, half, three quarters or all of the head's channels.
    quarters = [q for q in (x.shape[-1] * share // 4 for share in (4, 3, 2, 1)) if q % 2 == 0 and width <= q <= rest]
    for usual in USUAL_BASES:
        for wider in quarters:
            if abs(law.base ** (wider / width) / usual - 1.0) < BASE_TOLERANCE:
                whole = _fit(x, y, u, layout, first, wider)
                if whole is not None and (whole.amplitude is not None or fit.amplitude is None):
                    return whole
    return fit
