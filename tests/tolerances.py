"""How far a result may be from a float64 oracle: derived from dtype, length and the sizes of the numbers, never tuned.

float64 and float32: rounding a logit of size z moves it by about eps z, which moves every weight by that factor, and
a sum of n terms adds sqrt(n) roundings. So a result of size m may be off by `SLACK eps (1 + z) sqrt(n) m`.

The gradient of what many rows share (a gain, a bias of all batches, a sink, a projection) is the sum of what each of u
rows gives. Each of these terms is off by what a row's result may be, the roundings of different rows have nothing to do
with one another, and adding them up rounds u times more: n u roundings in place of n, so `sqrt(n u)`. Which of them
meet depends on the order in which a CPU sums; their number does not. The sum may cancel and its roundings do not, so m
is the size of its terms: that of the largest gradient of the call, since all are made of the same cotangents.

That is still narrow: a factor of 1.001 on a gradient that is as large as its terms is found while
`SLACK eps (1 + z) sqrt(n u) < 0.001`, for z of 100 up to n u of 10^20 in float64 and up to 400 in float32, so that
long sums are proven in float64. `gradient_complaints` refuses to judge what it could not find that factor in.

float16 and bfloat16: the plain formula, each of its operations rounded to the same dtype, is run beside; the largest
error is at most twice the plain formula's and the mean error at most 1.1 times. A correctly rounded oracle passes, and
of a sum's largest error one unit in the last place of its largest term is chance (more where there are few numbers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SLACK = 4.0
HALF = (torch.float16, torch.bfloat16)
LARGEST, MEAN = 2.0, 1.1
SIGMAS = 3.0  # of the ratio of two mean errors, each the mean of random roundings
ENOUGH = 256  # numbers, below which the plain formula's errors are chance
FOUND = 1e-3  # a gradient that is off by this factor is never admissible


def allowed(dtype: torch.dtype, *, length: int, logit: float, magnitude: float, uses: int = 1) -> float:
    """Largest admissible absolute error of a float32 or float64 result.

    Args:
        dtype: that the result was computed in.
        length: terms of the longest sum of one row.
        logit: largest size of a logit, or of a term of it.
        magnitude: size of the result, or of the terms that it is a sum of.
        uses: rows whose terms the result adds up, of all batches and heads, where it is a gradient of what they share.
    """
    return SLACK * torch.finfo(dtype).eps * (1.0 + logit) * math.sqrt(max(1, length) * max(1, uses)) * magnitude


def complaint(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    length: int,
    logit: float,
    magnitude: float = 0.0,
    uses: int = 1,
    each: bool = False,
) -> str | None:
    """What is wrong with a float32 or float64 result, or None; NaN and infinities must be in the same places.

    The size is that of the largest number of the result, or `magnitude` where that is more; with `each`, every number
    is judged by its own size, for results that are small and right where their neighbours are large.
    """
    shape = _same_places(actual, expected)
    if shape is not None:
        return shape
    actual, expected = _finite(actual.detach().double(), expected.detach().double())
    if expected.numel() == 0:
        return None
    sizes = expected.abs() if each else expected.abs().amax()
    limits = allowed(dtype, length=length, logit=logit, magnitude=1.0, uses=uses) * sizes.clamp(min=magnitude)
    error = (actual - expected).abs()
    at = (error - limits).argmax()
    worst, limit, size = (x.expand(error.shape)[at].item() for x in (error, limits, sizes))
    return None if worst <= limit else f"off by {worst:.3g}, {limit:.3g} is allowed ({dtype}, size {size:.3g})"


def gradient_complaints(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    *,
    length: int,
    logit: float,
    rows: int,
) -> list[str]:
    """What is wrong with the float32 or float64 gradients of all leaves of a call, each with the leaf's name.

    Args:
        actual: by leaf; None for a leaf that the call does not use.
        expected: the same, of the oracle.
        dtype: that the call was computed in.
        length: terms of the longest sum of one row.
        logit: largest size of a logit, or of a term of it.
        rows: of all batches and heads: a leaf that every row shares adds up as many terms.
    """
    sharpness = allowed(dtype, length=length, logit=logit, magnitude=1.0, uses=rows)
    assert sharpness < FOUND, f"a factor of {1 + sharpness:.6f} on a gradient would pass: judge it in float64"
    assert actual.keys() == expected.keys()
    magnitude = max((g.abs().max().item() for g in expected.values() if g is not None and g.numel()), default=0.0)
    wrong = []
    for name, its in expected.items():
        mine = actual[name]
        if mine is None or its is None:
            found = None if mine is its else "one of the two has no gradient"
        else:
            found = complaint(mine, its, dtype, length=length, logit=logit, magnitude=magnitude, uses=rows)
        wrong += [] if found is None else [f"gradient of {name}: {found}"]
    return wrong


def half_complaint(
    actual: Tensor, expected: Tensor, plain: Sequence[Tensor], dtype: torch.dtype, floor: float = 0.0
) -> str | None:
    """What is wrong with a float16 or bfloat16 result, or None.

    Args:
        actual: the result.
        expected: the oracle's.
        plain: the plain formula's, computed in `dtype`, in one or several ways of writing it.
        dtype: float16 or bfloat16.
        floor: size of the terms that the result is a sum of, where that is more than the result's own.
    """
    shape = _same_places(actual, expected)
    if shape is not None:
        return shape
    error = _error(actual, expected)
    if error.numel() == 0:
        return None
    beside = [_error(result, expected) for result in (expected.to(actual.dtype), *plain)]
    if not all(bool(e.isfinite().all()) for e in beside):
        return None  # the plain formula overflowed: any finite result is better
    numbers = max(1, int((expected[torch.isfinite(expected)] != 0).sum()))
    chance = torch.finfo(dtype).eps * floor * math.sqrt(max(1.0, ENOUGH / numbers))
    limit = max(LARGEST * max(e.max().item() for e in beside), chance)
    if error.max().item() > limit:
        return f"off by {error.max().item():.3g}, {limit:.3g} is allowed ({dtype}, twice the plain formula)"
    if numbers < ENOUGH:
        return None
    noise = 1.0 + SIGMAS / math.sqrt(numbers)
    limit = noise * MEAN * max(e.mean().item() for e in beside) + SLACK * torch.finfo(torch.float32).eps * floor
    if error.mean().item() > limit:
        return f"off by {error.mean().item():.3g} in the mean, {limit:.3g} is allowed ({dtype}, 1.1 plain formulas)"
    return None


def _error(actual: Tensor, expected: Tensor) -> Tensor:
    actual, expected = _finite(actual.double(), expected)
    return (actual - expected).abs()


def _same_places(actual: Tensor, expected: Tensor) -> str | None:
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, {tuple(expected.shape)} is expected"
    for name, there in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(there(actual), there(expected)):
            return f"{name} in {int(there(actual).sum())} places, {int(there(expected).sum())} expected"
    return None


def _finite(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    keep = torch.isfinite(expected)
    return actual[keep], expected[keep]
