"""Numbers that kernels mistreat: NaN and infinity where they do not count, infinite logits, and rows far from 0.

All is looked at on a CPU only, where it costs no synchronisation, and never while tracing or under a transform.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.impl.call import has_values

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import Bias, Factor, Key, Query, Value, Visible

FEW_KEYS = 32  # fewer keys than a SIMD vector holds: torch's CPU kernel gives 0 for a NaN row
FARTHEST_ROW = 512.0  # largest entry of a row of a mask beside which lse is as exact as beside ordinary logits


def needs_care(query: Query, key: Key, value: Value, scale: float | Factor | None, hides: bool) -> bool:
    """Return whether NaN or infinity may be where torch's kernels mistreat it.

    That is at a hidden key, or in a row of few or no keys. It may be in the input, or arise in the product of query and
    key. It is False if the numbers may not be read (see `looked_at`).

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        scale: The scale of the call.
        hides: Whether a mask of any kind may hide a key from a row.
    """
    if not looked_at(query, key, value):
        return False
    if hides and may_overflow(value, value, value.dtype, None):  # times a gradient of the same size
        return True
    narrowed = value.dtype == torch.float16 and (isinstance(scale, Tensor) or query.dtype != value.dtype)
    exposed = hides or narrowed or key.shape[-2] < FEW_KEYS
    return exposed and may_overflow(query, key, value.dtype, scale)


def gives_infinity(query: Query, key: Key, value: Value, scale: float | Factor | None, hides: bool) -> bool:
    """Return whether a logit may be infinite in a call for which `needs_care` is False.

    torch's CPU kernels give 0 for a row whose maximum is -inf, and in half types for one whose maximum is +inf; the
    other implementations give NaN. It is False if the numbers may not be read (see `looked_at`).

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        value: (..., H, S, Ev).
        scale: The scale of the call.
        hides: Whether a mask may hide a key from a row; then `needs_care` has looked at the same numbers, and it is
            False.
    """
    if hides or not looked_at(query, key, value) or not may_overflow(query, key, value.dtype, scale):
        return False
    if query.isnan().any() or key.isnan().any():  # a row of NaN is NaN in torch's kernels too
        query, key = (tensor.detach().nan_to_num(0.0, math.inf, -math.inf) for tensor in (query, key))
        return may_overflow(query, key, value.dtype, scale)
    return True


def above_infinity(tensor: Float[Tensor, "..."]) -> bool:
    """Return whether all numbers of a tensor are above -inf.

    It is False if one is NaN, if there are none, or if they may not be read (see `looked_at`).
    """
    if not looked_at(tensor) or not tensor.numel():
        return False
    with _disable_current_modes():  # no tape shall record the question
        return bool(tensor.detach().amin() > -math.inf)


def looked_at(*tensors: Float[Tensor, "..."]) -> bool:
    """Return whether the numbers of tensors may be read without waiting for a device.

    That is so if the first is on the CPU and all have values: not while compiling, under a transform or on "meta".
    """
    return tensors[0].device.type == "cpu" and has_values(*tensors)


def largest(tensor: Float[Tensor, "..."]) -> float:
    """Return the largest magnitude of a tensor; inf if it holds NaN, 0 if it is empty.

    Example:
        >>> largest(torch.tensor([1.0, -3.0])), largest(torch.tensor([math.nan]))
        (3.0, inf)
    """
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if not tensor.is_contiguous():  # in the order in which it lies: torch copies it in any other
        tensor = _once(tensor)
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item()) if math.isfinite(low.item()) else math.inf


def _once(tensor: Tensor) -> Tensor:
    """Return a tensor without its repetitions."""
    for dim in range(tensor.ndim):
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def holds_nonfinite(tensor: Float[Tensor, "..."]) -> bool:
    """Return whether a tensor holds NaN or an infinity."""
    return not math.isfinite(largest(tensor))


def may_overflow(
    query: Float[Tensor, "... E"], key: Float[Tensor, "... E"], dtype: torch.dtype, scale: float | Factor | None
) -> bool:
    """Return whether some logit z may not be finite, by the bound |z| <= E max|q| max|k| |scale|.

    It also returns True if q times the scale may overflow its own dtype, as kernels scale the query first.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        dtype: Dtype in which kernels hold the scaled query.
        scale: The scale; None for 1.
    """
    factor = largest(scale) if isinstance(scale, Tensor) else abs(scale or 1.0)
    rows = largest(query)
    product = rows * largest(key) * query.shape[-1] * max(1.0, factor)
    logits = torch.float64 if query.dtype == torch.float64 else torch.float32
    return not (product < torch.finfo(logits).max and rows * factor < torch.finfo(dtype).max)


def wants_gradients(*tensors: Float[Tensor, "..."]) -> bool:
    """Return whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def may_lose_mass(mask: Bias | Visible | None) -> bool:
    """Return whether the backward pass of torch's kernels may be wrong for a row of this mask.

    They keep only lse = m + log l of a row with maximum m and mass l. If a mask adds -3.4e38 to all logits of a row, as
    transformers' eager masks do to padding, lse is -3.4e38: log l is lost, and every weight of n equal ones is 1 in
    place of 1/n. So the largest entry of each row is looked at.
    """
    if mask is None or mask.dtype == torch.bool or not mask.numel():
        return False
    if mask.device.type != "cpu" or not has_values(mask):
        return True
    top = _once(mask.detach()).amax(-1).abs()
    return bool(((top > FARTHEST_ROW) & (top < math.inf)).any())
