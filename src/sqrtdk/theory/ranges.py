"""What a floating dtype can hold: largest finite number, spacing of neighbours, margin before overflow."""

from __future__ import annotations

import math

import torch

from sqrtdk.errors import InvalidTypeError

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _info(dtype: torch.dtype | str) -> torch.finfo:
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or not found.is_floating_point:
        raise InvalidTypeError(
            f"dtype is a floating dtype or one of {', '.join(DTYPES)}; got {dtype}", hint="Pass e.g. torch.bfloat16."
        )
    return torch.finfo(found)


def largest_finite(dtype: torch.dtype | str) -> float:
    """Largest finite number of a floating dtype.

    Example:
        >>> largest_finite("float16")
        65504.0
    """
    return float(_info(dtype).max)


def overflow_margin(max_product: float, dtype: torch.dtype | str) -> float:
    """Largest finite number over |max_product|: below 1 the product overflows; infinity for 0.

    Args:
        max_product: largest |q . k| in the place where the dtype stores it.
        dtype: the dtype that stores it.

    Example:
        >>> overflow_margin(131008.0, torch.float16)
        0.5
    """
    if math.isinf(max_product):
        return 0.0
    return largest_finite(dtype) / abs(max_product) if max_product != 0.0 else math.inf


def spacing(value: float, dtype: torch.dtype | str) -> float:
    """Distance from |value| to the next larger number of the dtype; a stored logit errs by up to half of it.

    At an offset of 50 bfloat16 steps by 0.25, so that weights err by up to 13%.

    Args:
        value: a magnitude within the dtype's range; beyond the largest finite number the result is infinity.
        dtype: a floating dtype.

    Example:
        >>> spacing(50.0, "bfloat16"), spacing(1.0, "float32") == 2.0**-23
        (0.25, True)
    """
    info = _info(dtype)
    magnitude = abs(value)
    if math.isnan(magnitude):
        return math.nan
    if magnitude > info.max:
        return math.inf
    exponent = math.frexp(max(magnitude, info.tiny))[1] - 1
    return float(info.eps) * 2.0**exponent
