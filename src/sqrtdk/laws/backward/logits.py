"""The logits of a block of rows in float64, as the formula has them or with one thing changed, and their rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.records import IN_BLOCKS
from sqrtdk.tracing.tensors import CallTensors, Term

BOTTOM = -1e30  # a logit below hides its key: masks add the least number of float32, or minus infinity
_WRITTEN_OUT = (IN_BLOCKS, "aten.div")
_TF32 = 2.0**-11  # unit roundoff of TF32


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a faulty backward pass does otherwise than the formula.

    Attributes:
        without: Names of terms that the recomputed logits leave out; "dropout" for the weights without its mask.
        visible: Mask in place of the formula's, broadcasts to (B, Hq, L, S); None leaves it.
        own_sum: Whether the weights are normalised by the changed logits' sum; if not, by the forward's.
        own_delta: Whether D comes of the changed weights; if not, of the forward's output.
        delta: Factor on D: 0 leaves it out.
        numerator: Factor on dp: 0 leaves the gradient that comes through the softmax's denominator, -p D.
        delta_summed: Whether D is the row sum of p dp; if not, each entry has its own p dp.
        lse: Factor on the gradient of lse.
        flat_cap: Whether the slope of the softcap is left out.
        gain: Factor on the weights.
        rows: False for rows of q that are left out, (L,); None for none.
        keys: False for keys that are left out, (S,); None for none.
        logits_alone: Whether `rows` and `keys` are left out of the gradients of the logits alone, and v has them.
        rounded: What is rounded: "qk", "softmax" (q, k, product, logits and weights), "weights", "output" (in D) or
            "cotangent"; "" for nothing.
        dtype: To which dtype.
    """

    without: frozenset[str] = frozenset()
    visible: Tensor | None = None
    own_sum: bool = True
    own_delta: bool = True
    delta: float = 1.0
    numerator: float = 1.0
    delta_summed: bool = True
    lse: float = 1.0
    flat_cap: bool = False
    gain: float = 1.0
    rows: Tensor | None = None
    keys: Tensor | None = None
    logits_alone: bool = False
    rounded: str = ""
    dtype: torch.dtype = torch.bfloat16


RIGHT_FORMULA = Change()


@dataclass(frozen=True, slots=True)
class Units:
    """Largest relative errors of one rounding: of the arithmetic, of stored logits, of other stored tensors.

    `floor` is the largest absolute error of one rounding of a stored tensor below its dtype's least normal number.
    """

    sums: float
    logits: float
    half: float
    floor: float


def units_of(call: CallTensors) -> Units:
    """Return the rounding errors that the dtypes of an attention allow."""
    least = unit_of("float32")  # of float64 as well: transformers computes its softmax in float32
    if call.query.values.is_cuda and call.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        least = _TF32
    stored = call.dtype, call.weights_dtype, str(call.output.dtype).removeprefix("torch.")
    floor = max(floor_of(getattr(torch, name)) for name in stored)
    return Units(least, max(unit_of(call.logits_dtype), least), max(least, *map(unit_of, stored)), floor)


def unit_of(dtype: str) -> float:
    """Return the largest relative error of one rounding: half the machine epsilon of a dtype, by its name."""
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


def floor_of(dtype: torch.dtype) -> float:
    """Return the largest absolute error of one rounding below a dtype's least normal number."""
    return float(torch.finfo(dtype).tiny * torch.finfo(dtype).eps) / 2


@dataclass(slots=True, eq=False)
class FormulaBlock:
    """Some samples, heads and rows of an attention, with the cotangents and what is changed of the formula."""

    call: CallTensors
    cotangent: Tensor
    lse_cotangent: Tensor | None
    change: Change
    place: tuple[slice, slice, slice]
    units: Units

    def vector(self, values: Tensor) -> Tensor:
        """Return k or v of the block's heads, in float64, (b, h, S, E)."""
        heads, own = self.call.query.values.shape[1], values.shape[1]
        number = torch.arange(heads, device=values.device)[self.place[1]] // (heads // own)
        return values[self.place[0]].detach()[:, number].to(torch.float64)

    def at(self, value: Tensor) -> Tensor:
        """Return the block's part of a tensor that broadcasts to (B, Hq, L, S)."""
        whole = (*self.call.query.values.shape[:3], self.call.key.values.shape[2])
        part = torch.broadcast_to(value, whole)[self.place]
        return part if part.dtype == torch.bool else part.to(torch.float64)


@dataclass(slots=True, eq=False)
class BlockLogits:
    """BlockLogits (b, h, r, S), those of sinks (b, h, r, 1), and bounds; `steps` lead back to the product."""

    z: Tensor
    sums: Tensor
    squares: Tensor
    sinks: Tensor | None = None
    steps: list[tuple[str, int, Any]] = field(default_factory=list)


def formula_logits(block: FormulaBlock, q: Tensor, k: Tensor, change: Change) -> BlockLogits:
    """Return the logits of a block of q (b, h, r, E) and k (b, h, S, E), with their rounding and the steps back."""
    u, width = block.units, q.shape[-1]
    if change.rounded in ("qk", "softmax"):
        q, k = (through_dtype(x, change.dtype) for x in (q, k))
    product = q @ k.mT
    if change.rounded == "softmax":
        product = through_dtype(product, change.dtype)
    sizes = q.abs() @ k.abs().mT
    extra = extra_unit(u.logits, u.sums)
    squares = (product * extra) ** 2 if extra else product.new_zeros(())
    out = BlockLogits(product, sizes * (width + 3) * u.sums, squares)
    for number, term in enumerate(block.call.terms or ()):
        if term.name not in change.without:
            _step(block, out, number, term, change)
    if change.rounded == "softmax":
        out.z = through_dtype(out.z, change.dtype)
    return out


def _step(block: FormulaBlock, out: BlockLogits, number: int, term: Term, change: Change) -> None:
    u, value = block.units, term.value
    by: Any = block.at(value) if isinstance(value, Tensor) and term.name != "sinks" else value
    if term.name == "sinks":
        out.sinks = value.to(torch.float64)[block.place[1], None, None].expand(*out.z.shape[:3], 1)  # type: ignore[union-attr]
        return
    if term.name == "mask":
        visible = block.at(change.visible) if change.visible is not None else by.bool()
        out.z = torch.where(visible, out.z, out.z + term.fill if term.added else term.fill)
        out.steps.append(("mask", number, None if term.added and term.fill != -math.inf else visible))
    elif term.name == "scale":
        size = by.abs() if isinstance(by, Tensor) else abs(by)
        out.steps.append(("scale", number, by))
        out.z, out.sums, out.squares = out.z * by, out.sums * size, out.squares * size**2
    elif term.name == "bias":
        out.steps.append(("bias", number, None))
        out.z, out.sums = out.z + by, out.sums + by.abs().nan_to_num(posinf=0.0) * u.sums
        out.squares = out.squares + (by.nan_to_num(posinf=0.0, neginf=0.0) * extra_unit(u.logits, u.sums)) ** 2
    elif term.name == "softcap":
        bent = (out.z / by).tanh()
        slope = 1 - bent**2
        if term.detail:  # z * tanh(z / c)
            slope = bent + out.z / by * slope
        kept = torch.ones_like(slope) if change.flat_cap else slope
        # The slope itself is off by the rounding of tanh, and by that of the logit times its own slope.
        off = (
            4 * u.sums + 2 * bent.abs() * out.sums / by,
            4 * extra_unit(u.logits, u.sums) + 2 * out.squares.sqrt() / by,
        )
        out.steps.append(("softcap", number, (kept, *off)))
        out.z = out.z * bent if term.detail else by * bent
        out.sums, out.squares = out.sums * 1.2, out.squares * 1.44
    plain = out.z.abs().masked_fill(out.z <= BOTTOM, 0.0).nan_to_num(posinf=0.0)
    out.sums = out.sums + plain * u.sums
    if extra_unit(u.logits, u.sums):
        out.squares = out.squares + (plain * extra_unit(u.logits, u.sums)) ** 2


def extra_unit(unit: float, least: float) -> float:
    """Return a unit of half precision, or 0 if it is that of the arithmetic, which is counted among the sums."""
    return unit if unit > least else 0.0


def is_written_out(call: CallTensors) -> bool:
    """Return whether the softmax is no operation of its own: e = exp(z - m), e / e.sum(-1, keepdim=True)."""
    return call.call is not None and call.call.op in _WRITTEN_OUT


def near_maxima(call: CallTensors, out: BlockLogits) -> Tensor:
    """Return 1 at the logits that are the largest of their row within rounding, in each block of keys; 0 elsewhere."""
    near = torch.zeros_like(out.z)
    blocks = call.call.blocks if call.call is not None else ()
    for first, end in [(block.first, block.last + 1) for block in blocks] or [(0, out.z.shape[-1])]:
        z, error = out.z[..., first:end], 4 * out.squares[..., first:end].sqrt()
        near[..., first:end] = (z + error >= (z - error).amax(-1, keepdim=True)).to(z.dtype)
    return near


def through_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float64 tensor after a rounding to a dtype."""
    return x.to(dtype).to(torch.float64)


def formula_weights(out: BlockLogits, of: BlockLogits) -> Tensor:
    """Return exp(z - lse) of the logits `out` with the normaliser of `of`; 0 in rows that see no key."""
    whole = of.z if of.sinks is None else torch.cat([of.z, of.sinks], -1)
    return (out.z - whole.logsumexp(-1, keepdim=True)).exp().nan_to_num(nan=0.0, posinf=0.0)


def without(x: Tensor, change: Change, rows: slice) -> Tensor:
    """Return a block of (b, h, r, S) with 0 in the rows and keys that a change leaves out."""
    x = x if change.rows is None else x * change.rows[rows, None]
    return x if change.keys is None else x * change.keys
