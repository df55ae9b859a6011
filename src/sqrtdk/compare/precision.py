"""How exactly a side computes: dtypes, units of rounding, and the standard deviations that many entries allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.compute import dtype_by_name

RISK = 1e-6  # probability that two correct results are reported as different


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
        """The dtype in which sums are accumulated: 16-bit products are summed in float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


Precisions = tuple[Precision, Precision]


def rounding_unit(dtype: torch.dtype) -> float:
    """Returns u, the largest relative error of one rounding to nearest.

    Example:
        >>> rounding_unit(torch.float16) == 2**-11
        True
    """
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """Returns the largest absolute error of rounding a subnormal number."""
    finfo = torch.finfo(dtype)
    return finfo.tiny * finfo.eps / 2


def dtype_allowed(p: Precision, recorded: torch.dtype, formula: str | None) -> torch.dtype:
    """Returns the dtype whose rounding is allowed for logits or weights.

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
    """Returns how many standard deviations no entry exceeds, except with probability RISK.

    Example:
        >>> round(sigmas(1), 2), round(sigmas(10**6), 2)
        (5.39, 7.53)
    """
    # Union bound over sub-Gaussian entries: entries * 2 * exp(-s^2 / 2) = RISK, solved for s.
    return math.sqrt(2.0 * math.log(2.0 * max(1, entries) / RISK))


def sum_variance(total: Tensor, squares: Tensor, count: Tensor | int) -> Tensor:
    """Returns a sum's variance in u^2 / 3 from its total, the sum of its squared terms and their count (`rounding`)."""
    return count * (total.square() / 3 + squares / 2) + squares
