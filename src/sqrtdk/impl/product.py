"""A call whose score is a distance, brought to dot products, which every kernel computes, where they are exact enough.

The E + 2 terms of the product add up to M = (|q| + |k|)^2 in magnitude at most, with q and k seen from the keys' mean.
Each sum of them rounds by u M at most (u = 2^-24 in float32, 2^-53 in float64), and taking the mean off by 2 u M in
all. Independent roundings add up to sqrt(E + 2 + 2^2) u M. Times the scale, that is the error of a logit, and so the
relative error of a weight. It may be 2^13 u, which is 2^-11 in float32. Beyond that, float32 is computed in float64
where the error is 2^-24 or less, and all else pair by pair.

With one mean and one scale for a head, a distance of the head is sqrt(M) / 3 or more: that error is at most
9 sqrt(E + 6) roundings of its largest logit. What the product loses is digits of small distances beside large ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from sqrtdk._modes import as_one
from sqrtdk.impl.call import Call, has_values, repeat_key_heads
from sqrtdk.impl.fused import fused
from sqrtdk.impl.operands import by_distance
from sqrtdk.scores._distance import Distance
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Factor

LARGEST_LOGIT_ERROR = 2.0**13  # of a logit, in units of u
LARGEST_WIDENED = 2.0**29  # the same, of float32 that float64 brings to an error of 2^-24
LOADED_AT_ONCE = 4  # numbers of float32 that torch's kernels load at once


def as_product(call: Call) -> Call:
    """Return a call of a distance score as one of dot products, where that is exact enough; any other call as it is.

    The product is computed in float32 or float64. A call for which float32 was not exact enough has the reason as
    `exact`.
    """
    score = call.score
    if type(score) is not Distance:  # a subclass may have other pairs
        return call
    reason = _never_product(call)
    if reason is not None:
        return replace(call, exact=reason)
    query, key = score.product(call.query, call.key)
    error = _error(call.scale, query.detach(), key.detach(), call.heads)
    dtype, reason = call.dtype, None
    if not error <= LARGEST_LOGIT_ERROR:
        dtype, reason = torch.float64, _inexact(error, call.dtype)
        if call.dtype == dtype or not error <= LARGEST_WIDENED or call.query.device.type == "mps":
            return replace(call, exact=reason)
        query, key = score.product(call.query.to(dtype), call.key.to(dtype))
    return replace(call, query=query, key=key, value=call.value.to(dtype), score=None, exact=reason)


def computed(call: Call, product: Call, run: Callable[[Call], Any], exact: Callable[[Call], Any]) -> tuple[Any, ...]:
    """Return the results of a call that may run as dot products, in the dtypes of the call.

    torch's modes that are open, such as a trace, see one attention with the call's own score.

    Args:
        call: The call as it was given.
        product: Result of `as_product(call)`.
        run: Computes the product; returns its output, other tensors such as the weights, and statistics.
        exact: Computes a call that a mode has changed, likewise.

    Returns:
        What `run` returns, with the output cut to the width of the call's value.
    """
    if call.score is None or product.score is not None:
        found: tuple[Any, ...] = run(product)
        return found

    def whole(given: Call) -> tuple[Any, ...]:
        if given is not call:
            return exact(given)  # type: ignore[no-any-return]
        output, *weights, aux = run(_of_one_width(product) if run is fused else product)
        tensors = (output[..., : call.value.shape[-1]], *weights)
        statistics = (None if field is None else field.to(call.dtype) for field in aux)
        return (*(tensor.to(call.value.dtype) for tensor in tensors), AuxOutput(*statistics))

    results: tuple[Any, ...] = as_one(call, whole)
    return results


def _never_product(call: Call) -> str | None:
    """Return why the call keeps its pairs whatever its numbers are."""
    if call.score_mod is not None:
        return "score_mod gets distances as exact as pairs give them"
    if call.term is not None and not by_distance(call):
        return "a position term may depend on q and k"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is at work, which kernels do not follow"
    scales = (call.scale,) if isinstance(call.scale, Tensor) else ()
    readable = has_values(call.query, call.key, *scales)
    if not readable or (call.query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return "there are no numbers to look at, and a dot product may round distances too much"
    return None


def _error(scale: float | Factor, query: Float[Tensor, "*BHq L A"], key: Float[Tensor, "*BH S A"], heads: int) -> float:
    """Return the largest error of a logit, in units of u; NaN or infinity if q, k or a square is not finite."""
    if not query.numel() or not key.numel():
        return 0.0
    length = query[..., -1:].neg().sqrt()
    farthest = repeat_key_heads(key[..., -2:-1].amax(-2, keepdim=True), heads).sqrt()
    scale = scale.detach().to(query.dtype).abs() if isinstance(scale, Tensor) else abs(scale)
    # one number, so that a GPU is waited for once
    return math.sqrt(query.shape[-1] + 4) * float((scale * (length + farthest).square()).amax())


def _inexact(error: float, dtype: torch.dtype) -> str:
    if not math.isfinite(error):
        return "q or k holds NaN, infinity, or numbers whose squares overflow"
    name = str(dtype).removeprefix("torch.")
    return (
        f"distances as dot products in {name} would round the logits by up to {error * torch.finfo(dtype).eps / 2:.2g}"
    )


def _of_one_width(call: Call) -> Call:
    """Return the call with zeros beside its features: torch's fast kernels take one width for q, k and v."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    width = -(-width // LOADED_AT_ONCE) * LOADED_AT_ONCE
    query, key, value = (functional.pad(t, (0, width - t.shape[-1])) for t in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)
