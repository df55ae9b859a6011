"""A program: everything one side does from the input of an attention to its output, as data.

Causes change programs. `explain` runs A's program on recorded tensors. A cause replaces one part by B's, and is proven
if the result is then B's. All tensors here are float64; rounding is an explicit step with a dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sqrtdk.tracing.probe.rotation import Rotation as Rotation
from sqrtdk.tracing.probe.rotation import halves

QK = ("query", "key")
QKV = ("query", "key", "value")


@dataclass(frozen=True, slots=True, eq=False)
class NormStep:
    """A normalisation of q or k.

    Attributes:
        kind: "rms", "layer" or "l2".
        gain: (H or 1, E), 1 without a gain.
        shift: (H or 1, E); None without a shift.
        eps: added to the mean square or the variance; for "l2", the least length to divide by.
        over: "head": over the features of one head; "heads": over the features of all heads of a token.
    """

    kind: str
    gain: Tensor
    shift: Tensor | None = None
    eps: float = 0.0
    over: str = "head"


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueStep:
    """A step of which only the name is known: nothing can be computed through it.

    Attributes:
        name: name of the step as recorded.
    """

    name: str


@dataclass(frozen=True, slots=True)
class RoundingStep:
    """Values rounded to a dtype that is coarser than the side's own.

    Attributes:
        dtype: name of the dtype, for example "float16".
        by: scale by which the values were multiplied before rounding, broadcasts to (B, H, L, E).
        by_values: the values show it, each exact in the dtype; no step of the code was recorded.
    """

    dtype: str
    by: Tensor | float = field(default=1.0, compare=False)
    by_values: bool = field(default=False, compare=False)


PathStep = NormStep | Rotation | OpaqueStep | RoundingStep


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A projection: input @ weight.T + bias.

    Attributes:
        name: name of the weight.
        weight: (H, E, D).
        bias: (H, E); None without a bias.
        features: (H, E), indices of the features in the output of the projection.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VectorPath:
    """What happens to q, k or v from the input to its use in the attention.

    Attributes:
        affine: the projection; None if unknown, then the path begins at the projected values.
        steps: norms and rotations, in order. Factors that the code applies here are part of the formula's scale.
        heads: for key and value, the head that each query head reads, (Hq,); None for the query.
        scaled: factor by which the values are wrong, (H, 1, 1): a quantised cache scaled twice or not at all.
    """

    affine: Affine | None = None
    steps: tuple[PathStep, ...] = ()
    heads: Tensor | None = None
    scaled: Tensor | float = 1.0


@dataclass(frozen=True, slots=True)
class LogitPrecision:
    """How a side computes logits that it later rounds to a coarser dtype.

    Attributes:
        dtype: dtype of q and k at their product, for example "float32".
        query: part of the scale that multiplied q before the product.
        key: part of the scale that multiplied k before the product.
    """

    dtype: str
    query: Tensor | float = 1.0
    key: Tensor | float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """Turns the product q . k into weights: scale, softcap, bias, mask and sinks, in the order set by `softcap_at`.

    z = scale * q.k; z = cap * tanh(z / cap); z = z + bias * bias_by; z = fill where hidden; softmax(z, sinks).

    Attributes:
        scale: broadcasts to (B, Hq, L, S): all factors of q, k and logits before the softcap; without a softcap, all
            factors.
        softcap: the cap; None without one.
        softcap_at: "scaled": after the scale, before bias and mask; "product": before the scale; "masked": after bias
            and mask.
        softcap_by_logits: the code computes z * tanh(z / cap), with the logits in place of the outer cap.
        after: factor after the softcap (for "product" the scale is here; else 1).
        bias: tensor that is added, broadcasts to (B, Hq, L, S), before any factor; None without a bias.
        bias_name: "alibi", "relative", "bias".
        bias_by: factor that multiplied the bias after it was added.
        visible: True where the row sees the key, broadcasts to (B, Hq, L, S); None if every key is visible.
        mask: kind of the mask, as in records.
        fill: number that replaces the logits of hidden keys (-inf), or that is added to them.
        fill_by: factor that multiplied the mask after it was added.
        fill_added: a finite fill was added to the logits of hidden keys, else it replaces them. The two differ only in
            rows that see no key, or if the fill is not far below the logits.
        sinks: (Hq,), logits that take weight and have no value; None without sinks.
        kept: True where dropout kept the weight; None without dropout.
        dropout: rate of the dropout.
        weights_dtype: dtype to which the weights are rounded; None if it is no coarser than the side's own.
        logits_dtype: dtype to which the logits are rounded; None likewise.
        own: how logits that are rounded so were computed; None: in float64.
    """

    scale: Tensor | float = 1.0
    softcap: float | None = None
    softcap_at: str = "scaled"
    after: Tensor | float = 1.0
    bias: Tensor | None = None
    bias_name: str = "bias"
    bias_by: float = 1.0
    visible: Tensor | None = None
    mask: str = ""
    fill: float = float("-inf")
    fill_by: float = 1.0
    fill_added: bool = False
    sinks: Tensor | None = None
    kept: Tensor | None = None
    dropout: float = 0.0
    weights_dtype: str | None = None
    logits_dtype: str | None = None
    own: LogitPrecision | None = None
    softcap_by_logits: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Everything that one side computes.

    Attributes:
        query: the path of q.
        key: the path of k.
        value: the path of v.
        formula: formula of the weights; None if unknown.
        unknown: what is not known about the formula, as text for the reader; empty if all is known.
        dtype: dtype in which the side computes; it decides how much rounding is allowed.
    """

    query: VectorPath
    key: VectorPath
    value: VectorPath
    formula: Formula | None
    unknown: tuple[str, ...] = ()
    dtype: torch.dtype = field(default=torch.float32)


def layout_order(channels: Tensor, turned: Rotation) -> Tensor:
    """Return channels in the order in which the other rotary layout expects them.

    Args:
        channels: (..., E), laid out for a rotation like `turned`.
        turned: rotation whose layout is "half" or "interleaved"; channels that it does not rotate stay.

    Example:
        >>> layout_order(torch.arange(4), Rotation(torch.ones(1, 1, 2), "half")).tolist()
        [0, 2, 1, 3]
    """
    result, span = channels.clone(), slice(turned.first, turned.first + turned.width)
    other = "interleaved" if turned.layout == "half" else "half"
    for place, part in zip(halves(result[..., span], other), halves(channels[..., span], turned.layout), strict=True):
        place.copy_(part)
    return result


def steps_in_other_layout(steps: tuple[PathStep, ...], order: Tensor) -> tuple[PathStep, ...]:
    """Return the steps that do to channels in another `order`, (E,), what these do: both channels of a pair stay one.

    Checkpoints are converted so: the rows of q and k in the order of the other rotary layout, and that layout.
    """
    relaid: list[PathStep] = []
    for step in steps:
        if isinstance(step, Rotation):
            step = replace(step, layout="interleaved" if step.layout == "half" else "half")
        elif isinstance(step, NormStep):
            gain, shift = (x if x is None or x.shape[-1] == 1 else x[..., order] for x in (step.gain, step.shift))
            step = step if gain is None else replace(step, gain=gain, shift=shift)
        relaid.append(step)
    return tuple(relaid)
