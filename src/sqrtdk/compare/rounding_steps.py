"""How far two correct computations of q, k or v may be apart on their way: projection, normalisation, rotation.

One propagation. Every step rounds what it gives; what was off before goes through the step. Three numbers are carried:

- `each`: standard deviation of the error of an entry by itself;
- `row`: that of the error that all entries of a vector have in common, relative, as that of the length it was divided
  by. The two are what the output is moved by (`rounding`);
- `bound`: what no entry is off by, however the errors lie. It decides whether the vector itself is the same.

A step makes errors that have a bound, `hard` (one rounding, or a few that may have one sign), and sums of many, whose
standard deviation is `chance`. Together their bound is hard + sigmas * chance, their deviation the root of
hard^2 / 3 + chance^2, since what is uniform below a bound deviates by its third root. Both sides' are added up.

How a step carries them on, with e the error of x and h its bound:

- A norm, y = g x / l, gives g (e - x (x . e) / (x . x)) / l. The second part is the error of the length l; it is
  largest where e lies along x, and then as long as h: g (h + |x| |h| / l) / l is a bound, lengths being root mean
  squares where l is one. The mean that "layer" takes off moves by no more than |h|. By chance the errors of many
  entries do not lie along x, and each is g / l times what it was.
- A rotation by c + i s gives c e1 - s e2: |c| h1 + |s| h2, and the root of c^2 e1^2 + s^2 e2^2.
- Numbers that are rounded fall on the next one, or do not: what x - h and x + h are rounded to is as far as they go.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.precision import Precision, Precisions, least, sigmas, sum_variance, unit
from sqrtdk.compare.program import Affine, Norm, Rotation, Rounded, Step, Way
from sqrtdk.tracing.probe.rotation import halves

STILL = 1e-3  # an angle that is none
ONE = 1e-5  # within which a frequency is 1, as well as a table of float32 tells it
LENGTH = 4.5  # roundings that a length is off by: half of those of square, mean, eps and root, and one of its own
TURN = 2.0 * math.sqrt(2.0)  # of a pair's length: cosine or sine and its product, of both channels
ENTERS = 2.0  # of values that two sides have projected
FAR = 0.5  # of their length; what a norm and a rotation in bfloat16 are allowed is less than a tenth
EXACT = Precision(torch.float64)
Steps = tuple[Step, ...]


class Off(NamedTuple):
    """Errors of q, k or v.

    Attributes:
        each: (B, H, L, E).
        row: (B, H, L, 1).
        bound: (B, H, L, E).
    """

    each: Tensor
    row: Tensor
    bound: Tensor

    @classmethod
    def none(cls, values: Tensor) -> Off:
        """Of values that are as they were recorded."""
        nothing = torch.zeros_like(values, dtype=torch.float64)
        return cls(nothing, nothing[..., :1], nothing)

    def plus(self, hard: Tensor | float, chance: Tensor | float = 0.0) -> Off:
        """With an error of every entry by itself."""
        hard, chance = (torch.as_tensor(error, dtype=torch.float64) for error in (hard, chance))
        deviation = (hard.square() / 3 + chance.square()).sqrt()
        return Off(self.each + deviation, self.row, self.bound + hard + sigmas(self.each.numel()) * chance)

    def spread(self, count: int, heads: Tensor | None) -> Off:
        """For every query head, as `compute.spread`."""
        return Off(*(compute.spread(error, count, heads) for error in self))

    def rows(self, which: Tensor | slice) -> Off:
        """Of some rows."""
        return Off(*(error[..., which, :] for error in self))


def projected(affine: Affine, entering: Tensor, sides: Precisions) -> tuple[Tensor, Off]:
    """Heads (B, H, L, E) of an input, and what they are off by: their sum, and the rounding of that and of the bias.

    Of two dtypes, the side of the lesser one has its weights rounded to it.
    """
    result = compute.project(affine, entering)
    squared = replace(affine, weight=affine.weight.double().square(), bias=None)
    squares = compute.project(squared, entering.double().square())
    bias = torch.zeros(()) if affine.bias is None else affine.bias.double()[:, None]
    summed = (sum_variance(result - bias, squares, entering.shape[-1]) / 3).sqrt()
    units = [unit(p.dtype) for p in sides]
    cast = max(units) if max(units) > min(*units, unit(affine.weight.dtype)) else 0.0
    off = Off.none(result).plus(0.0, cast * (squares / 3).sqrt())
    for p in sides:
        off = off.plus(unit(p.dtype) * (result.abs() + bias.abs()) + least(p.dtype), unit(p.accumulator) * summed)
    return result, off


def followed(way: Way, before: Tensor, off: Off, sides: Precisions) -> tuple[Tensor, Off]:
    """Values (B, H, L, E) after all steps of a way, and what they are off by, of values that are off before it."""
    values = before.double()
    for step in way.steps:
        after = compute.apply_step(step, values)
        off, values = _stepped(step, values, after, off, sides), after
    if not way.steps:
        off = off.plus(sum(unit(p.dtype) for p in sides) * values.abs())
    scaled = torch.as_tensor(way.scaled, dtype=torch.float64).abs()
    return values * way.scaled, Off(off.each * scaled, off.row, off.bound * scaled)


def allowed(steps: Steps, entered: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Tensor:
    """What values (B, H, L, E) that one side made by such steps may be off by.

    Args:
        steps: of a way.
        entered: before them.
        dtype: in which they were computed.
        bound: what `entered` may be off by; None: it is another side's projection, or its own.
    """
    bound = ENTERS * unit(dtype) * entered.abs() if bound is None else bound
    return followed(Way(steps=steps), entered, Off.none(entered).plus(bound), (EXACT, Precision(dtype)))[1].bound


def agrees(steps: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> bool:
    """Whether the steps give the values, as near as is `allowed`."""
    got = compute.follow(Way(steps=steps), entered)[-1]
    apart = (got - wanted).abs()
    if float(apart.norm()) > FAR * float(got.norm()):
        return False  # as nearly all that is tried: no rounding is looked for
    return bool((apart <= allowed(steps, entered, dtype, bound)).all())


def inverse(step: Rotation) -> Rotation:
    """The rotation that undoes it."""
    size = step.table.abs().square().clamp_min(torch.finfo(torch.float64).tiny)
    return replace(step, table=step.table.conj().resolve_conj() / size)


def _stepped(step: Step, before: Tensor, after: Tensor, off: Off, sides: Precisions) -> Off:
    if isinstance(step, Norm):
        return _normed(step, before, after, off, sides)
    if isinstance(step, Rotation):
        return _turned(step, before, off, sides)
    if not isinstance(step, Rounded):
        return off
    above, under = (compute.apply_step(step, before + way * off.bound) for way in (1.0, -1.0))
    bound = torch.maximum((above - after).abs(), (after - under).abs())
    off = Off((above - under).abs() / sigmas(before.numel()), torch.zeros_like(off.row), bound)
    if isinstance(step.by, float) and step.by == 1.0:
        return off
    for p in sides:  # what was stored is read back: times a scale, which was rounded as well
        off = off.plus(2.0 * unit(p.dtype) * after.abs())
    return off


def _normed(norm: Norm, before: Tensor, after: Tensor, off: Off, sides: Precisions) -> Off:
    """In the dtype throughout, as careless code computes it: the length, the division and the gain, the shift.

    A mean that is taken off rounds by its own size; a sum of squares is of one sign.
    """
    layer, over = norm.kind == "layer", (1, 3) if norm.over == "heads" else (3,)
    middle, length = compute.centred(norm, before)
    _, error = compute.centred(replace(norm, kind="l2" if norm.kind == "l2" else "rms", eps=0.0), off.bound)
    factor = norm.gain.double().abs()[:, None] / length.clamp(min=1e-300)
    bound = off.bound + error * ((middle / length.clamp(min=1e-300)).abs() + float(layer))
    off = Off(off.each * factor, off.row, bound * factor)
    count = before.shape[3] * (before.shape[1] if norm.over == "heads" else 1)
    shift = torch.zeros(()) if norm.shift is None else norm.shift.double()[:, None]
    mean, squares = (before - middle).abs(), before.square().mean(over, keepdim=True) * count
    variance = sum_variance(mean * count, squares, count) / count**2
    for p in sides:
        u, summed = unit(p.dtype), unit(p.accumulator)
        off = off.plus(u * (after.abs() + shift.abs()) + least(p.dtype))
        if layer:
            off = off.plus(factor * u * (mean + middle.abs()), factor * summed * (variance / 3).sqrt())
        hard, chance = LENGTH * u, summed * math.sqrt(count) / 6
        relative = math.sqrt(hard**2 / 3 + chance**2)
        most = (hard + sigmas(after.numel()) * chance) * (after - shift).abs()
        off = Off(off.each + relative * shift.abs(), off.row + relative, off.bound + most)
    return off


def _turned(rotation: Rotation, before: Tensor, off: Off, sides: Precisions) -> Off:
    """Table, two products and their sum; and angles that were computed in float32, by three roundings of an angle."""
    real, imaginary = rotation.table.real.double().abs(), rotation.table.imag.double().abs()
    size = real.square() + imaginary.square()
    each = _mixed(rotation, off.each.square(), real.square(), imaginary.square()).sqrt()
    off = Off(each, off.row, _mixed(rotation, off.bound, real, imaginary))
    length = _mixed(rotation, before.square(), size, size).sqrt()
    turns = before.new_zeros(before.shape[-1])
    turns[rotation.first : rotation.first + rotation.width] = 1.0
    angle = 3.0 * unit(torch.float32) * _angles(rotation, before.shape[-2])
    by_angle = turns * _mixed(rotation, length, angle, torch.zeros_like(angle))
    for p in sides:
        rounded = unit(p.dtype) * (1.0 + TURN * turns) * length + least(p.dtype)
        off = off.plus(rounded if p.dtype == torch.float64 else rounded + by_angle)
    return off


def _mixed(rotation: Rotation, values: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Values of which each channel that turns is `own` times itself and `other` times the other one of its pair."""
    result = values.clone()
    places = halves(result[..., rotation.first : rotation.first + rotation.width], rotation.layout)
    one, two = (own[:, None] * places[i] + other[:, None] * places[1 - i] for i in (0, 1))
    places[0].copy_(one)
    places[1].copy_(two)
    return result


def _angles(rotation: Rotation, length: int) -> Tensor:
    """Angles (B or 1, L, R / 2) that were rounded: position times frequency.

    A frequency is by how much a pair turns more from one row to the next, at most; positions are those of the rows
    where the first does not turn, else as many as there are rows.
    """
    table = rotation.table.to(torch.complex128)
    frequencies = torch.ones(1, 1, table.shape[-1], dtype=torch.float64)
    if table.shape[-2] > 1:
        frequencies = (table[:, 1:] * table[:, :-1].conj()).angle().abs().amax((0, 1), keepdim=True).clamp(max=1.0)
        frequencies = torch.where((frequencies - 1.0).abs() < ONE, 0.0, frequencies)  # base^0: no rounding is in it
    positions = torch.full((table.shape[-2],), float(length), dtype=torch.float64)
    if bool((table[:, 0].angle().abs() < STILL).all()):
        positions = torch.arange(table.shape[-2], dtype=torch.float64)
    return (positions[:, None] * frequencies).expand(table.shape)
