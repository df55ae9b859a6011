"""How far two correct computations of one attention may be apart, by the rounding of their dtypes.

The model. A stored number is off by at most u of its size, u half the epsilon of its dtype (and by half the last place
of the least normal number where it is less). Many roundings add up like independent ones that are uniform between these
bounds: such a sum is sub-Gaussian, its variance a third of the sum of the squared bounds. It is beyond `sigmas(n)`
standard deviations anywhere among n entries with a probability of less than `RISK`. All below are standard deviations
in units of u / sqrt(3), but for the rounding of the result itself, whose bound is added as it is.

- A sum of n terms t, in any order, one after the other: each addition rounds the partial sum. In an order that has
  nothing to do with the terms the partial sum is k s / n + noise after k of them, s being the whole sum, and the
  squares of all partial sums add up to n (s^2 / 3 + |t|^2 / 2); |t|^2 is the sum of squared terms. Each product adds
  its own term once more. Sums in blocks are off by less. float16 and bfloat16 are summed in float32.
- Logit z: the sum over E, times the scale and the slope of the softcap; `logit_steps` roundings in the dtype of the
  logits, each |z| (the product, the scale, the three steps of a softcap, the bias, in an eager computation);
  x sech^2 x <= tanh x covers those before it.
- Weight w: its relative error is that of its logit, of z - max(z) (twice: the difference, and what the exponential
  makes of it) and of the exponential. A logit's error e moves the output by w (e^r - 1) (v - o): what all logits of a
  row have in common cancels. Rounding the weight moves it by w v.
- What q, k and v are off by as they come in (`rounding_steps`): an error of q moves the logits of its row by
  slope (dq . k_j), an error of k one of them by slope (q . dk_j). Whatever these have to do with one another, they move
  the output by no more than the deviation of v times theirs, both by the weights of the row (Cauchy and Schwarz); what
  all logits of a row have in common cancels, as that of q with the mean of the keys does. An error of v comes with its
  weight.
- What is no chance of each key. m equal keys have equal errors: their squares count m times. Numbers that lie within c
  steps of their dtype, side by side, are rounded up or down together: the average over whole steps is 0, and what is
  left of it 1 / (1 + c) of one rounding of all.
- Output o: those of all keys, root of the sum of squares; the sum over keys of w v, and the sum of the weights that it
  is divided by; the rounding of the result. Errors of logits move it by no more than what v ranges over.

What it does not cover: products of inputs that were cut to fewer digits than their dtype has (TF32), and sums of very
many terms that are one and the same number, whose roundings are all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare import compute
from sqrtdk.compare.precision import Precision, Precisions, least, sigmas, stored, sum_variance, unit
from sqrtdk.compare.program import Formula
from sqrtdk.compare.rounding_steps import Off

EXPONENTIAL = 8.0  # roundings that an exponential of a vector library is off by, root of the mean square
SOFTMAX_STEPS = 2.0  # of a weight beside its own: the division or its reciprocal, the rescaling by a later maximum


def output_allowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    sides: Precisions,
    offs: Sequence[Off] = (),
    entries: int | None = None,
) -> Tensor:
    """Of the output, (B, Hq, L, Ev), in chunks of rows.

    Args:
        query: (B, Hq, L, E), as both sides have it.
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        formula: of both.
        sides: in which both compute; float64 allows next to nothing.
        offs: errors of q, k and v as they come in, of both sides; none: both have them as they are given.
        entries: of the output that are looked at; None: those of these rows.
    """
    heads = query.shape[1]
    offs = [off.spread(heads, None) for off in offs]
    key, value = compute.spread(key, heads).double(), compute.spread(value, heads).double()
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
    offs: Sequence[Off],
) -> Tensor:
    there = _Logits.of(query, key, formula)
    weights, _ = compute.weigh(query, key, formula, there.entering)
    whole = weights
    if formula.kept is not None:
        whole, _ = compute.weigh(query, key, replace(formula, kept=None), there.entering)
    output, reach, squared = weights @ value, _reach(value, formula), value.square()
    terms, repeated = weights.square() @ squared, (weights.square() * times) @ squared
    mean_square = weights @ squared if formula.kept is None else whole @ squared + reach**2
    spread, apart = (mean_square - output.square()).clamp(min=0.0), there.spread(whole)
    keys = (whole != 0).sum(-1, keepdim=True).double()  # additions of 0 don't round
    divided = output.square() * (keys * (1 / 3 + whole.square().sum(-1, keepdim=True) / 2) + SOFTMAX_STEPS)
    summed = sum_variance(output, terms, keys) + divided
    allowed = torch.zeros_like(output)
    if offs:
        carried = there.carried(query.double(), key, offs[0], offs[1], whole, most)
        allowed += torch.minimum(most * (spread * carried).sqrt(), reach)
        of_value = offs[2].each.square() + offs[2].row.square() * squared
        allowed += most * ((weights.square() * _repeats(value)) @ of_value).sqrt()  # equal values are off alike
    coarse = [p for p in sides if p.dtype != torch.float64] or list(sides)  # float64 is 1e-8 of any other
    for p in dict.fromkeys(coarse):
        relative = there.relative(p, most).square()
        moved = _moved(weights, whole, relative * times, value, output) + spread * there.cells(p, whole, apart)
        w = stored(p, p.weights_dtype or p.dtype, formula.weights_dtype)
        last = repeated * unit(w) ** 2 + (weights > 0).double() @ squared * least(w) ** 2
        last = last + mean_square * (unit(w) / (1.0 + apart / (2 * unit(w)))) ** 2
        others = (last + unit(p.accumulator) ** 2 * summed) / 3
        smaller = (most * (whole.square() * relative).sum(-1, keepdim=True).sqrt()).clamp(max=0.5)
        side = torch.minimum(most * (moved + others).sqrt() / (1.0 - smaller), reach + most * others.sqrt())
        count = coarse.count(p) + 1e-8 * (2 - len(coarse))
        allowed += count * (side + unit(p.dtype) * output.abs() + least(p.dtype))
    return allowed


def _moved(weights: Tensor, whole: Tensor, relative: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """Variance of the output by that of the logits: of w (v - o); where some were dropped, of w v and of w o apart."""
    upper = weights.square() * relative
    lower = (whole.square() * relative).sum(-1, keepdim=True) * output.square()
    if whole is not weights:
        return upper @ value.square() + lower
    return (upper @ value.square() - 2 * output * (upper @ value) + lower).clamp(min=0.0)


def _reach(value: Tensor, formula: Formula) -> Tensor:
    """What outputs can be apart at most, (B, Hq, 1, Ev): that of values; of values and 0 where weights don't add up."""
    if value.shape[-2] == 0:
        return value.new_zeros((*value.shape[:2], 1, value.shape[-1]))
    most, least_one = value.amax(-2, keepdim=True), value.amin(-2, keepdim=True)
    if formula.sinks is None and formula.kept is None:
        return most - least_one
    reach = most.clamp(min=0.0) - least_one.clamp(max=0.0)
    return reach / max(1e-9, 1.0 - formula.dropout) if formula.kept is not None else reach


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """What the errors of logits are made of, each (B, Hq, l, S).

    Attributes:
        z: logits; 0 where a key is hidden by what stands in place of its logit.
        below: z less the largest of the row.
        sums: variance of the sum over E, in u^2 / 3 of the accumulator.
        sizes: the largest number that was rounded on the way, but for a fill.
        added: where the fill was added; None where it was not.
        formula: of both sides.
        entering: the softmax, the logits with what hides keys.
        product: q . k, 0 as z is.
        slope: of the logits against it.
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
        bare, slope = compute.curve(product, formula)
        entering = z = compute.logits(query, key, formula, product)
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
        """Standard deviation of a weight's relative error but for its own rounding, curved as the exponential is."""
        accumulator, own = unit(p.accumulator) ** 2, self._own(p)
        variance = accumulator * self.sums
        variance = variance + p.logit_steps * (unit(own) ** 2 * self.sizes.square() + least(own) ** 2)
        if self.added is not None:  # of a logit that a fill was added to, what of its error can show in the sum
            name, deviation = str(own).removeprefix("torch."), (variance / 3).sqrt()
            above, under = (compute.rounded(self.z + way * most * deviation, name) for way in (1.0, -1.0))
            shown = (above - under).nan_to_num(nan=0.0) / most
            variance = torch.where(self.added, 3 * shown.square(), variance)
        exponential = accumulator * (2 * self.below.square() + EXPONENTIAL**2)
        deviation = ((variance + exponential.nan_to_num(posinf=0.0)) / 3).sqrt()
        return torch.expm1((most * deviation).clamp(max=30.0)) / most

    def spread(self, weights: Tensor) -> Tensor:
        """Standard deviation of the logits of a row, (B, Hq, l, 1), by their weights."""
        z = self.z.nan_to_num(neginf=0.0, posinf=0.0)
        mean = (weights * z).sum(-1, keepdim=True)
        return (weights * (z - mean).square()).sum(-1, keepdim=True).sqrt()

    def cells(self, p: Precision, weights: Tensor, apart: Tensor) -> Tensor:
        """Variance of logits, (B, Hq, l, 1), as far as they are too near to one another to be rounded by chance."""
        u = unit(self._own(p))
        sizes = (weights * self.sizes.square()).sum(-1, keepdim=True)
        return p.logit_steps * u * u * sizes / 3 / (1.0 + apart / (2 * u * sizes.sqrt()).clamp(min=1e-300)).square()

    def carried(self, query: Tensor, key: Tensor, own: Off, other: Off, weights: Tensor, most: float) -> Tensor:
        """Variance of the logits of a row by errors of q and k, (B, Hq, l, 1), curved as the exponential is."""
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
        return stored(p, p.logits_dtype or p.accumulator, self.formula.logits_dtype)


def _repeats(key: Tensor) -> Tensor:
    """How often each key occurs among those of its head, (B, H, 1, S): the errors of equal keys are equal."""
    marks = (key.double() * torch.linspace(1.0, 2.0, key.shape[-1], dtype=torch.float64).cos()).sum(-1)
    times = torch.ones_like(marks)
    for batch, head in itertools.product(range(key.shape[0]), range(key.shape[1])):
        _, which, counts = torch.unique(marks[batch, head], return_inverse=True, return_counts=True)
        times[batch, head] = counts[which].double()
    return times[:, :, None]
