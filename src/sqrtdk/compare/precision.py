"""How exactly a side computes, in numbers: dtypes, units of rounding, and what chance allows among many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.compare.compute import dtype_of

RISK = 1e-6  # that two correct results are found to be different


@dataclass(frozen=True, slots=True)
class Precision:
    """How a side computes.

    Attributes:
        dtype: of q, k, v and the output.
        logits_dtype: in which logits are stored; of a fused kernel the accumulator's. None: that of the accumulator.
        weights_dtype: of the weights as they meet v. None: the dtype.
        logit_steps: elementwise operations on the logits that rounded to it, the product's own among them.
    """

    dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    logit_steps: int = 2

    @property
    def accumulator(self) -> torch.dtype:
        """In which sums are made."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


Precisions = tuple[Precision, Precision]  # of A and of B


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


def stored(p: Precision, recorded: torch.dtype, formula: str | None) -> torch.dtype:
    """In which dtype logits or weights are for the rounding that is allowed.

    That is what was recorded of the side, but where it is less than the side's own dtype: such a rounding is a step of
    the formula, and is allowed for where the formula has it.

    Args:
        p: of the side.
        recorded: of its logits or weights.
        formula: to what the formula rounds them; None to nothing.

    Example:
        >>> stored(Precision(), torch.float16, None), stored(Precision(), torch.float16, "float16")
        (torch.float32, torch.float16)
    """
    most = p.dtype if formula is None else max(p.dtype, dtype_of(formula), key=unit)
    return min(recorded, most, key=unit)


def sigmas(entries: int) -> float:
    """Standard deviations that none of so many entries exceeds but with probability RISK.

    Example:
        >>> round(sigmas(1), 2), round(sigmas(10**6), 2)
        (5.39, 7.53)
    """
    return math.sqrt(2.0 * math.log(2.0 * max(1, entries) / RISK))


def sum_variance(total: Tensor, squares: Tensor, count: Tensor | int) -> Tensor:
    """Of a sum of products, in u^2 / 3: of its total, of the sum of its squared terms, and of how many there are."""
    return count * (total.square() / 3 + squares / 2) + squares
