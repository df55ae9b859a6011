"""How exactly a side computes: dtypes, units of rounding, and the standard deviations that many entries allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.inside.compute import dtype_by_name
from sqrtdk.tracing.tensors import CallTensors

RISK = 1e-6  # probability that two correct results are reported as different
# dtypes coarser than float32 in which codes compute, coarsest first: float16 holds most numbers of bfloat16 as well
COARSER_DTYPES = (torch.bfloat16, torch.float16)
# relative to a row's largest number: two float32 roundings, of a weight that was folded or rescaled
WEIGHT_TOLERANCE = 2.0**-21
LEAST_STORED = 16  # numbers: fewer may match a low-precision grid by chance
NUMBERS_READ = 1024  # numbers that suffice to see whether an output has more than a few values


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes in which a side computes.

    Attributes:
        dtype: dtype of q, k, v and the output.
        logits_dtype: dtype in which logits are stored; in a fused kernel, that of the accumulator. None: accumulator.
        weights_dtype: dtype of the weights when they multiply v. None: `dtype`.
        logit_steps: number of elementwise operations that rounded the logits to `logits_dtype`, the product included.
    """

    dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    logit_steps: int = 2

    @property
    def accumulator(self) -> torch.dtype:
        """Return the dtype in which sums are accumulated: float64 if `dtype` is float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


Precisions = tuple[Precision, Precision]


def rounding_unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff u = eps / 2, the largest relative error of one rounding to nearest.

    Example:
        >>> rounding_unit(torch.float16) == 2**-11
        True
    """
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """Return the largest absolute error of rounding a subnormal number to this dtype: tiny * eps / 2."""
    finfo = torch.finfo(dtype)
    return finfo.tiny * finfo.eps / 2


def rounded_to(a: Tensor, b: Tensor) -> torch.dtype | None:
    """Return the dtype to which a was rounded to give b, in every entry.

    It is torch.bfloat16 or torch.float16; None if b equals a, or if neither dtype gives all of b.

    Example:
        >>> third = torch.tensor([[1 / 3]])
        >>> rounded_to(third, third.half().float()), rounded_to(third, third)
        (torch.float16, None)
    """
    if torch.equal(a, b):
        return None
    return next((dtype for dtype in COARSER_DTYPES if torch.equal(a.to(dtype).to(b.dtype), b)), None)


def stored_in(values: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return a dtype coarser than `dtype` that holds every one of the values exactly; None if there is none.

    A cache in float16 is read back as float32: `k.half().float()`. It is also None for fewer than 16 nonzero values,
    which may fit by chance, and if a value is not finite.

    Example:
        >>> x = torch.randn(64)
        >>> stored_in(x.half().float(), torch.float32), stored_in(x, torch.float32)
        (torch.float16, None)
    """
    if int(values.count_nonzero()) < LEAST_STORED or not bool(values.isfinite().all()):
        return None
    coarser = (lesser for lesser in COARSER_DTYPES if rounding_unit(lesser) > rounding_unit(dtype))
    return next((lesser for lesser in coarser if torch.equal(values.to(lesser).to(values.dtype), values)), None)


def dtype_of_values(call: CallTensors) -> str:
    """Return the name of the dtype in which a call computed, such as "float16".

    It is the dtype that the call names, unless q, k, v and the output all hold only numbers of one coarser dtype: a
    file may say float32 of an engine that computed in float16. Constant outputs and incomplete calls keep the dtype
    that they name.
    """
    named = dtype_by_name(call.dtype)
    tensors = (call.output, call.query.values, call.key.values, call.value.values)
    if call.missing is not None or len(set(call.output.flatten()[:NUMBERS_READ].tolist())) < LEAST_STORED:
        return call.dtype
    stored = {None if x.dtype != named else stored_in(x, named) for x in tensors}
    lesser = next(iter(stored))
    return call.dtype if lesser is None or len(stored) > 1 else str(lesser).removeprefix("torch.")


def dtype_allowed(p: Precision, recorded: torch.dtype, formula: str | None) -> torch.dtype:
    """Return the dtype whose rounding is allowed for logits or weights.

    This is the recorded dtype, unless that is coarser than the side's own. Rounding to a coarser dtype is a step of
    the formula, so it is allowed for only if the formula has that step.

    Args:
        p: precision of the side.
        recorded: recorded dtype of its logits or weights.
        formula: dtype to which the formula rounds them; None if it does not.

    Example:
        >>> dtype_allowed(Precision(), torch.float16, None), dtype_allowed(Precision(), torch.float16, "float16")
        (torch.float32, torch.float16)
    """
    most = p.dtype if formula is None else max(p.dtype, dtype_by_name(formula), key=rounding_unit)
    return min(recorded, most, key=rounding_unit)


def sigmas(entries: int) -> float:
    """Return how many standard deviations no entry exceeds, except with probability `RISK` (1e-6).

    The bound is sqrt(2 ln(2 n / RISK)) for n = `entries` sub-Gaussian errors.

    Example:
        >>> round(sigmas(1), 2), round(sigmas(10**6), 2)
        (5.39, 7.53)
    """
    # Union bound over sub-Gaussian entries: entries * 2 * exp(-s^2 / 2) = RISK, solved for s.
    return math.sqrt(2.0 * math.log(2.0 * max(1, entries) / RISK))


def sum_variance(total: Tensor, squares: Tensor, count: Tensor | int) -> Tensor:
    """Return the variance of the rounding error of a sum, in units of u^2 / 3 (u of `rounding_unit`).

    It is n (total^2 / 3 + squares / 2) + squares.

    Args:
        total: the sum.
        squares: sum of the squared terms, in the shape of `total`.
        count: number n of terms.
    """
    return count * (total.square() / 3 + squares / 2) + squares


def same_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return which rows of two matrices are equal up to rounding.

    Two rows are equal if they differ by at most 2^-21 of their largest entry, or if one is the other rounded to
    bfloat16 or float16.

    Args:
        a: (rows, D), float64.
        b: (rows, D), float64.

    Returns:
        Booleans (rows,).

    Example:
        >>> third = torch.tensor([[1 / 3]], dtype=torch.float64)
        >>> same_rows(third, third.bfloat16().double()).item(), same_rows(third, third + 1e-3).item()
        (True, False)
    """
    if torch.equal(a, b):
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    equal = (a - b).abs() <= WEIGHT_TOLERANCE * torch.maximum(
        a.abs().amax(-1, keepdim=True), b.abs().amax(-1, keepdim=True)
    )
    alike = equal.all(-1)
    # Either side may be the rounded one; only rows that don't match yet are cast.
    for dtype in COARSER_DTYPES:
        for one, other in ((a, b), (b, a)):
            if bool(alike.all()):
                return alike
            rounded = one[~alike].to(dtype).double() == other[~alike]
            alike = alike.masked_scatter(~alike, rounded.all(-1))
    return alike
