"""A rotary embedding, from the values before and after it.

A pair of channels is a complex number; what it was multiplied by is that of least squares over heads, and over batches
where their tables are one. The pairs are those of the layout that gives the values after: pairs of "half" are R / 2
apart, and each distance is tried; those of "interleaved" are neighbours. An amplitude that is the same everywhere is
part of the table; only where that fails is one left free for each pair and row.

What can't be told from values: at R = 2 both layouts are one ("half" is said); a pair that turns by less than rounding
does not show. Of neighbours such pairs at the end are counted as turning where, by the frequencies of those before,
they would not show, and the base is a usual one with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.tracing.probe.angles import Rotation, apply_rotation, base_of, would_not_show

LIMIT = 12.0  # roundings: two products, their sum, two numbers of the table, and what the amplitude's own adds
ROWS = 64  # rows by which layout and width are searched, evenly spaced
USUAL = (1e4, 1e6, 5e5, 5e6, 1e7, 1.6e5, 1e5, 1e3, 1e2)  # bases, the likeliest first
NEAR = 0.1  # of a base, as well as half precision tells it
STILL = 3.0  # roundings that a channel which does not turn may be off by


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


def _search(x: Tensor, y: Tensor, u: float, turning: list[int]) -> tuple[str, int, int] | None:
    """Layout, first channel and width of the least residual, on a sample of rows; of equals the first."""
    features, first, last = x.shape[-1], turning[0], turning[-1]
    rows = _informative(x, y)
    x, y = x[:, :, rows], y[:, :, rows]
    tried = [("half", first, width) for width in range(2 * ((last - first) // 2 + 1), features - first + 1, 2)]
    even = first - first % 2
    width = last - last % 2 + 2 - even
    if width > 2 or first % 2 or last % 2 == 0:
        tried.append(("interleaved", even, width))
    tried += [("half", begin, 2 * half) for begin, half in _halves(turning, features)]
    best: tuple[float, tuple[str, int, int]] | None = None
    for candidate in dict.fromkeys(tried):
        fit = _fit(x, y, u, *candidate)
        if fit is not None and (best is None or fit.residual < best[0]):
            best = (fit.residual, candidate)
    return None if best is None else best[1]


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


def _pairs(values: Tensor, layout: str, first: int, width: int) -> Tensor:
    turning = values[..., first : first + width]
    if layout == "half":
        return torch.complex(turning[..., : width // 2].contiguous(), turning[..., width // 2 :].contiguous())
    return torch.complex(turning[..., ::2].contiguous(), turning[..., 1::2].contiguous())


def _fit(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int) -> RotationFit | None:
    """The table of one layout: of one amplitude or of many, of all batches or of each."""
    before, after = _pairs(x, layout, first, width), _pairs(y, layout, first, width)
    upper, lower = (before.conj() * after).sum(1), before.abs().square().sum(1)
    overdetermined = x.shape[0] * x.shape[1] > 1
    for together in (True, False) if x.shape[0] > 1 else (True,):
        up, low = (upper.sum(0, keepdim=True), lower.sum(0, keepdim=True)) if together else (upper, lower)
        free = torch.where(low > 0, up / low.masked_fill(low == 0, 1.0), torch.ones_like(up))
        for one in (True, False):
            if not one and not (overdetermined and (together or x.shape[1] > 1)):
                continue
            amplitude = _amplitude(free, low)
            table = free / free.abs().clamp(min=1e-300) * amplitude if one else free
            rotation = Rotation(table, layout, first)
            residual = _residual(x, y, before, rotation, u)
            if residual <= LIMIT:
                return RotationFit(rotation, amplitude if one else None, residual)
    return None


def _amplitude(table: Tensor, weight: Tensor) -> float:
    """That of least squares: of the lengths of all pairs, by their weight; 1 where it is 1 in float32."""
    amplitude = float((table.abs() * weight).sum() / weight.sum().clamp(min=1e-300))
    return 1.0 if abs(amplitude - 1.0) < torch.finfo(torch.float32).eps else amplitude


def _residual(x: Tensor, y: Tensor, before: Tensor, rotation: Rotation, u: float) -> float:
    turned = apply_rotation(rotation, x)
    length = before.abs() * rotation.table.abs()[:, None]
    sizes = x.abs()
    middle = torch.cat([length, length], -1) if rotation.layout == "half" else length.repeat_interleave(2, -1)
    sizes[..., rotation.first : rotation.first + rotation.width] = middle
    beside = (turned - y).abs()
    return float((beside / (u * sizes).clamp(min=1e-300)).masked_fill(beside == 0, 0.0).max())


def _whole(x: Tensor, y: Tensor, u: float, layout: str, first: int, width: int) -> RotationFit | None:
    """The fit on all rows; of neighbours, of the width whose base is a usual one, if the rest would not show."""
    fit = _fit(x, y, u, layout, first, width)
    rest = (x.shape[-1] - first) // 2 * 2
    if fit is None or layout == "half" or width == rest or not would_not_show(fit.rotation, u * STILL):
        return fit
    quarters = [q for q in (x.shape[-1] * share // 4 for share in (4, 3, 2, 1)) if q % 2 == 0 and width <= q <= rest]
    for usual in USUAL:
        for wider in quarters:
            base = base_of(fit.rotation, width=wider)
            if base is not None and abs(base.base / usual - 1.0) < NEAR:
                whole = _fit(x, y, u, layout, first, wider)
                if whole is not None and (whole.amplitude is not None or fit.amplitude is None):
                    return whole
    return fit
