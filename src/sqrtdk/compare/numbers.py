"""Numbers in formulas, as scalars or tensors: comparison with tolerance, arithmetic in float64, and formatting."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import Formula
from sqrtdk.messages import Message

Value = Tensor | float
# 8 eps of float32, relative: the error of constants in float32 and of products of a few of them
CONSTANT_TOLERANCE = 2.0**-20


def constant_tolerance(*dtypes: torch.dtype) -> float:
    """Return the relative error allowed in constants that are stored in these dtypes.

    It is the largest of `CONSTANT_TOLERANCE` (2^-20) and the eps of each dtype.

    Example:
        >>> constant_tolerance(torch.float32) == CONSTANT_TOLERANCE, constant_tolerance(torch.float32, torch.bfloat16)
        (True, 0.0078125)
    """
    return max(CONSTANT_TOLERANCE, *(torch.finfo(dtype).eps for dtype in dtypes))


def same(a: Value | None, b: Value | None, off: float = CONSTANT_TOLERANCE) -> bool:
    """Return whether two numbers, or two tensors that broadcast, are equal within the error of their storage.

    Tensors are equal if the largest difference is at most `off` times the largest absolute entry of both; a tensor
    without entries equals everything. None equals only None.

    Args:
        a: a number, a tensor or None.
        b: a number, a tensor or None.
        off: allowed relative error.

    Example:
        >>> same(0.1, torch.tensor([[0.1]])), same(0.1, 0.1001), same(None, 0.0)
        (True, False, False)
    """
    if a is None or b is None:
        return a is b
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a == b or math.isclose(a, b, rel_tol=off)
    x, y = _tensor(a), _tensor(b)
    if not x.numel() or not y.numel():
        return True
    largest = max(float(x.abs().max()), float(y.abs().max()))
    gap = torch.where(x == y, 0.0, x - y).abs().max()  # infinities that are equal have no gap
    return bool(gap <= off * largest)


def single_ratio(a: Value, b: Value) -> float | None:
    """Return the single number b / a that turns a into b, by least squares; None if no single number does.

    It is also None if a tensor is empty, an entry is not finite, or a or b is 0 throughout. a and b must broadcast.

    Example:
        >>> single_ratio(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0])), single_ratio(0.0, 1.0)
        (0.5, None)
    """
    x, y = torch.broadcast_tensors(_tensor(a), _tensor(b))  # type: ignore[no-untyped-call]
    if not x.numel() or not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return None
    # Least squares over all entries, not the first quotient: one entry may be 0 or badly rounded.
    power = float((x * x).sum())
    if power == 0.0:
        return None
    factor = float((x * y).sum()) / power
    return factor if factor != 0.0 and same(x * factor, y) else None


def single_number(value: Value) -> float | None:
    """Return the number of a scalar or of a tensor whose entries are all the `same`; None for other tensors."""
    if not isinstance(value, Tensor):
        return float(value)
    if not value.numel():
        return None
    first = float(value.flatten()[0])
    return first if same(value, first) else None


def times(a: Value, b: Value) -> Value:
    """Return a * b: a float64 tensor if either is a tensor, by broadcasting; else a float."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return _tensor(a) * _tensor(b)
    return a * b


def quotient(a: Value, b: Value) -> Value:
    """Return a / b, and 0 where b is 0: a float64 tensor if either is a tensor, by broadcasting; else a float."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a / b if b else 0.0
    divisor = _tensor(b)
    return torch.where(divisor == 0, 0.0, _tensor(a) / divisor)


def total(formula: Formula) -> Value:
    """Return scale * after: the product of all factors on q . k, before and after the softcap."""
    return times(formula.scale, formula.after)


def rescaled(formula: Formula, other: Formula) -> Formula:
    """Return the formula with the other's total factor (`total`).

    If both apply the softcap at the same place, both factors are the other's. Otherwise the factor before this
    formula's softcap stays, and only the one after it changes (or the reverse if its softcap does not follow the
    product).
    """
    if formula.softcap_at == other.softcap_at:
        return replace(formula, scale=other.scale, after=other.after)
    if formula.softcap_at == "product":
        return replace(formula, after=quotient(total(other), formula.scale))
    return replace(formula, scale=quotient(total(other), formula.after))


def softcap_placed(formula: Formula, other: Formula) -> Formula:
    """Return the formula with the softcap at the other's place; the product of all factors (`total`) stays.

    One of `scale` and `after` is taken from the other formula, and the second one is adjusted to the product.
    """
    before = other.scale if other.softcap_at == "product" else quotient(total(formula), other.after)
    after = quotient(total(formula), other.scale) if other.softcap_at == "product" else other.after
    return replace(formula, softcap_at=other.softcap_at, scale=before, after=after)


def entry_differences(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b entry by entry: 0 where both are NaN or the same infinity, infinite where only one is.

    Example:
        >>> inf, nan = math.inf, math.nan
        >>> entry_differences(torch.tensor([3.0, inf, nan, nan]), torch.tensor([1.0, inf, nan, 0.0])).tolist()
        [2.0, 0.0, 0.0, inf]
    """
    plain = a - b
    if math.isfinite(float(plain.sum())):  # all finite: the common case takes one pass
        return plain
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, plain.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf))


def four_digits(value: float) -> float:
    """Return the number rounded to four significant digits.

    Example:
        >>> four_digits(10000.04), four_digits(0.0883883)
        (10000.0, 0.08839)
    """
    return float(f"{value:.4g}")


def range_text(values: Tensor) -> str:
    """Return the least and largest entry as text, with four significant digits; one number if these are equal.

    Example:
        >>> range_text(torch.tensor([1.0, 2.0]))
        '1 to 2'
    """
    least, most = four_digits(float(values.min())), four_digits(float(values.max()))
    return f"{least:g}" if least == most else span(f"{least:g}", f"{most:g}")


def span(least: str | int, most: str | int) -> Message:
    """Return the two ends of a range as a message of the catalogue: "1 to 2"."""
    return Message("causes.value.range", least=least, most=most)


def unequal_texts(a: float, b: float, digits: int = 4) -> tuple[str, str]:
    """Return two unequal numbers as text, with just enough significant digits to differ.

    Args:
        a: a number.
        b: a number.
        digits: least number of significant digits; also used if the numbers are equal to 16 digits.

    Example:
        >>> unequal_texts(10000.0, 500000.0), unequal_texts(10000.0, 10000.6), unequal_texts(0.5, 0.5)
        (('1e+04', '5e+05'), ('10000', '10001'), ('0.5', '0.5'))
    """
    for count in range(digits, 17):
        words = f"{a:.{count}g}", f"{b:.{count}g}"
        if words[0] != words[1]:
            return words
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


def few_digits(a: float, b: float) -> tuple[float, float]:
    """Return two numbers rounded to as few significant digits (at least four) as still tell them apart."""
    old, new = unequal_texts(a, b)
    return float(old), float(new)


def _tensor(value: Value) -> Tensor:
    return value.double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
