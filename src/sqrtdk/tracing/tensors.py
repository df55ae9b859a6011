"""What an attention computed with: its tensors, in one layout whatever the layout of the code was.

q (B, Hq, L, E), k (B, H, S, E), v (B, H, S, Ev), output (B, Hq, L, Ev); where H is less than Hq, query head i reads key
head i // (Hq / H). A reading in the records tells what ran; the tensors here let it be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.stats import RowStats
from sqrtdk.tracing.records import AttentionCall

if TYPE_CHECKING:
    from jaxtyping import Float

TOKENS = 64  # that norms and projections are compared on


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """input @ weight.T + bias, of one of q, k and v, as its heads have it.

    Attributes:
        name: of the weight, "layers.0.self_attn.q_proj.weight"; "" where it is no parameter.
        input: (B, L, D), what was projected.
        weight: (H, E, D), of its own dtype; None if it is not known.
        bias: (H, E); None if there is none, or it is not known.
        features: (H, E), the number of each feature in what the projection gave: those of a fused one are apart, those
            of a repeated head the same.
        part: the weight, and the features in it, are those that this rank has of it (tensor parallel).
    """

    name: str
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    features: Tensor
    part: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Waypoint:
    """What a vector was after one step between projection and product.

    Attributes:
        name: "norm", "rope", "rounded" (to a lesser dtype), or "unknown" for a step that the trace could not follow.
        detail: kind of the normalisation ("rms", "layer", "l2"), the dtype, or the operation.
        values: (B, H, L, E); None if they are not known.
        gain: name of the parameter that a "norm" multiplies by, "layers.0.self_attn.q_norm.weight"; "" without one.
    """

    name: str
    detail: str
    values: Tensor | None
    gain: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """q, k or v of one attention.

    Attributes:
        values: as they met: q and k in the product, v with the weights.
        factor: by what they had been multiplied by then, a scale that was folded in, (H, 1, 1) or a number.
        projected: as the projection gave them; None if that is not known.
        steps: between projection and product, in order, but for factors.
        projection: None if it is not known.
    """

    values: Tensor
    factor: Tensor | float = 1.0
    projected: Tensor | None = None
    steps: tuple[Waypoint, ...] = ()
    projection: Projection | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One step from the product to the softmax.

    Attributes:
        name: "scale" (a factor), "softcap" (its number), "bias" (what is added), "mask" (True: visible), "sinks" (one
            logit a head, (Hq,)), "unknown" (an operation that was not followed).
        value: a number, or a tensor that broadcasts to (B, Hq, L, S); None if it is not known.
        detail: of a mask, its kind; of a bias, its name; of what is unknown, the operation; of z * tanh(z / c) in place
            of a softcap, that formula.
        fill: of a mask: the number that was added to, or written over, the logits of hidden keys.
        added: of a mask: it was added.
    """

    name: str
    value: Tensor | float | None
    detail: str = ""
    fill: float = float("-inf")
    added: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CallTensors:
    """The tensors of one attention.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        output: weights . v, (B, Hq, L, Ev).
        terms: from the product of `query.values` and `key.values` to the softmax, in order; None if they are not
            known at all, as in a file whose writer saw no more than q, k, v and the output.
        lse: log of the sum of exponentials of the logits, (B, Hq, L); None if it is not known.
        kept: True where dropout kept the weight, broadcasts to (B, Hq, L, S); None without dropout.
        dropout: its rate.
        dtype: of q at the product, "float32".
        logits_dtype: in which the logits were stored (the accumulator's for a fused kernel).
        weights_dtype: of the weights as they met v.
        missing: why it can't be computed again from these; None if it can.
        call: the record; None if there is none.
    """

    site: str
    index: int
    query: Vector
    key: Vector
    value: Vector
    output: Tensor
    terms: tuple[Term, ...] | None
    lse: Tensor | None = None
    kept: Tensor | None = None
    dropout: float = 0.0
    dtype: str = "float32"
    logits_dtype: str = "float32"
    weights_dtype: str = "float32"
    missing: str | None = None
    call: AttentionCall | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CallRows:
    """The row statistics of one attention, on its device: what a watch sums up over batches and ranks.

    Attributes:
        rows: (Hq, N), the rows of a head over batch and positions.
        max_product: (), the largest |q . k| of a visible key before any scale; None if it was not measured.
        of: rows a head that the call has, of which `rows` may be a sample.
        padding: (), how many of `rows` are padding that a nested batch does not have; None: none.
        query_nonfinite: (), how many numbers of q are NaN or infinite; None if q is not known.
        key_nonfinite: (), of k.
        stored_product: (), the largest |q . k| of any key as the code stored it; None of a kernel that stores none.
    """

    rows: RowStats
    max_product: Tensor | None
    of: int
    padding: Tensor | None = None
    query_nonfinite: Tensor | None = None
    key_nonfinite: Tensor | None = None
    stored_product: Tensor | None = None


def some_tokens(values: Float[Tensor, "B H L E"]) -> Float[Tensor, "1 H N E"]:
    """Evenly chosen rows of all batches, `TOKENS` at most: enough to tell tensors apart.

    Example:
        >>> some_tokens(torch.zeros(8, 2, 100, 4)).shape
        torch.Size([1, 2, 64, 4])
    """
    rows = values.detach().transpose(0, 1).flatten(1, 2)
    count = rows.shape[1]
    if count > TOKENS:
        rows = rows[:, torch.linspace(0, count - 1, TOKENS).long().to(rows.device)]
    return rows.unsqueeze(0)
