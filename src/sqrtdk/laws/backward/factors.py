"""Names a factor on a gradient: the scale that is missing or applied again, a group's mean, the base of the powers.

The scale of a call may stand on the logits, `q @ k.mT * s`, or on an operand, `(q * s) @ k.mT`. A backward pass that
knows nothing of the second gives `dk = dz.mT @ q` with the q before the factor, which is 1 / s times too large; or it
multiplies dz by a scale that q already has. So the names try the scale of the logits, that of the whole call, and the
factors on q and k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sqrtdk.tracing.tensors import CallTensors

_SAME_FACTOR = 2e-3  # by which a factor may differ from the number that names it, relative


def call_scales(call: CallTensors) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the factors of an attention that a backward pass may forget or repeat, each once, without 1.

    Returns:
        The scale on the logits and the whole scale of the call; and the single factors of which these are products.
    """
    parts = [_number(term.value) for term in call.terms or () if term.name == "scale"]
    of_logits, vectors = math.prod(parts), [_number(vector.factor) for vector in (call.query, call.key)]
    scales = _each_once((of_logits, of_logits * math.prod(vectors)), ())
    return scales, _each_once((*parts, *vectors), scales)


def _each_once(numbers: Sequence[float], known: Sequence[float]) -> tuple[float, ...]:
    found: list[float] = []
    for number in numbers:
        usable = math.isfinite(number) and number > 0
        if usable and all(abs(number / other - 1) > _SAME_FACTOR for other in (1.0, *known, *found)):
            found.append(number)
    return tuple(found)


def factor_name(
    factor: float, scales: Sequence[float] = (), parts: Sequence[float] = (), group: int = 1, rate: float = 0.0
) -> tuple[str, float]:
    """Return the code of a factor on a gradient, and the factor without rounding if the code tells it.

    Args:
        factor: The gradient divided by the formula's.
        scales: Scales of the forward pass, as `call_scales` gives them.
        parts: Factors of which they are products.
        group: Number of query heads that share a head of k and v.
        rate: Dropout rate.

    Example:
        >>> factor_name(8.001, [0.125]), factor_name(0.125**2, [0.125]), factor_name(-1.0), factor_name(3.3, [0.125])
        (('scale_missing', 8.0), ('scale_again', 0.015625), ('sign', -1.0), ('factor', 3.3))
    """
    if abs(factor) < 1e-12:
        return "none", factor
    known: list[tuple[str, float]] = []
    for kind, numbers in (("scale", scales), ("part", parts)):
        for number in numbers:
            known += [(f"{kind}_missing", 1 / number), (f"{kind}_twice", number)]
    known += [("scale_again", scale**2) for scale in scales]
    known += [("sign", -1.0), ("log2_twice", 1 / math.log(2)), ("log2", math.log(2))]
    if group > 1:
        known += [("mean", 1 / group), ("group_twice", float(group))]
    if rate:
        known += [("rate_missing", 1 - rate), ("rate_twice", 1 / (1 - rate))]
    return next(((code, value) for code, value in known if abs(factor / value - 1) < _SAME_FACTOR), ("factor", factor))


def _number(value: Tensor | float | None) -> float:
    """Return a factor that is one number; NaN if it is not."""
    if isinstance(value, Tensor):
        numbers = value.detach().flatten().double()
        return float(numbers[0]) if numbers.numel() and bool((numbers == numbers[0]).all()) else math.nan
    return math.nan if value is None else float(value)
