"""How far two correct computations of one stage may be apart, by the rounding of their dtypes.

The model. A stored number is off by at most u of its size, u half the epsilon of its dtype (and by half the last place
of the least normal number where it is less). Many roundings add up like independent ones that are uniform between these
bounds: such a sum is sub-Gaussian, its variance a third of the sum of the squared bounds. It is beyond `sigmas(n)`
standard deviations anywhere among n entries with a probability of less than `RISK`. All below are standard deviations
in units of u / sqrt(3), but for the rounding of the result itself, whose bound is added as it is.

- A sum of n terms t, in any order, one after the other: each addition rounds the partial sum. In an order that has
  nothing to do with the terms the partial sum is k s / n + noise after k of them, s being the whole sum, and the
  squares of all partial sums add up to n (s^2 / 3 + |t|^2 / 2); |t|^2 is the sum of squared terms. Each product adds
  its own term once more. Sums in blocks are off by less. float16 and bfloat16 are summed in float32.
- Logit z: the sum over E, times the scale and the slope of the softcap; `vector_steps` roundings of q or k (a scale
  that was folded in), each |q o k|; `logit_steps` roundings in the dtype of the logits, each |z| (the product, the
  scale, the three steps of a softcap, the bias, in an eager computation); x sech^2 x <= tanh x covers those before it.
- Weight w: its relative error is that of its logit, of z - max(z) (twice: the difference, and what the exponential
  makes of it) and of the exponential. A logit's error e moves the output by w (e^r - 1) (v - o): what all logits of a
  row have in common cancels. Rounding the weight moves it by w v.
- Output o: those of all keys, root of the sum of squares; the sum over keys of w v, and the sum of the weights that it
  is divided by; the rounding of the result. It is no more than what v ranges over, whatever the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.program import Affine, Formula, Norm, Rotation

RISK = 1e-6  # that two correct results are found to be different
EXPONENTIAL = 8.0  # roundings that an exponential of a vector library is off by, root of the mean square
SOFTMAX_STEPS = 2.0  # of a weight beside its own: the division or its reciprocal, the rescaling by a later maximum


@dataclass(frozen=True, slots=True)
class Precision:
    """How a side computes.

    Attributes:
        dtype: of q, k, v and the output.
        logits_dtype: in which logits are stored; of a fused kernel the accumulator's. None: that of the accumulator.
        weights_dtype: of the weights as they meet v. None: the dtype.
        logit_steps: elementwise operations on the logits that rounded to it, the product's own among them.
        vector_steps: operations on q and k, other than those of the program's steps, that rounded to the dtype.
    """

    dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    logit_steps: int = 2
    vector_steps: int = 0

    @property
    def accumulator(self) -> torch.dtype:
        """In which sums are made."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def unit(dtype: torch.dtype) -> float:
    """u: the largest relative error of one rounding to nearest.

    Example:
        >>> unit(torch.float16) == 2**-11
        True
    """
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """The largest absolute error of rounding a number below the normal ones."""
    finfo = torch.finfo(dtype)
    return finfo.tiny * finfo.eps / 2


def sigmas(entries: int) -> float:
    """Standard deviations that none of so many entries exceeds but with probability RISK.

    Example:
        >>> round(sigmas(1), 2), round(sigmas(10**6), 2)
        (5.39, 7.53)
    """
    return math.sqrt(2.0 * math.log(2.0 * max(1, entries) / RISK))


def beyond(actual: Tensor, expected: Tensor, allowed: Tensor | float) -> tuple[float, float]:
    """Largest difference, and what is allowed where it is most in relation to that; NaN beside a number is infinite.

    Example:
        >>> beyond(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.25)
        (0.5, 0.25)
    """
    actual, expected = actual.double(), expected.double()
    beside = (actual - expected).abs()
    beside = torch.where(actual == expected, 0.0, beside)  # infinities
    beside = torch.where(actual.isnan() & expected.isnan(), 0.0, beside).nan_to_num(nan=float("inf"))
    if beside.numel() == 0:
        return 0.0, 0.0
    limits = torch.as_tensor(allowed, dtype=torch.float64).expand(beside.shape)
    ratio = torch.where(beside == 0, 0.0, beside / limits.clamp(min=1e-300))
    at = int(ratio.argmax())
    return float(beside.max()), float(limits.flatten()[at])


def projection_allowed(affine: Affine, entering: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a projection, (B, H, L, E)."""
    result, squares = compute.project(affine, entering), _squared(affine, entering)
    bias = 0.0 if affine.bias is None else affine.bias.double().abs()[:, None]
    return sum(
        (
            _many(_sum_variance(result - _plain_bias(affine), squares, entering.shape[-1]), p, result.numel())
            + unit(p.dtype) * (result.abs() + bias)
            + least(p.dtype)
            for p in (a, b)
        ),
        torch.zeros_like(result),
    )


def norm_allowed(norm: Norm, before: Tensor, a: Precision, b: Precision) -> Tensor:
    """Of a normalisation, (B, H, L, E): in the dtype throughout, as careless code computes it.

    The square, the mean, eps, the root: the length is off by half of these and by one rounding of its own; then
    division and gain round, and the shift; a mean that is taken off rounds by its own size.
    """
    result, x, over = compute.apply_norm(norm, before), before.double(), (1, 3) if norm.over == "heads" else (3,)
    shift = torch.zeros(1, 1, 1).double() if norm.shift is None else norm.shift.double()[:, None]
    scaled, count = (result - shift).abs(), math.prod(x.shape[i] for i in over)
    if norm.kind == "layer":
        mean = x.mean(over, keepdim=True)
        spread = (x - mean).abs().clamp(min=1e-300)
        scaled = scaled * (1.0 + (x.abs() + mean.abs()) / spread * 0.5) + _off_mean(norm, x, over)
    allowed = torch.zeros_like(result)
    for p in (a, b):
        length = sigmas(result.numel()) * unit(p.accumulator) * math.sqrt(count / 9.0)
        allowed += (
            scaled * (4.5 * unit(p.dtype) + length) + unit(p.dtype) * (result.abs() + shift.abs()) + least(p.dtype)
        )
    return allowed


def rotation_allowed(rotation: Rotation, before: Tensor, a: Precision, b: Precision, position: int = 0) -> Tensor:
    """Of a rotation, (B, H, L, E): table, two products and their sum, and angles in float32 at such positions.

    Args:
        rotation: the step.
        before: values before it.
        a: one side.
        b: the other side.
        position: largest of a row; 0: as many as there are rows.
    """
    result, x = compute.apply_rotation(rotation, before), before.double().abs()
    turning = slice(rotation.first, rotation.first + rotation.width)
    length = compute.apply_rotation(
        Rotation(rotation.table.abs().to(torch.complex128), rotation.layout, rotation.first), x
    )
    pairs = length[..., turning]
    half = rotation.width // 2
    if rotation.layout == "half":
        size = torch.hypot(pairs[..., :half], pairs[..., half:]).repeat(1, 1, 1, 2)
    else:
        size = torch.hypot(pairs[..., ::2], pairs[..., 1::2]).repeat_interleave(2, -1)
    angle = 3.0 * unit(torch.float32) * (position or before.shape[-2])
    allowed = torch.zeros_like(result)
    for p in (a, b):
        part = unit(p.dtype) * result.abs()
        part[..., turning] = unit(p.dtype) * (2.0 * math.sqrt(2.0) + 1.0) * size
        if p.dtype != torch.float64:
            part[..., turning] += angle * size
        allowed += part + least(p.dtype)
    return allowed


def logits_allowed(
    query: Tensor, key: Tensor, formula: Formula, a: Precision, b: Precision, rows: slice | None = None
) -> Tensor:
    """Of the logits, (B, Hq, l, S); 0 where the key is hidden."""
    there = _Logits.of(query, key, formula, rows)
    count = there.z.numel() * max(1, query.shape[-2]) // max(1, there.z.shape[-2])
    return sum((sigmas(count) * there.deviation(p) for p in (a, b)), torch.zeros_like(there.z))


def weights_allowed(
    query: Tensor, key: Tensor, formula: Formula, a: Precision, b: Precision, rows: slice | None = None
) -> Tensor:
    """Of the weights, (B, Hq, l, S)."""
    there = _Logits.of(query, key, formula, rows)
    weights, _ = compute.weigh(query, key, formula, rows)
    count = there.z.numel() * max(1, query.shape[-2]) // max(1, there.z.shape[-2])
    allowed = torch.zeros_like(weights)
    for p in (a, b):
        most = sigmas(count)
        relative = there.relative(p, most)
        others = (weights * relative).square().sum(-1, keepdim=True).sqrt()
        keys = _keys(weights)
        sums = (keys * (1 / 3 + weights.square().sum(-1, keepdim=True) / 2) / 3).sqrt() * unit(p.accumulator)
        w = unit(p.weights_dtype or p.dtype)
        allowed += weights * (most * (relative + others + sums) + w) + least(p.weights_dtype or p.dtype)
    return allowed


def output_allowed(query: Tensor, key: Tensor, value: Tensor, formula: Formula, a: Precision, b: Precision) -> Tensor:
    """Of the output, (B, Hq, L, Ev), in chunks of rows.

    Args:
        query: (B, Hq, L, E), as both sides have it.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        formula: of both.
        a: one side; float64 allows next to nothing.
        b: the other side.
    """
    heads = query.shape[1]
    key, value = compute.spread(key, heads).double(), compute.spread(value, heads).double()
    entries = query.shape[:3].numel() * value.shape[-1]
    parts = [
        _output_rows(query, key, value, formula, (a, b), rows, sigmas(entries)) for rows in compute.chunks(query, key)
    ]
    return torch.cat(parts, 2) if parts else query.new_zeros((*query.shape[:3], value.shape[-1])).double()


def _output_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    sides: tuple[Precision, Precision],
    rows: slice,
    most: float,
) -> Tensor:
    there = _Logits.of(query, key, formula, rows)
    weights, _ = compute.weigh(query, key, formula, rows)
    output, squares = weights @ value, weights.square()
    terms, keys = squares @ value.square(), _keys(weights)
    total = weights.sum(-1, keepdim=True)  # less than 1 beside sinks
    reach = (value.amax(-2, keepdim=True) - value.amin(-2, keepdim=True)) if value.shape[-2] else output
    allowed = torch.zeros_like(output)
    for p in sides:
        relative = squares * there.relative(p, most).square()
        moved = relative @ value.square() - 2 * output * (relative @ value)
        moved = (moved + output.square() * relative.sum(-1, keepdim=True)).clamp(min=0.0)
        u, w = unit(p.accumulator), p.weights_dtype or p.dtype
        stored = terms * unit(w) ** 2 + (weights > 0).double() @ value.square() * least(w) ** 2
        summed = keys * (output.square() / 3 + terms / 2) + terms
        divided = output.square() * keys * (1 / 3 + squares.sum(-1, keepdim=True) / 2)
        deviation = (moved + (stored + u * u * (summed + divided + SOFTMAX_STEPS * output.square())) / 3).sqrt()
        smaller = (most * relative.sum(-1, keepdim=True).sqrt()).clamp(max=0.5)
        side = most * deviation / (1.0 - smaller) + unit(p.dtype) * output.abs() + least(p.dtype)
        allowed += torch.minimum(side, reach * total + 2 * unit(w) * output.abs() + 1e-300)
    return allowed


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """What the errors of logits are made of, each (B, Hq, l, S).

    Attributes:
        z: logits, 0 where hidden.
        below: z less the largest of the row.
        sums: variance of the sum over E, in u^2 / 3 of the accumulator.
        squares: |q o k|^2 times the squared slope.
        sizes: the largest number that was rounded on the way.
    """

    z: Tensor
    below: Tensor
    sums: Tensor
    squares: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, formula: Formula, rows: slice | None) -> _Logits:
        queries, keys = query.double() if rows is None else query[..., rows, :].double(), key.double()
        keys = compute.spread(keys, query.shape[1])
        bare, slope = compute.curve(query, key, formula, rows)
        z = compute.logits(query, key, formula, rows)
        hidden = compute.hidden(formula, rows, query.shape[-2])
        sizes = torch.maximum(bare.abs(), z.abs())
        if hidden is not None:
            z, sizes, slope = (torch.where(hidden, 0.0, t) for t in (z, sizes, slope))
        product, squares = queries @ keys.mT, queries.square() @ keys.square().mT
        sums = slope.square() * (query.shape[-1] * (product.square() / 3 + squares / 2) + squares)
        top = z.masked_fill(hidden.expand_as(z), float("-inf")).amax(-1, keepdim=True) if hidden is not None else None
        top = z.amax(-1, keepdim=True) if top is None and z.shape[-1] else top
        below = z if top is None else z - top.masked_fill(top == float("-inf"), 0.0)
        return cls(z, below, sums, slope.square() * squares, sizes)

    def deviation(self, p: Precision) -> Tensor:
        """Standard deviation of a logit."""
        accumulator, stored = unit(p.accumulator), p.logits_dtype or p.accumulator
        variance = accumulator**2 * self.sums + p.vector_steps * unit(p.dtype) ** 2 * self.squares
        variance = variance + p.logit_steps * (unit(stored) ** 2 * self.sizes.square() + least(stored) ** 2)
        return (variance / 3).sqrt()

    def relative(self, p: Precision, most: float) -> Tensor:
        """Standard deviation of a weight's relative error but for its own rounding, curved as the exponential is."""
        accumulator = unit(p.accumulator) ** 2
        variance = self.deviation(p).square() + accumulator * (2 * self.below.square() + EXPONENTIAL**2) / 3
        return torch.expm1((most * variance.sqrt()).clamp(max=30.0)) / most


def _keys(weights: Tensor) -> Tensor:
    """How many keys have weight, (B, Hq, l, 1): additions of 0 don't round."""
    return (weights != 0).sum(-1, keepdim=True).double()


def _sum_variance(total: Tensor, squares: Tensor, count: int) -> Tensor:
    return count * (total.square() / 3 + squares / 2) + squares


def _many(variance: Tensor, p: Precision, entries: int) -> Tensor:
    return sigmas(entries) * unit(p.accumulator) * (variance / 3).sqrt()


def _squared(affine: Affine, entering: Tensor) -> Tensor:
    return compute.project(
        Affine("", affine.weight.double().square(), None, affine.features), entering.double().square()
    )


def _plain_bias(affine: Affine) -> Tensor | float:
    return 0.0 if affine.bias is None else affine.bias.double()[:, None]


def _off_mean(norm: Norm, x: Tensor, over: tuple[int, ...]) -> Tensor:
    """What an error of the mean of a tenth of the deviation's rounding moves each entry by, in roundings."""
    return 0.1 * norm.gain.double().abs()[:, None].expand_as(x)
