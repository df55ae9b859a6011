"""JAX's sums of products as torch operations: `dot_general`, convolutions, sliding windows, Fourier transforms.

    dot_general    a (B, I, K), b (B, K, J) -> (B, I, J), axes in any order: one matmul
    conv           x (N, C, ...) * w (O, C, ...), in any layout

`jnp.einsum` may write weights . v as v . weights, whose result it transposes. A trace reads the first form, so the
sides of a product are exchanged if the right one is contracted along its last axis and the left one is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sqrtdk.frontends.arrays import CONVOLUTIONS_BY_RANK, spread
from sqrtdk.frontends.jax.arrays import held_dtype
from sqrtdk.frontends.jax.elementwise import Operation
from sqrtdk.frontends.program import RunDtypes


def _ordered(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x if list(axes) == list(range(x.dim())) else x.permute(tuple(axes))


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if list(x.shape) == list(shape) else x.reshape(tuple(shape))


def _common(numbers: RunDtypes, a: Tensor, b: Tensor, preferred: Any) -> tuple[Tensor, Tensor, torch.dtype | None]:
    """Return both sides in the dtype in which their product is summed, and the dtype of the result, if it is named."""
    wanted = None if preferred is None else numbers.dtype(held_dtype(preferred))
    dtype = torch.promote_types(a.dtype, b.dtype)
    if wanted is not None and wanted.itemsize > dtype.itemsize:
        dtype = wanted  # bfloat16 times bfloat16, summed in float32: the products are exact there
    if dtype.itemsize == 1 and dtype.is_floating_point:
        dtype = torch.float32
    return a.to(dtype), b.to(dtype), wanted


def _dot_general(
    numbers: RunDtypes, a: Tensor, b: Tensor, *, dimension_numbers: Any, preferred_element_type: Any = None, **_: Any
) -> Tensor:
    (ca, cb), (ba, bb) = dimension_numbers
    a, b, wanted = _common(numbers, a, b, preferred_element_type)
    exchanged = b.dim() - 1 in cb and a.dim() - 1 not in ca
    if exchanged:
        a, b, ca, cb, ba, bb = b, a, cb, ca, bb, ba
    free_a, free_b = ([at for at in range(x.dim()) if at not in (*c, *d)] for x, c, d in ((a, ca, ba), (b, cb, bb)))
    batch, rows, columns = ([x.shape[at] for at in axes] for x, axes in ((a, ba), (a, free_a), (b, free_b)))
    shared = math.prod(a.shape[at] for at in ca)
    left = _shaped(_ordered(a, [*ba, *free_a, *ca]), [*batch, math.prod(rows), shared])
    right = _shaped(_ordered(b, [*bb, *cb, *free_b]), [*batch, shared, math.prod(columns)])
    made = _shaped(torch.matmul(left, right), [*batch, *rows, *columns])
    if exchanged:  # the result's axes: batch, free axes of JAX's left, free axes of its right
        n, r = len(batch), len(rows)
        made = _ordered(made, [*range(n), *range(n + r, made.dim()), *range(n, n + r)])
    return made if wanted is None else made.to(wanted)


def _convolution(
    numbers: RunDtypes, x: Tensor, w: Tensor, *, window_strides: Sequence[int], padding: Any,
    lhs_dilation: Sequence[int], rhs_dilation: Sequence[int], dimension_numbers: Any, feature_group_count: int,
    preferred_element_type: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    d = dimension_numbers
    x, w, wanted = _common(numbers, x, w, preferred_element_type)
    x, w = _ordered(x, d.lhs_spec), _ordered(w, d.rhs_spec)
    for at, by in enumerate(lhs_dilation):
        x = spread(x, at + 2, by)  # a transposed convolution: zeros between the numbers
    if any(n for pair in padding for n in pair):
        x = F.pad(x, [int(n) for pair in reversed(padding) for n in pair])
    made = CONVOLUTIONS_BY_RANK[len(window_strides) - 1](
        x, w, stride=tuple(window_strides), dilation=tuple(rhs_dilation), groups=feature_group_count)  # fmt: skip
    made = _ordered(made, [d.out_spec.index(at) for at in range(made.dim())])
    return made if wanted is None else made.to(wanted)


def _window(function: Callable[[Tensor, tuple[int, ...]], Tensor], fill: float) -> Operation:
    def run(
        numbers: RunDtypes, x: Tensor, *, window_dimensions: Sequence[int], window_strides: Sequence[int], padding: Any,
        window_dilation: Sequence[int], **_: Any,
    ) -> Tensor:  # fmt: skip
        if any(n for pair in padding for n in pair):
            value = fill if x.is_floating_point() or not math.isinf(fill) else (
                torch.iinfo(x.dtype).min if fill < 0 else torch.iinfo(x.dtype).max)  # fmt: skip
            x = F.pad(x, [int(n) for pair in reversed(padding) for n in pair], value=value)
        rank = x.dim()
        for at, (size, stride, apart) in enumerate(
            zip(window_dimensions, window_strides, window_dilation, strict=True)
        ):
            x = x.unfold(at, (size - 1) * apart + 1, stride)
            x = x if apart == 1 else x[..., ::apart]
        return function(x, tuple(range(rank, x.dim())))

    return run


_TRANSFORMS: dict[int, Callable[..., Tensor]] = {
    0: torch.fft.fftn, 1: torch.fft.ifftn, 2: torch.fft.rfftn, 3: torch.fft.irfftn,
}  # fmt: skip


def _fft(numbers: RunDtypes, x: Tensor, fft_type: Any, fft_lengths: Sequence[int], **_: Any) -> Tensor:
    kind = int(fft_type) if not hasattr(fft_type, "value") else int(fft_type.value)
    return _TRANSFORMS[kind](x, s=tuple(fft_lengths), dim=tuple(range(-len(fft_lengths), 0)))


def _ragged_dot(
    numbers: RunDtypes, a: Tensor, b: Tensor, groups: Tensor, *, ragged_dot_dimension_numbers: Any,
    preferred_element_type: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Rows (M, K) in groups, each with a matrix of its own (G, K, N): the experts of a mixture. Returns (M, N)."""
    a, b, wanted = _common(numbers, a, b, preferred_element_type)
    lengths = [int(n) for n in groups]
    parts = [rows @ matrix for rows, matrix in zip(torch.split(a[: sum(lengths)], lengths), b, strict=True)]
    left = a.shape[0] - sum(lengths)
    made = torch.cat([*parts, a.new_zeros(left, b.shape[-1])] if left else parts)
    return made if wanted is None else made.to(wanted)


def reads_ragged(dimension_numbers: Any) -> bool:
    """Return whether a ragged product is that of rows (M, K), in groups, with one matrix of (G, K, N) for each group.

    Args:
        dimension_numbers: `jax.lax.RaggedDotDimensionNumbers` of the product.
    """
    d = dimension_numbers
    plain = tuple(map(tuple, d.dot_dimension_numbers[0])) == ((1,), (1,)) and not any(d.dot_dimension_numbers[1])
    return plain and tuple(d.lhs_ragged_dimensions) == (0,) and tuple(d.rhs_group_dimensions) == (0,)


def plain_windows(params: Any) -> bool:
    """Return whether a pooling (`reduce_window`) has the base dilation 1, given the parameters of its primitive."""
    return bool(np.all(np.asarray(params.get("base_dilation", 1)) == 1))


PRODUCT_OPERATIONS: dict[str, Operation] = {
    "dot_general": _dot_general, "conv_general_dilated": _convolution, "fft": _fft, "ragged_dot_general": _ragged_dot,
    "reduce_window_sum": _window(torch.sum, 0.0), "reduce_window_max": _window(torch.amax, -math.inf),
    "reduce_window_min": _window(torch.amin, math.inf),
}  # fmt: skip
