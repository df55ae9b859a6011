"""The gradients of an attention's formula in float64, and how far rounding may move those of a run.

With s = q k^T, z = terms(s), p = softmax(z), m = kept / (1 - rate), o = (p m) v, and cotangents dO of o, dlse of lse:

    dp = (dO v^T) m        D = rowsum(p dp)        dz = p (dp - D + dlse)
    ds = dz through the terms        dq = ds k        dk = ds^T q        dv = (p m)^T dO
    dsink = -rowsum over rows of p_sink D        d log(scale) = sum of ds s

Rounding. A logit is off by its product's sum, (E + 2) u |q| |k|^T, and by a rounding at each term; a weight by a factor
of exp of that; each product of matrices by n u of the sum of its absolute values. These add up, as a summation order
may be the same in every row. What is stored in half precision is rounded independently in every entry, so that these
errors add in squares. No bound is measured.

Rows are computed in blocks: memory is linear in the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.backward.logits import (
    BOTTOM,
    RIGHT_FORMULA,
    Change,
    FormulaBlock,
    extra_unit,
    formula_logits,
    formula_weights,
    is_written_out,
    near_maxima,
    through_dtype,
    units_of,
    without,
)
from sqrtdk.tracing.tensors import CallTensors

LOGITS_PER_BLOCK = 2**19  # entries of one block of logits
_SLACK = 4.0  # for the order of sums, fused operations, and a forward that the backward pass computes again
_EXPONENTIALS = 16.0  # roundings of exp, log and tanh of a vector library together
_LEAST_NORMAL = torch.finfo(torch.float32).tiny  # a weight below has few digits, or is 0: exp(-100) behind a mask
_MOST_EXPONENT = 500.0  # 0 times its exponential is 0: a logit of -1e10 hides its key, and may be off by thousands
_FEW_BITS = 2.0**-13  # error of the exponential in torch's half-precision kernels, which use a short polynomial


@dataclass(slots=True, eq=False)
class FormulaGradients:
    """FormulaGradients by name, in float64, with bounds on rounding.

    Attributes:
        values: "q" (B, Hq, L, E); "k" and "v" (B, Hq, S, .) for each query head; "sinks" (Hq,); "scale" (Hq,), that of
            the logarithm of a factor on the logits; "bias N" in the shape of the N-th term; "logits" (B, Hq, L, S).
        sums: Bounds on errors that add up, in the same shapes.
        squares: Bounds on variances of errors that are independent, in the same shapes.
        unit: Largest relative error of one rounding of a result.
        floor: Largest absolute error of one rounding below the least normal number.
        looked: (B, Hq), the heads that were computed.
    """

    values: dict[str, Tensor]
    sums: dict[str, Tensor]
    squares: dict[str, Tensor]
    unit: float
    floor: float
    looked: Tensor = field(default_factory=lambda: torch.zeros(0))

    def of(self, name: str, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a gradient and the largest rounding error, summed over the query heads of a group for k and v.

        Args:
            name: A key of `values`.
            heads: Heads of the vector; None sums nothing.
        """
        value, added, squared = self.values[name], self.sums[name], self.squares[name]
        if heads is not None and heads != value.shape[1]:
            value, added, squared = (x.reshape(len(x), heads, -1, *x.shape[2:]).sum(2) for x in (value, added, squared))
        return value, added + _SLACK * squared.sqrt() + 4 * (self.unit * value.abs() + self.floor)


def formula_gradients(
    call: CallTensors, cotangent: Tensor, lse_cotangent: Tensor | None = None, change: Change = RIGHT_FORMULA, *,
    biases: tuple[int, ...] = (), most: int | None = None, turn: int = 0, logits: bool = False,
) -> FormulaGradients:  # fmt: skip
    """Return the gradients of an attention's formula.

    Args:
        call: The attention, with all its terms.
        cotangent: dO, (B, Hq, L, Ev).
        lse_cotangent: dlse, (B, Hq, L), of the log-sum-exp over the keys alone; None for zero.
        change: What is done otherwise.
        biases: Numbers of the terms that are biases and whose gradient is wanted.
        most: Logits that are computed at most: some heads of some samples then stand for all. None: all.
        logits: Whether the gradient of the logits that enter the softmax is wanted, (B, Hq, L, S).
        turn: Where to begin among the heads, so that others stand for all the next time.
    """
    device = call.query.values.device
    batch, heads, rows, width = call.query.values.shape
    columns, values_width = call.key.values.shape[2], call.value.values.shape[3]
    shapes: dict[str, tuple[int, ...]] = {
        "q": (batch, heads, rows, width),
        "k": (batch, heads, columns, width),
        "v": (batch, heads, columns, values_width),
        "scale": (heads,),
    }
    terms = call.terms or ()
    if any(term.name == "sinks" for term in terms):
        shapes["sinks"] = (heads,)
    for number in biases:
        shapes[f"bias {number}"] = _four(terms[number].value)
    if logits:
        shapes["logits"] = (batch, heads, rows, columns)
    values, sums, squares = (
        {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        for _ in range(3)
    )
    units = units_of(call)
    looked = torch.zeros(batch, heads, dtype=torch.bool, device=device)
    found = FormulaGradients(values, sums, squares, units.half, units.floor, looked)
    for place in _places(batch, heads, call.key.values.shape[1], rows, columns, most, turn):
        found.looked[place[0], place[1]] = True
        _add_block(FormulaBlock(call, cotangent, lse_cotangent, change, place, units), found, biases)
    return found


def _places(
    batch: int, heads: int, key_heads: int, rows: int, columns: int, most: int | None, turn: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of samples, heads and rows: at most `LOGITS_PER_BLOCK` logits in each, or one row of one group."""
    if batch * heads * rows * columns <= min(LOGITS_PER_BLOCK, most or LOGITS_PER_BLOCK):
        yield slice(0, batch), slice(0, heads), slice(0, rows)
        return
    group = heads // key_heads
    pairs = [(b, h) for b in range(batch) for h in range(key_heads)]
    count = len(pairs) if most is None else max(1, min(len(pairs), most // (group * rows * columns)))
    step = max(1, LOGITS_PER_BLOCK // (group * columns))
    # Each pair once; 0.618: samples and heads both change from one pair to the next. A turn goes on where one ended.
    pairs.sort(key=lambda pair: (pair[0] * key_heads + pair[1]) * 0.6180339887 % 1)
    for number in range(turn * count, turn * count + count):
        b, h = pairs[number % len(pairs)]
        for start in range(0, rows, step):
            yield slice(b, b + 1), slice(h * group, (h + 1) * group), slice(start, min(start + step, rows))


def _add_block(block: FormulaBlock, found: FormulaGradients, biases: tuple[int, ...]) -> None:
    call, change, u = block.call, block.change, block.units
    samples, heads, rows = block.place
    q = call.query.values[block.place].detach().to(torch.float64)
    k, v = block.vector(call.key.values), block.vector(call.value.values)
    d_out = block.cotangent[block.place].to(torch.float64)
    d_out = through_dtype(d_out, change.dtype) if change.rounded == "cotangent" else d_out
    true = formula_logits(block, q, k, RIGHT_FORMULA)
    changed = true if change is RIGHT_FORMULA else formula_logits(block, q, k, change)
    right = formula_weights(true, true)
    p = (
        right
        if change is RIGHT_FORMULA
        else change.gain * formula_weights(changed, changed if change.own_sum else true)
    )
    p = through_dtype(p, change.dtype) if change.rounded in ("weights", "softmax") else p
    keep = torch.ones((), dtype=torch.float64, device=p.device)
    if call.kept is not None:
        keep = block.at(call.kept).to(torch.float64) / (1 - call.dropout)
    used = keep if "dropout" not in change.without else torch.ones_like(keep)
    plain = d_out @ v.mT
    dp = plain * used
    if change.own_delta and change.rounded != "output":
        delta = (p * dp).sum(-1, keepdim=True) if change.delta_summed else p * dp
    else:
        output = (right * keep) @ v
        output = through_dtype(output, change.dtype) if change.rounded == "output" else output
        delta = (d_out * output).sum(-1, keepdim=True)
    delta = change.delta * delta
    dz = p * (change.numerator * dp - delta)
    if block.lse_cotangent is not None:
        seen = p
        if true.sinks is not None:  # lse is that of the keys alone
            seen = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
        dz = dz + change.lse * seen * block.lse_cotangent[block.place].to(torch.float64)[..., None]

    # Bounds: relative error of p, of dp, of D; then of dz.
    tiny = _EXPONENTIALS * u.sums
    hidden = true.z <= BOTTOM
    e = _SLACK * true.sums.masked_fill(hidden, 0.0) + tiny
    relative = e.add_((right * e).sum(-1, keepdim=True)).clamp_max_(_MOST_EXPONENT).expm1_()
    extra = extra_unit(u.half, u.sums)
    sizes = d_out.abs() @ v.abs().mT * used
    n = v.shape[-1] + 3
    of_p = p * relative + _LEAST_NORMAL
    off_delta = (of_p * sizes).sum(-1, keepdim=True) + n * u.sums * (p * sizes).sum(-1, keepdim=True)
    off = of_p * (dp - delta).abs() + p * (n * u.sums * sizes + off_delta) + 8 * u.sums * dz.abs() + _LEAST_NORMAL
    none = torch.zeros((), dtype=torch.float64, device=p.device)
    e2 = delta2 = off2 = none  # without half precision there are no such errors, and nothing is computed
    if extra:
        e2 = true.squares.masked_fill(hidden, 0.0) + (2 * extra**2 + _FEW_BITS**2)
        e2 = e2 + (right**2 * e2).sum(-1, keepdim=True)
        delta2 = ((p * dp) ** 2 * e2).sum(-1, keepdim=True)
        delta2 = delta2 + extra**2 * ((d_out * ((right * keep) @ v)) ** 2).sum(-1, keepdim=True)
        gap2 = (dp - delta) ** 2
        off2 = p**2 * (gap2 * e2 + extra**2 * dp**2) + extra**2 * dz**2 + u.floor**2 * (1 + gap2)
        if is_written_out(call):
            # The sum has a gradient of its own, and a maximum gets what roundings leave of the row.
            delta2 = delta2 + (extra * delta) ** 2
            off2 = off2 + near_maxima(call, true) * (off2.sum(-1, keepdim=True) + delta2)
    if block.lse_cotangent is not None:
        off = off + of_p * block.lse_cotangent[block.place].to(torch.float64).abs()[..., None]

    dz = without(dz, change, rows)
    off_z, off2_z = off, off2
    at_bias: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    ds, common = dz, p
    for name, number, by in reversed(changed.steps):
        if name == "mask" and by is not None:
            ds, off, common = (x.masked_fill(~by, 0.0) for x in (ds, off, common))
            off2 = off2.masked_fill(~by, 0.0) if extra else none
        elif name == "scale":
            size = by.abs() if isinstance(by, Tensor) else abs(by)
            off2 = off2 * size**2 + (extra * ds * by) ** 2 if extra else none
            ds, off, common = ds * by, off * size, common * by
        elif name == "softcap":
            slope, slope_off, slope_off2 = by
            off = off * slope.abs() + ds.abs() * slope_off
            off2 = off2 * slope**2 + (ds * slope_off2) ** 2 if extra else none
            ds, common = ds * slope, common * slope
        elif name == "bias":
            at_bias[number] = ds, off, (off2 + delta2 * common**2).expand_as(ds)
    u_sum = u.sums
    if "logits" in found.values:
        found.values["logits"][block.place], found.sums["logits"][block.place] = dz, off_z
        found.squares["logits"][block.place] = off2_z + delta2 * p**2
    with_delta2 = off2 + delta2 * common**2 if extra else none

    def put(name: str, at: Any, value: Tensor, added: Tensor, squared: Tensor) -> None:
        for into, part in ((found.values, value), (found.sums, added), (found.squares, squared)):
            into[name][at] += part

    def product(name: str, at: Any, w: Tensor, w_off: Tensor, w_off2: Tensor, x: Tensor) -> Tensor:
        value, sizes = w @ x, x.abs()
        added = (w_off + (w.shape[-1] + 3) * u_sum * w.abs()) @ sizes
        put(name, at, value, added, w_off2 @ x**2 if extra else none)
        return value

    k_used, q_used = k, q
    dq = product("q", (samples, heads, rows), ds, off, off2, k_used)
    if extra:
        found.squares["q"][samples, heads, rows] += delta2 * (common @ k) ** 2 + (extra * dq) ** 2
    dk = product("k", (samples, heads), ds.mT, off.mT, with_delta2.mT if extra else none, q_used)
    found.squares["k"][samples, heads] += (extra * dk) ** 2
    w = p * used if change.logits_alone else without(p * used, change, rows)
    w_off2 = (w**2 * e2 + u.floor**2).mT if extra else none
    dv = product("v", (samples, heads), w.mT, (w * relative + _LEAST_NORMAL).mT, w_off2, d_out)
    found.squares["v"][samples, heads] += (extra * dv) ** 2

    of_scale, others = dq * q, (0, 2, 3)
    added = (found.sums["q"][samples, heads, rows] * q.abs()).sum(others) + 64 * u_sum * of_scale.abs().sum(others)
    squared = (with_delta2 @ k**2 * q**2).sum(others) if extra else none
    put("scale", heads, of_scale.sum(others), added, squared)
    if "sinks" in found.values:
        rest = 0.0 * delta if changed.sinks is None else 1.0 - p.sum(-1, keepdim=True)
        of_sinks = (-rest * delta)[..., 0]
        bound = rest * off_delta + delta.abs() * (relative.amax(-1, keepdim=True) * rest.clamp_min(0.0) + 16 * u_sum)
        square = (rest**2 * (delta2 + delta**2 * e2.amax(-1, keepdim=True)))[..., 0].sum((0, 2)) if extra else none
        put("sinks", heads, of_sinks.sum((0, 2)), bound[..., 0].sum((0, 2)), square)
    terms = call.terms or ()
    for number in biases:
        if number in at_bias:
            shape = _four(terms[number].value)
            whole = (*call.query.values.shape[:3], call.key.values.shape[2])
            axes = [axis for axis in range(4) if shape[axis] == 1 and whole[axis] != 1]
            at = tuple(slice(0, 1) if axis in axes else part for axis, part in enumerate((*block.place, slice(None))))
            g, g_off, g_off2 = (x.sum(axes, keepdim=True) if axes else x for x in at_bias[number])
            size = at_bias[number][0].abs().sum(axes, keepdim=True) if axes else g.abs()
            put(f"bias {number}", at, g, g_off + 64 * u_sum * size, g_off2)


def _four(value: Any) -> tuple[int, ...]:
    """Return the shape of a value with four axes."""
    shape = tuple(value.shape)
    return (1,) * (4 - len(shape)) + shape
