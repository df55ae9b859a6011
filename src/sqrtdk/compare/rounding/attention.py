"""How far two correct computations of one attention may differ, by the rounding of their dtypes.

The model. A stored number is off by at most u times its size, where u is half the epsilon of its dtype (below the
normal numbers: by half the last place of the least normal number). Many roundings add up like independent ones that
are uniform between these bounds. Their sum is sub-Gaussian, with a third of the sum of the squared bounds as variance.
The probability that any of n entries exceeds `sigmas(n)` standard deviations is below `RISK`. All quantities below are
standard deviations in units of u / sqrt(3), except the rounding of the result itself, whose bound is added unchanged.

- A sum of n terms t, added one after the other in any order: each addition rounds the partial sum. If the order is
  unrelated to the terms, the partial sum after k of them is k s / n + noise, where s is the whole sum. The squares of
  all partial sums add up to n (s^2 / 3 + |t|^2 / 2), where |t|^2 is the sum of squared terms. Each product adds its
  own term once more. Blocked sums are off by less. float16 and bfloat16 are summed in float32.
- Logit z: the sum over E, times the scale and the slope of the softcap; `logit_steps` roundings of |z| in the dtype of
  the logits (the product, the scale, three steps of a softcap, the bias, in an eager computation);
  x sech^2 x <= tanh x covers those before the softcap.
- Weight w: its relative error combines that of its logit, that of z - max(z) (twice: the difference itself, and its
  effect on the exponential) and that of the exponential. A logit's error e moves the output by w (e^r - 1) (v - o), so
  an error that all logits of a row share cancels. Rounding the weight moves the output by w v.
- Errors with which q, k and v arrive (`rounding_steps`): an error of q moves the logits of its row by
  slope (dq . k_j), an error of k moves one of them by slope (q . dk_j). However these errors are related, they move the
  output by at most the deviation of v times their own, both weighted by the row (Cauchy and Schwarz). What all logits
  of a row share cancels, such as the error of q times the mean of the keys. An error of v enters with its weight.
- Errors that are not independent between keys. m equal keys have equal errors, so their squares count m times. Numbers
  that lie within c steps of their dtype are rounded up or down together: the average over whole steps is 0, and
  1 / (1 + c) of one rounding of all of them is left.
- Output o: the errors of all keys, as root of the sum of squares; the sum over keys of w v, and the sum of the weights
  that divides it; the rounding of the result. Errors of logits move it by no more than the range of v.

Not covered: products of inputs that were cut to fewer digits than their dtype has (TF32), and sums of very many equal
terms, whose roundings are all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside import compute
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.rounding.precision import (
    Precision,
    Precisions,
    dtype_allowed,
    least,
    rounding_unit,
    sigmas,
    sum_variance,
)
from sqrtdk.compare.rounding.vectors import VectorErrors

EXPONENTIAL = 8.0  # roundings, in root mean square, of an exponential from a vector library
SOFTMAX_STEPS = 2.0  # roundings of a weight besides its own: division or reciprocal, rescaling by a later maximum


def output_allowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    sides: Precisions,
    offs: Sequence[VectorErrors] = (),
    entries: int | None = None,
) -> Tensor:
    """Return the allowed difference of the output, (B, Hq, L, Ev), computed in chunks of rows.

    Args:
        query: (B, Hq, L, E), equal on both sides.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        formula: formula of both sides.
        sides: precisions of both sides; float64 allows next to nothing.
        offs: errors with which q, k and v arrive, of both sides together; empty: they are exact.
        entries: number of output entries that are compared; None: those of these rows.
    """
    heads = query.shape[1]
    offs = [off.spread(heads, None) for off in offs]
    key, value = compute.repeat_heads(key, heads).double(), compute.repeat_heads(value, heads).double()
    times, most = _repeats(key), sigmas(entries or query.shape[:3].numel() * value.shape[-1])
    length, parts = query.shape[-2], []
    for rows in compute.chunks(query, key):
        cut, off = compute.some_rows(formula, rows, length), [offs[0].rows(rows), *offs[1:]] if offs else []
        parts.append(_of_rows(query[..., rows, :], key, value, cut, sides, most, times, off))
    return torch.cat(parts, 2) if parts else query.new_zeros((*query.shape[:3], value.shape[-1])).double()


def _of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    sides: Precisions,
    most: float,
    times: Tensor,
    offs: Sequence[VectorErrors],
) -> Tensor:
    there = _Logits.of(query, key, formula)
    weights, _ = compute.compute_weights(query, key, formula, there.entering)
    whole = weights
    if formula.kept is not None:
        whole, _ = compute.compute_weights(query, key, replace(formula, kept=None), there.entering)
    output, reach, squared = weights @ value, _reach(value, formula), value.square()
    terms, repeated = weights.square() @ squared, (weights.square() * times) @ squared
    mean_square = weights @ squared if formula.kept is None else whole @ squared + reach**2
    spread, apart = (mean_square - output.square()).clamp(min=0.0), there.spread(whole)
    keys = (whole != 0).sum(-1, keepdim=True).double()  # adding 0 does not round
    divided = output.square() * (keys * (1 / 3 + whole.square().sum(-1, keepdim=True) / 2) + SOFTMAX_STEPS)
    summed = sum_variance(output, terms, keys) + divided
    allowed = torch.zeros_like(output)
    if offs:
        carried = there.carried(query.double(), key, offs[0], offs[1], whole, most)
        allowed += torch.minimum(most * (spread * carried).sqrt(), reach)
        of_value = offs[2].each.square() + offs[2].row.square() * squared
        allowed += most * ((weights.square() * _repeats(value)) @ of_value).sqrt()  # equal values have equal errors
    coarse = [p for p in sides if p.dtype != torch.float64] or list(sides)  # float64 adds 1e-8 of any other dtype
    for p in dict.fromkeys(coarse):
        relative = there.relative(p, most).square()
        moved = _moved(weights, whole, relative * times, value, output) + spread * there.cells(p, whole, apart)
        w = dtype_allowed(p, p.weights_dtype or p.dtype, formula.weights_dtype)
        last = repeated * rounding_unit(w) ** 2 + (weights > 0).double() @ squared * least(w) ** 2
        last = last + mean_square * (rounding_unit(w) / (1.0 + apart / (2 * rounding_unit(w)))) ** 2
        others = (last + rounding_unit(p.accumulator) ** 2 * summed) / 3
        smaller = (most * (whole.square() * relative).sum(-1, keepdim=True).sqrt()).clamp(max=0.5)
        # Weights stay an average whatever the logits' errors are: they can't move the output beyond the range of v.
        side = torch.minimum(most * (moved + others).sqrt() / (1.0 - smaller), reach + most * others.sqrt())
        count = coarse.count(p) + 1e-8 * (2 - len(coarse))
        allowed += count * (side + rounding_unit(p.dtype) * output.abs() + least(p.dtype))
    return allowed


def _moved(weights: Tensor, whole: Tensor, relative: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """Return the variance of the output from the logits' variance: of w (v - o).

    With dropout the kept weights and the whole ones differ, so w v and w o count separately.
    """
    upper = weights.square() * relative
    lower = (whole.square() * relative).sum(-1, keepdim=True) * output.square()
    if whole is not weights:
        return upper @ value.square() + lower
    return (upper @ value.square() - 2 * output * (upper @ value) + lower).clamp(min=0.0)


def _reach(value: Tensor, formula: Formula) -> Tensor:
    """Return the largest distance of outputs, (B, Hq, 1, Ev): the range of v, with 0 if weights don't sum to 1."""
    if value.shape[-2] == 0:
        return value.new_zeros((*value.shape[:2], 1, value.shape[-1]))
    most, least_one = value.amax(-2, keepdim=True), value.amin(-2, keepdim=True)
    if formula.sinks is None and formula.kept is None:
        return most - least_one
    reach = most.clamp(min=0.0) - least_one.clamp(max=0.0)
    return reach / max(1e-9, 1.0 - formula.dropout) if formula.kept is not None else reach


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """The parts of the errors of logits, each (B, Hq, l, S).

    Attributes:
        z: logits; 0 at a hidden key whose logit is replaced by a fill.
        below: z minus the largest of the row.
        sums: variance of the sum over E, in u^2 / 3 of the accumulator.
        sizes: largest number that was rounded on the way, fills excepted.
        added: True where a fill was added to the logit; None if none was.
        formula: formula of both sides.
        entering: input of the softmax: logits with what hides keys.
        product: q . k, 0 where z is.
        slope: derivative of the logits with respect to the product.
    """

    z: Tensor
    below: Tensor
    sums: Tensor
    sizes: Tensor
    added: Tensor | None
    formula: Formula
    entering: Tensor
    product: Tensor
    slope: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, formula: Formula) -> _Logits:
        product, squares = query.double() @ key.mT, query.double().square() @ key.square().mT
        bare, slope = compute.logits_and_slope(product, formula)
        entering = z = compute.compute_logits(query, key, formula, product)
        plain = formula.bias is None and formula.softcap_at != "masked"
        sizes = bare.abs() if plain else torch.maximum(bare.abs(), z.abs())
        hidden, added = None if formula.visible is None else ~formula.visible, None
        top = z.amax(-1, keepdim=True) if z.shape[-1] else z
        below = (z - top).masked_fill(top == float("-inf"), 0.0)
        if hidden is not None and formula.fill_added and not math.isinf(formula.fill):
            sizes, added = torch.where(hidden, bare.abs(), sizes), hidden
        elif hidden is not None:
            z, below, sizes, squares, product = (
                t.masked_fill(hidden, 0.0) for t in (z, below, sizes, squares, product)
            )
        sums = sum_variance(slope * product, slope.square() * squares, query.shape[-1])
        return cls(z, below, sums, sizes, added, formula, entering, product, slope.expand(product.shape))

    def relative(self, p: Precision, most: float) -> Tensor:
        """Return the deviation of a weight's relative error without its own rounding, bent by the exponential."""
        accumulator, own = rounding_unit(p.accumulator) ** 2, self._own(p)
        variance = accumulator * self.sums
        variance = variance + p.logit_steps * (rounding_unit(own) ** 2 * self.sizes.square() + least(own) ** 2)
        # z + fill keeps only the digits of z that fit beside the fill: -1e4 + 0.3 in float16 is -1e4.
        if self.added is not None:
            name, deviation = str(own).removeprefix("torch."), (variance / 3).sqrt()
            above, under = (compute.round_to(self.z + path * most * deviation, name) for path in (1.0, -1.0))
            shown = (above - under).nan_to_num(nan=0.0) / most
            variance = torch.where(self.added, 3 * shown.square(), variance)
        exponential = accumulator * (2 * self.below.square() + EXPONENTIAL**2)
        deviation = ((variance + exponential.nan_to_num(posinf=0.0)) / 3).sqrt()
        return torch.expm1((most * deviation).clamp(max=30.0)) / most

    def spread(self, weights: Tensor) -> Tensor:
        """Return the weighted standard deviation of the logits of each row, (B, Hq, l, 1)."""
        z = self.z.nan_to_num(neginf=0.0, posinf=0.0)
        mean = (weights * z).sum(-1, keepdim=True)
        return (weights * (z - mean).square()).sum(-1, keepdim=True).sqrt()

    def cells(self, p: Precision, weights: Tensor, apart: Tensor) -> Tensor:
        """Return the variance of logits that are too close together to round independently, (B, Hq, l, 1)."""
        u = rounding_unit(self._own(p))
        sizes = (weights * self.sizes.square()).sum(-1, keepdim=True)
        return p.logit_steps * u * u * sizes / 3 / (1.0 + apart / (2 * u * sizes.sqrt()).clamp(min=1e-300)).square()

    def carried(
        self, query: Tensor, key: Tensor, own: VectorErrors, other: VectorErrors, weights: Tensor, most: float
    ) -> Tensor:
        """Return the variance of a row's logits from errors of q and k, (B, Hq, l, 1), bent by the exponential."""
        first, second = weights * self.slope, weights * self.slope.square()
        about = (second @ key.square() - (first @ key).square()).clamp(min=0.0)
        spread = (second * self.product.square()).sum(-1, keepdim=True)
        spread = (spread - (first * self.product).sum(-1, keepdim=True).square()).clamp(min=0.0)
        of_query = (own.each.square() * about).sum(-1, keepdim=True) + own.row.square() * spread
        of_key = query.square() @ other.each.square().mT + other.row.square().mT * self.product.square()
        total = of_query + (second * of_key).sum(-1, keepdim=True)
        largest = most * (total + (self.slope.square() * of_key).amax(-1, keepdim=True)).sqrt()
        return total * (torch.expm1(largest.clamp(max=30.0)) / largest.clamp(min=1e-12)).clamp(min=1.0).square()

    def _own(self, p: Precision) -> torch.dtype:
        return dtype_allowed(p, p.logits_dtype or p.accumulator, self.formula.logits_dtype)


def _repeats(key: Tensor) -> Tensor:
    """Return how often each key occurs among the keys of its head, (B, H, 1, S): equal keys have equal errors."""
    # One projection per key stands for its vector; unequal keys practically never share it.
    marks = (key.double() * torch.linspace(1.0, 2.0, key.shape[-1], dtype=torch.float64).cos()).sum(-1)
    times = torch.ones_like(marks)
    for batch, head in itertools.product(range(key.shape[0]), range(key.shape[1])):
        _, which, counts = torch.unique(marks[batch, head], return_inverse=True, return_counts=True)
        times[batch, head] = counts[which].double()
    return times[:, :, None]
