"""A program: all that one side does from the input of an attention to its output, as data.

It is what a cause changes. `explain` runs the program of A on recorded tensors; a cause makes a part of it that of B,
and is proven where the result is B's then. Everything here is float64 but for what names a dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.tracing.probe.rotation import Rotation as Rotation


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A normalisation of q or k.

    Attributes:
        kind: "rms", "layer" or "l2".
        gain: (H or 1, E), 1 where there is none.
        shift: (H or 1, E); None where there is none.
        eps: added to the mean square, to the variance; of "l2" the least length.
        over: "head": the features of one head; "heads": those of all heads of a token.
    """

    kind: str
    gain: Tensor
    shift: Tensor | None = None
    eps: float = 0.0
    over: str = "head"


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A step that is not known: nothing can be computed through it."""

    name: str


@dataclass(frozen=True, slots=True)
class Rounded:
    """The values rounded to a dtype that is less than the side's own.

    Attributes:
        dtype: "float16".
        by: factor of the scale that they had been multiplied by, broadcasts to (B, H, L, E).
    """

    dtype: str
    by: Tensor | float = field(default=1.0, compare=False)


Step = Norm | Rotation | Opaque | Rounded


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A projection: input @ weight.T + bias.

    Attributes:
        name: of the weight.
        weight: (H, E, D).
        bias: (H, E); None where there is none.
        features: (H, E), numbers of the features in what the projection gave.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """What happens to q, k or v from the input to where it is used.

    Attributes:
        affine: None where it is not known; the way begins at the projected values then.
        steps: norms and rotations, in order. The factors that the code put there are in the formula's scale.
        heads: of key and value, for each query head the head that it reads, (Hq,); None for the query.
        scaled: by what the values are off, a quantised cache whose scale was applied twice or not at all, (H, 1, 1).
    """

    affine: Affine | None = None
    steps: tuple[Step, ...] = ()
    heads: Tensor | None = None
    scaled: Tensor | float = 1.0


@dataclass(frozen=True, slots=True)
class Own:
    """How a side computes what it rounds to a lesser dtype afterwards.

    Attributes:
        dtype: of q and k at their product, "float32".
        query: factor of the scale that q was multiplied by before the product.
        key: the same of k.
    """

    dtype: str
    query: Tensor | float = 1.0
    key: Tensor | float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """What makes weights of a product: scale, softcap, bias, mask, sinks, in the order that `softcap_at` says.

    z = scale * q.k; z = cap * tanh(z / cap); z = z + bias * bias_by; z = fill where hidden; softmax(z, sinks).

    Attributes:
        scale: broadcasts to (B, Hq, L, S): all factors of q, k and logits before the cap, and those after it where
            there is none.
        softcap: None where there is none.
        softcap_at: "scaled": after the scale, before bias and mask; "product": before the scale; "masked": after bias
            and mask.
        softcap_by_logits: it is z * tanh(z / cap), the logits in the place of the cap.
        after: factor after the softcap ("product": the scale is here; else 1).
        bias: what is added, broadcasts to (B, Hq, L, S), as it was before any factor; None where there is none.
        bias_name: "alibi", "relative", "bias".
        bias_by: factor that multiplied the bias after it was added.
        visible: True where the row sees the key, broadcasts to (B, Hq, L, S); None where every key is seen.
        mask: kind of the mask, as records have it.
        fill: what hidden keys have in place of their logits (-inf), or what was added to them.
        fill_by: factor that multiplied the mask after it was added.
        fill_added: a finite fill was added to the logits of hidden keys; else it stands in their place. Only a row that
            sees no key, and a fill that is not far below the logits, tell the two apart.
        sinks: (Hq,), logits that take weight and have no value; None where there are none.
        kept: True where dropout kept the weight; None without dropout.
        dropout: its rate.
        weights_dtype: the weights are rounded to this dtype; None: as fine as the side's own.
        logits_dtype: the logits are; None as above.
        own: how what is rounded so is computed; None: in float64.
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
    own: Own | None = None
    softcap_by_logits: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All of one side.

    Attributes:
        query: the way of q.
        key: the way of k.
        value: the way of v.
        formula: None where it is not known.
        unknown: what is not known of it, for a reader; empty where all is.
        dtype: in which the side computes, for the rounding that is allowed.
    """

    query: Way
    key: Way
    value: Way
    formula: Formula | None
    unknown: tuple[str, ...] = ()
    dtype: torch.dtype = field(default=torch.float32)
