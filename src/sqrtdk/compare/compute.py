"""A program run in float64: projection, norms, rotations, logits, weights, output.

Rows are computed in chunks of about `CHUNK` logits, so that the memory on top of q, k and v is linear in length.

Where the formula names a dtype, values are rounded to it once: the logits just before the softmax, the weights just
after it. That is what torch's `softmax(logits.half())` does: its exponentials, sum and division are float32 inside,
and one rounding follows. A softmax in half precision is thus `logits_dtype` and `weights_dtype` together.

What the logits and the weights are rounded to also says which numbers there are: a fill beyond the range of the dtype
(-1e9 in float16) is minus infinity, and a fill that is added swallows the digits of the logit that are finer than its
own last one. Where no dtype is named, float32 is taken for both; the logits themselves are not rounded then.

A row that sees no key has output 0 and lse minus infinity (its sink's logit, where there is one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.program import Affine, Formula, Norm, Opaque, Own, Rounded, Step, Way
from sqrtdk.errors import InvalidValueError
from sqrtdk.tracing.probe.rotation import apply_rotation as apply_rotation

CHUNK = 2**22  # logits of all heads at a time: 32 MiB in float64
FLOAT32_MOST = torch.finfo(torch.float32).max
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

MOST_STORED = {  # the largest number that a cache in so few bits stores; what is beyond is cut off
    "float8_e4m3fn": torch.finfo(torch.float8_e4m3fn).max,
    "float8_e5m2": torch.finfo(torch.float8_e5m2).max,
    "int8": 127.0,
}


def rounded(values: Tensor, dtype: str | None) -> Tensor:
    """Values rounded to a dtype, as float64, and cut off where it is one of a cache; None rounds nothing.

    Example:
        >>> rounded(torch.tensor([1.0 + 2**-12]), "float16").tolist()
        [1.0]
        >>> rounded(torch.tensor([200.0, 2.5, -0.6]), "int8").tolist()
        [127.0, 2.0, -1.0]
    """
    if dtype is None:
        return values.double()
    if dtype in MOST_STORED:
        values = values.clamp(-MOST_STORED[dtype], MOST_STORED[dtype])
    return values.double().round() if dtype == "int8" else values.to(dtype_of(dtype)).double()


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name, "float16" or "torch.float16".

    Raises:
        InvalidValueError: there is none among those that attentions compute in.
    """
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise InvalidValueError(f"no floating-point dtype {name!r}", hint=f"Known are {', '.join(DTYPES)}.")
    return dtype


def project(affine: Affine, entering: Tensor) -> Tensor:
    """Heads (B, H, L, E) of an input (B, L, D): input @ weight.T + bias."""
    heads = torch.einsum("bld,hed->bhle", entering.double(), affine.weight.double())
    return heads if affine.bias is None else heads + affine.bias.double()[:, None]


def follow(way: Way, projected: Tensor) -> tuple[Tensor, ...]:
    """Values (B, H, L, E) after each step of a way, the last times `way.scaled`; without a step, one: the projected.

    Raises:
        InvalidValueError: a step is not known.
    """
    values = [projected.double()]
    for step in way.steps:
        values.append(apply_step(step, values[-1]))
    last = values[-1] * way.scaled
    return (*values[1:-1], last)


def apply_step(step: Step, values: Tensor) -> Tensor:
    """Values (B, H, L, E) after one step."""
    if isinstance(step, Opaque):
        raise InvalidValueError(
            f"nothing can be computed through {step.name!r}, a step that is not known",
            hint="Start from the values that were recorded after it.",
        )
    if isinstance(step, Rounded):
        there = values * step.by
        return torch.where(there == 0, values, rounded(there, step.dtype) / step.by)
    return apply_norm(step, values) if isinstance(step, Norm) else apply_rotation(step, values)


def apply_norm(norm: Norm, values: Tensor) -> Tensor:
    """Values (B, H, L, E) after a normalisation, of each head or of all heads of a token together.

    Example:
        >>> unit = Norm("l2", gain=torch.ones(1, 2))
        >>> apply_norm(unit, torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).flatten().tolist()
        [0.6, 0.8]
    """
    x, length = centred(norm, values)
    x = x / length * norm.gain.double()[:, None]
    return x if norm.shift is None else x + norm.shift.double()[:, None]


def centred(norm: Norm, values: Tensor) -> tuple[Tensor, Tensor]:
    """Values (B, H, L, E) without their mean, where the normalisation takes it off, and what they are divided by."""
    x, over = values.double(), (1, 3) if norm.over == "heads" else (3,)
    if norm.kind == "layer":
        x = x - x.mean(over, keepdim=True)
    if norm.kind == "l2":
        return x, x.square().sum(over, keepdim=True).sqrt().clamp(min=norm.eps)
    return x, (x.square().mean(over, keepdim=True) + norm.eps).sqrt()


def spread(tensor: Tensor, count: int, heads: Tensor | None = None) -> Tensor:
    """(B, H, ...) to (B, count, ...): query head i reads head `heads[i]`, or i // (count / H).

    Example:
        >>> spread(torch.tensor([[1, 2]]), 4).tolist()
        [[1, 1, 2, 2]]
        >>> spread(torch.tensor([[1, 2]]), 4, torch.tensor([0, 1, 0, 1])).tolist()
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


def logits(
    query: Tensor, key: Tensor, formula: Formula, rows: slice | None = None, product: Tensor | None = None
) -> Tensor:
    """Logits (B, Hq, l, S) in float64, as they enter the softmax, of all rows or of some.

    The order is scale, softcap (where `softcap_at` has it), bias, mask; then `logits_dtype`. `product` is q . k of the
    rows, where it is there already.
    """
    length, scale = query.shape[-2], formula.scale
    if product is None and formula.own is not None:
        product, scale = _own_product(query, key, formula.own, rows), _left(scale, formula.own)
    z = product_of(query, key, rows) if product is None else product
    z = _capped(z * _of_rows(scale, rows, length, z.dtype), formula, rows, length, ("scaled", "product"))
    if formula.bias is not None:
        z = z + _of_rows(formula.bias.double() * formula.bias_by, rows, length, z.dtype)
    if formula.visible is not None:
        z = _masked(z, formula, _rows(formula.visible, rows, length))
    z = _capped(z, formula, rows, length, ("masked",))
    return rounded(z, formula.logits_dtype)


def curve(product: Tensor, formula: Formula, rows: slice | None, length: int) -> tuple[Tensor, Tensor]:
    """Logits before bias and mask, (B, Hq, l, S), of q . k of some rows, and their slope against it, softcap included.

    The slope broadcasts to the logits.
    """
    scale = _of_rows(formula.scale, rows, length)
    z, slope = product * scale, torch.as_tensor(scale, dtype=torch.float64, device=product.device)
    if formula.softcap is not None:
        bent = (z / formula.softcap).tanh()
        if formula.softcap_by_logits:
            z, slope = z * bent, slope * (bent + z / formula.softcap * (1.0 - bent.square())).abs()
        elif formula.softcap_at != "masked":  # there bias and mask come first: the steepest slope is taken
            z, slope = formula.softcap * bent, slope * (1.0 - bent.square())
    after = _of_rows(formula.after, rows, length)
    return z * after, slope * after


def hidden(formula: Formula, rows: slice | None, length: int) -> Tensor | None:
    """True where the key is hidden, broadcasts to (B, Hq, l, S); None where no key is."""
    return None if formula.visible is None else ~_rows(formula.visible, rows, length)


def attend(query: Tensor, key: Tensor, value: Tensor, formula: Formula) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, L, Ev) and log of the sum of exponentials (B, Hq, L), sinks among them, in float64."""
    heads = query.shape[1]
    key, value = spread(key, heads).double(), spread(value, heads).double()
    outputs, sums = [], []
    for rows in chunks(query, key):
        weights, lse = weigh(query, key, formula, rows)
        outputs.append(weights @ value)
        sums.append(lse)
    if not outputs:
        return query.new_zeros((*query.shape[:3], value.shape[-1])).double(), query.new_zeros(query.shape[:3]).double()
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def weigh(
    query: Tensor, key: Tensor, formula: Formula, rows: slice | None = None, z: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights (B, Hq, l, S) as they meet v, dropout included, and the lse (B, Hq, l), in float64.

    `z` are the logits of the rows, where they are there already.
    """
    entering = z
    z = logits(query, key, formula, rows) if z is None else z
    top = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), float("-inf"))
    sinks = None if formula.sinks is None else formula.sinks.double()[:, None, None]
    top = top if sinks is None else torch.maximum(top, sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    exponentials = (z - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks - top).exp()
    if formula.own is None or entering is not None:
        weights = rounded(exponentials / total.masked_fill(total == 0, 1.0), formula.weights_dtype)
    else:
        weights = _own_weights(z, formula)
    if formula.kept is not None:
        left = 1.0 - formula.dropout
        weights = weights * _rows(formula.kept, rows, query.shape[-2]) * (1.0 / left if left > 0 else 0.0)
    return weights, (total.log() + top)[..., 0]


def some_rows(formula: Formula, index: Tensor, length: int) -> Formula:
    """The formula of some of `length` rows, by their numbers."""

    def of(value: Tensor) -> Tensor:
        return value[..., index, :] if value.ndim > 1 and value.shape[-2] == length != 1 else value

    cut = parts_of(formula, of)
    if cut.own is not None and isinstance(cut.own.query, Tensor):
        cut = replace(cut, own=replace(cut.own, query=of(cut.own.query)))
    return cut


def some_heads(formula: Formula, index: Tensor, count: int) -> Formula:
    """The formula of some of `count` heads, by their numbers."""

    def of(value: Tensor) -> Tensor:
        return value[..., index, :, :] if value.ndim > 2 and value.shape[-3] == count != 1 else value

    cut = replace(parts_of(formula, of), sinks=None if formula.sinks is None else formula.sinks[index])
    own = cut.own
    if own is None:
        return cut
    query, key = (of(x) if isinstance(x, Tensor) else x for x in (own.query, own.key))
    return replace(cut, own=replace(own, query=query, key=key))


def parts_of(formula: Formula, of: Callable[[Tensor], Tensor]) -> Formula:
    """A formula with `of` of every tensor that broadcasts to (B, Hq, L, S)."""
    return replace(
        formula,
        scale=of(formula.scale) if isinstance(formula.scale, Tensor) else formula.scale,
        after=of(formula.after) if isinstance(formula.after, Tensor) else formula.after,
        bias=None if formula.bias is None else of(formula.bias),
        visible=None if formula.visible is None else of(formula.visible),
        kept=None if formula.kept is None else of(formula.kept),
    )


def chunks(query: Tensor, key: Tensor, budget: int = CHUNK) -> Iterator[slice]:
    """Slices of the rows of a query (B, Hq, L, E), of at most `budget` logits each but of one row at least."""
    length, row = query.shape[-2], query.shape[0] * query.shape[1] * key.shape[-2]
    step = max(1, budget // max(1, row))
    for first in range(0, length, step):
        yield slice(first, min(length, first + step))


def product_of(query: Tensor, key: Tensor, rows: slice | None = None) -> Tensor:
    """Q . k, (B, Hq, l, S), of all rows or of some."""
    queries = query if rows is None else query[..., rows, :]
    return queries.double() @ spread(key, query.shape[1]).double().mT


def _own_product(query: Tensor, key: Tensor, own: Own, rows: slice | None) -> Tensor:
    """Q . k as a side has it, in its dtype, with the factors on q and k that it puts there."""
    dtype, factor = dtype_of(own.dtype), own.key.mT if isinstance(own.key, Tensor) else own.key
    queries = (query.double() * own.query).to(dtype)
    keys = (spread(key, query.shape[1]).double() * factor).to(dtype)
    return (queries if rows is None else queries[..., rows, :]) @ keys.mT


def _left(scale: Tensor | float, own: Own) -> Tensor | float:
    """The factor of the product without those of q and k; a row or a key whose own factor is 0 has any."""
    there = own.query * own.key
    return scale / (there.masked_fill(there == 0, 1.0) if isinstance(there, Tensor) else there or 1.0)


def _own_weights(z: Tensor, formula: Formula) -> Tensor:
    """Weights (B, Hq, l, S) of torch's softmax: of logits in a lesser dtype, or in the side's own, rounded after it."""
    assert formula.own is not None
    z = z.to(dtype_of(formula.logits_dtype or formula.own.dtype))
    if formula.logits_dtype != formula.weights_dtype:
        z = z.to(dtype_of(formula.own.dtype))
    if formula.sinks is not None:
        sinks = formula.sinks[:, None, None].to(z.dtype).expand(*z.shape[:-1], 1)
        z = torch.cat([z, sinks], -1)
    weights = z.softmax(-1).nan_to_num(nan=0.0)  # a row that sees no key
    return rounded(weights if formula.sinks is None else weights[..., :-1], formula.weights_dtype)


def _capped(z: Tensor, formula: Formula, rows: slice | None, length: int, places: tuple[str, ...]) -> Tensor:
    """Through the softcap and the factor after it, if this is their place."""
    if formula.softcap_at not in places:
        return z
    if formula.softcap is not None:
        z = (z if formula.softcap_by_logits else formula.softcap) * (z / formula.softcap).tanh()
    after = formula.after
    return z if isinstance(after, float) and after == 1.0 else z * _of_rows(after, rows, length, z.dtype)


def _masked(z: Tensor, formula: Formula, visible: Tensor) -> Tensor:
    fill, stored = formula.fill * formula.fill_by, formula.logits_dtype or "float32"
    if math.isnan(fill):  # infinity times 0
        fill = float("-inf")
    if FLOAT32_MOST < abs(formula.fill) < float("inf"):  # of a side that computes in float64
        stored = "float64"
    if not formula.fill_added or math.isinf(fill):
        return torch.where(visible, z, float(rounded(torch.tensor(fill, dtype=torch.float64), stored)))
    return torch.where(visible, z, rounded(z + fill, stored).to(z.dtype))


def _of_rows(
    value: Tensor | float, rows: slice | None, length: int, dtype: torch.dtype = torch.float64
) -> Tensor | float:
    """The rows of what broadcasts to (B, Hq, L, S)."""
    return _rows(value, rows, length).to(dtype) if isinstance(value, Tensor) else value


def _rows(value: Tensor, rows: slice | None, length: int) -> Tensor:
    return value[..., rows, :] if rows is not None and value.ndim > 1 and value.shape[-2] == length != 1 else value
