"""Runs a program in float64: projection, norms, rotations, logits, weights, output.

Rows are computed in chunks of about `LOGITS_AT_ONCE` logits, so memory beyond q, k and v is linear in length.

If the formula names a dtype, values are rounded to it once: logits just before the softmax, weights just after it. That
is what torch's `softmax(logits.half())` does: exponentials, sum and division are float32 inside, followed by one
rounding. So a softmax in half precision is `logits_dtype` together with `weights_dtype`.

The dtype of the logits and weights also decides which numbers exist. A fill beyond its range (-1e9 in float16) is minus
infinity. A fill that is added swallows the digits of the logit that are finer than its own last one. Without a named
dtype, float32 decides both, but the logits themselves are not rounded.

A row that sees no key has output 0 and lse minus infinity (with a sink: the sink's logit).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import (
    Affine,
    Formula,
    LogitPrecision,
    NormStep,
    OpaqueStep,
    PathStep,
    RoundingStep,
    VectorPath,
)
from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.probe.rotation import apply_rotation as apply_rotation

LOGITS_AT_ONCE = 2**22  # logits of all heads at a time: 32 MiB in float64
FLOAT32_MOST = torch.finfo(torch.float32).max
DTYPES_BY_NAME = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

MOST_STORED = {  # largest number that a low-precision cache stores; larger ones are cut off
    "float8_e4m3fn": torch.finfo(torch.float8_e4m3fn).max,
    "float8_e5m2": torch.finfo(torch.float8_e5m2).max,
    "int8": 127.0,
}


def round_to(values: Tensor, dtype: str | None) -> Tensor:
    """Return values rounded to a dtype, as float64.

    float8 and int8 also cut off numbers beyond their range; int8 rounds to whole numbers.

    Args:
        values: a tensor.
        dtype: name of the dtype, "float16" or "int8"; None rounds nothing.

    Example:
        >>> round_to(torch.tensor([1.0 + 2**-12]), "float16").tolist()
        [1.0]
        >>> round_to(torch.tensor([200.0, 2.5, -0.6]), "int8").tolist()
        [127.0, 2.0, -1.0]
    """
    if dtype is None:
        return values.double()
    if dtype in MOST_STORED:
        values = values.clamp(-MOST_STORED[dtype], MOST_STORED[dtype])
    return values.double().round() if dtype == "int8" else values.to(dtype_by_name(dtype)).double()


def dtype_by_name(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float16" or "torch.float16".

    Raises:
        InvalidValueError: attentions don't compute in a dtype of this name.
    """
    dtype = DTYPES_BY_NAME.get(name.removeprefix("torch."))
    if dtype is None:
        raise InvalidValueError(f"no floating-point dtype {name!r}", hint=f"Known are {', '.join(DTYPES_BY_NAME)}.")
    return dtype


def project_input(affine: Affine, entering: Tensor) -> Tensor:
    """Return the projection of an input, input @ weight.T + bias, in float64.

    Args:
        affine: weight (H, E, D) and bias (H, E) or None.
        entering: the input, (B, L, D).

    Returns:
        The heads, (B, H, L, E).
    """
    heads = torch.einsum("bld,hed->bhle", entering.double(), affine.weight.double())
    return heads if affine.bias is None else heads + affine.bias.double()[:, None]


def follow_path(path: VectorPath, projected: Tensor) -> tuple[Tensor, ...]:
    """Return the values after each step of a path, in float64; the last ones are multiplied by `path.scaled`.

    Args:
        path: the steps; the projection is not run.
        projected: values before the first step, (B, H, L, E).

    Returns:
        One tensor (B, H, L, E) for each step; for a path without steps, the projected values times `path.scaled`.

    Raises:
        InvalidValueError: a step is unknown.
    """
    values = [projected.double()]
    for step in path.steps:
        values.append(apply_step(step, values[-1]))
    last = values[-1] * path.scaled
    return (*values[1:-1], last)


def apply_step(step: PathStep, values: Tensor) -> Tensor:
    """Return the values (B, H, L, E) after one step: a norm, a rotation or a rounding.

    Raises:
        InvalidValueError: the step is an `OpaqueStep`, of which only the name is known.
    """
    if isinstance(step, OpaqueStep):
        raise InvalidValueError(
            f"nothing can be computed through {step.name!r}, a step that is not known",
            hint="Start from the values that were recorded after it.",
        )
    if isinstance(step, RoundingStep):
        there = values * step.by  # a factor of 0 (log n of a row with one key) can't be divided out
        return torch.where(there == 0, values, round_to(there, step.dtype) / step.by)
    return apply_norm(step, values) if isinstance(step, NormStep) else apply_rotation(step, values)


def apply_norm(norm: NormStep, values: Tensor) -> Tensor:
    """Return values (B, H, L, E) after a norm: x / length * gain + shift, in float64.

    The length is that of one head, or of all heads of a token together, as `norm.over` says. See `centred`.

    Example:
        >>> unit = NormStep("l2", gain=torch.ones(1, 2))
        >>> apply_norm(unit, torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).flatten().tolist()
        [0.6, 0.8]
    """
    x, length = centred(norm, values)
    x = x / length * norm.gain.double()[:, None]
    return x if norm.shift is None else x + norm.shift.double()[:, None]


def centred(norm: NormStep, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and the length that divides it in a norm, for values (B, H, L, E).

    x are the values in float64, minus their mean for "layer". The length is max(|x|, eps) for "l2", else
    sqrt(mean(x^2) + eps); it broadcasts to x.
    """
    x, over = values.double(), (1, 3) if norm.over == "heads" else (3,)
    if norm.kind == "layer":
        x = x - x.mean(over, keepdim=True)
    if norm.kind == "l2":
        # x / max(|x|, eps), like F.normalize; the other kinds add eps under the root: x * rsqrt(mean(x^2) + eps)
        return x, x.square().sum(over, keepdim=True).sqrt().clamp(min=norm.eps)
    return x, (x.square().mean(over, keepdim=True) + norm.eps).sqrt()


def repeat_heads(tensor: Tensor, count: int, heads: Tensor | None = None) -> Tensor:
    """Return the heads that the query heads read, (B, count, ...), from a tensor (B, H, ...).

    Args:
        tensor: heads of k or v, or anything with heads on the second axis.
        count: number of query heads.
        heads: index of the head that each query head reads; None for i // (count / H).

    Raises:
        InvalidValueError: `heads` is None, and count is no multiple of H.

    Example:
        >>> repeat_heads(torch.tensor([[1, 2]]), 4).tolist()
        [[1, 1, 2, 2]]
        >>> repeat_heads(torch.tensor([[1, 2]]), 4, torch.tensor([0, 1, 0, 1])).tolist()
        [[1, 2, 1, 2]]
    """
    if heads is not None:
        return tensor[:, heads]
    there = tensor.shape[1]
    if there == count:
        return tensor
    if there == 0 or count % there:
        raise InvalidValueError(
            f"{count} query heads can't share {there} heads of keys evenly",
            hint="The query heads must be a multiple of the heads of keys and values.",
        )
    return tensor.repeat_interleave(count // there, 1)


def compute_logits(query: Tensor, key: Tensor, formula: Formula, product: Tensor | None = None) -> Tensor:
    """Return the logits (B, Hq, L, S) as they enter the softmax.

    The order is scale, softcap (at `softcap_at`), bias, mask; then rounding to `logits_dtype`.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), where H divides Hq.
        formula: what turns q . k into logits.
        product: q . k, (B, Hq, L, S), if it is already computed.
    """
    scale = formula.scale
    if product is None and formula.own is not None:
        product, scale = _own_product(query, key, formula.own), _scale_after_product(scale, formula.own)
    z = query.double() @ repeat_heads(key, query.shape[1]).double().mT if product is None else product
    z = _capped(z * _to(scale, z.dtype), formula, ("scaled", "product"))
    if formula.bias is not None:
        z = z + (formula.bias.double() * formula.bias_by).to(z.dtype)
    if formula.visible is not None:
        z = _masked(z, formula, formula.visible)
    z = _capped(z, formula, ("masked",))
    return round_to(z, formula.logits_dtype)


def logits_and_slope(product: Tensor, formula: Formula) -> tuple[Tensor, Tensor]:
    """Return the logits before bias and mask, and their derivative by q . k.

    If the softcap comes after bias and mask, it is left out: the derivative is then the largest possible one.

    Args:
        product: q . k, (B, Hq, L, S), in float64.
        formula: scale and softcap.

    Returns:
        The logits (B, Hq, L, S) and the derivative, which broadcasts to them.
    """
    slope = torch.as_tensor(formula.scale, dtype=torch.float64, device=product.device)
    z = product * slope
    if formula.softcap is not None:
        bent = (z / formula.softcap).tanh()
        if formula.softcap_by_logits:
            z, slope = z * bent, slope * (bent + z / formula.softcap * (1.0 - bent.square())).abs()
        elif formula.softcap_at != "masked":  # else bias and mask come first: steepest slope
            z, slope = formula.softcap * bent, slope * (1.0 - bent.square())
    after = _to(formula.after, torch.float64)
    return z * after, slope * after


def compute_output(query: Tensor, key: Tensor, value: Tensor, formula: Formula) -> tuple[Tensor, Tensor]:
    """Return the output and the log of the sum of exp(logits), sinks included.

    Rows are computed in chunks. A row that sees no key has output 0, and lse -inf without sinks.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), where H divides Hq.
        value: (B, H, S, Ev).
        formula: what turns q . k into weights.

    Returns:
        The output (B, Hq, L, Ev) and the lse (B, Hq, L), in float64.
    """
    heads = query.shape[1]
    key, value = repeat_heads(key, heads).double(), repeat_heads(value, heads).double()
    outputs, sums = [], []
    for rows in chunks(query, key):
        weights, lse = compute_weights(query[..., rows, :], key, some_rows(formula, rows, query.shape[-2]))
        outputs.append(weights @ value)
        sums.append(lse)
    if not outputs:
        return query.new_zeros((*query.shape[:3], value.shape[-1])).double(), query.new_zeros(query.shape[:3]).double()
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def compute_weights(query: Tensor, key: Tensor, formula: Formula, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights that multiply v, dropout included, and the log of the sum of exp(logits).

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E), where H divides Hq.
        formula: what turns q . k into weights.
        z: the logits (B, Hq, L, S), if already computed.

    Returns:
        The weights (B, Hq, L, S) and the lse (B, Hq, L), in float64.
    """
    by_own_code = formula.own is not None and z is None
    z = compute_logits(query, key, formula) if z is None else z
    top = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), float("-inf"))
    sinks = None if formula.sinks is None else formula.sinks.double()[:, None, None]
    top = top if sinks is None else torch.maximum(top, sinks)
    # a row that sees no key: -inf minus -inf would be NaN
    top = top.masked_fill(top == float("-inf"), 0.0)
    exponentials = (z - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks - top).exp()
    divided = exponentials / total.masked_fill(total == 0, 1.0)
    weights = _own_weights(z, formula) if by_own_code else round_to(divided, formula.weights_dtype)
    if formula.kept is not None:
        left = 1.0 - formula.dropout
        weights = weights * formula.kept * (1.0 / left if left > 0 else 0.0)
    return weights, (total.log() + top)[..., 0]


def some_rows(formula: Formula, rows: Tensor | slice, length: int) -> Formula:
    """Return the formula for some of the `length` rows, by indices or a slice; tensors with one row for all stay."""
    return parts_of(formula, lambda x: x[..., rows, :] if x.ndim > 1 and x.shape[-2] == length != 1 else x)


def some_heads(formula: Formula, index: Tensor, count: int) -> Formula:
    """Return the formula for some of the `count` query heads, by index; tensors with one head for all stay."""
    sinks = None if formula.sinks is None else formula.sinks[index]
    return parts_of(
        replace(formula, sinks=sinks), lambda x: x[..., index, :, :] if x.ndim > 2 and x.shape[-3] == count != 1 else x
    )


def parts_of(formula: Formula, of: Callable[[Tensor], Tensor]) -> Formula:
    """Return the formula with `of` applied to its scale, factors, bias, mask and dropout mask, if these are tensors."""

    def parts(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
        values = {name: getattr(record, name) for name in names}
        return {name: of(value) if isinstance(value, Tensor) else value for name, value in values.items()}

    own = formula.own if formula.own is None else replace(formula.own, **parts(formula.own, ("query", "key")))
    return replace(formula, own=own, **parts(formula, ("scale", "after", "bias", "visible", "kept")))


def chunks(query: Tensor, key: Tensor, budget: int = LOGITS_AT_ONCE) -> Iterator[slice]:
    """Yield consecutive slices of rows, of at most `budget` logits over all batches and heads, and at least one row.

    Args:
        query: (B, Hq, L, E); only its shape matters.
        key: (..., S, E); only its shape matters.
        budget: largest number of logits of a slice.
    """
    length, row = query.shape[-2], query.shape[0] * query.shape[1] * key.shape[-2]
    step = max(1, budget // max(1, row))
    for first in range(0, length, step):
        yield slice(first, min(length, first + step))


def _own_product(query: Tensor, key: Tensor, own: LogitPrecision) -> Tensor:
    """Return q . k as the side computes it: in its dtype, with its factors on q and k."""
    dtype, factor = dtype_by_name(own.dtype), own.key.mT if isinstance(own.key, Tensor) else own.key
    # q * 0.125 in bfloat16, then q @ k.mT in bfloat16: each result is rounded where the side itself rounds it
    queries = (query.double() * own.query).to(dtype)
    return queries @ (repeat_heads(key, query.shape[1]).double() * factor).to(dtype).mT


def _scale_after_product(scale: Tensor | float, own: LogitPrecision) -> Tensor | float:
    """Return the scale without the parts on q and k; where such a part is 0, the rest is arbitrary."""
    there = own.query * own.key
    return scale / (there.masked_fill(there == 0, 1.0) if isinstance(there, Tensor) else there or 1.0)


def _own_weights(z: Tensor, formula: Formula) -> Tensor:
    """Return torch's softmax weights (B, Hq, l, S): of rounded logits, or in the side's dtype and rounded later."""
    assert formula.own is not None
    z = z.to(dtype_by_name(formula.logits_dtype or formula.own.dtype))
    if formula.logits_dtype != formula.weights_dtype:
        z = z.to(dtype_by_name(formula.own.dtype))
    if formula.sinks is not None:
        sinks = formula.sinks[:, None, None].to(z.dtype).expand(*z.shape[:-1], 1)
        z = torch.cat([z, sinks], -1)
    weights = z.softmax(-1).nan_to_num(nan=0.0)  # NaN in a row that sees no key
    return round_to(weights if formula.sinks is None else weights[..., :-1], formula.weights_dtype)


def _capped(z: Tensor, formula: Formula, places: tuple[str, ...]) -> Tensor:
    """Return logits after the softcap and the factor behind it, if this is their place."""
    if formula.softcap_at not in places:
        return z
    if formula.softcap is not None:
        z = (z if formula.softcap_by_logits else formula.softcap) * (z / formula.softcap).tanh()
    after = formula.after
    return z if isinstance(after, float) and after == 1.0 else z * _to(after, z.dtype)


def _masked(z: Tensor, formula: Formula, visible: Tensor) -> Tensor:
    fill, stored = formula.fill * formula.fill_by, formula.logits_dtype or "float32"
    if math.isnan(fill):  # inf * 0: a mask of -inf multiplied by 0
        fill = float("-inf")
    if FLOAT32_MOST < abs(formula.fill) < float("inf"):  # only a side that computes in float64 has such a fill
        stored = "float64"
    if not formula.fill_added or math.isinf(fill):
        return torch.where(visible, z, float(round_to(torch.tensor(fill, dtype=torch.float64), stored)))
    return torch.where(visible, z, round_to(z + fill, stored).to(z.dtype))


def _to(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    return value.to(dtype) if isinstance(value, Tensor) else value
