"""The tensors of an attention, in one layout whatever layout the model's code uses.

q (B, Hq, L, E), k (B, H, S, E), v (B, H, S, Ev), output (B, Hq, L, Ev). If H is less than Hq, query head i reads key
head i // (Hq / H). The records describe what ran; with the tensors here it can be computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.stats import RowStats
from sqrtdk.tracing.records import AttentionCall

if TYPE_CHECKING:
    from jaxtyping import Float

TOKENS = 64  # tokens on which norms and projections are compared


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The projection of q, k or v, input @ weight.T + bias, with its features arranged by head.

    Attributes:
        name: Name of the weight, such as "layers.0.self_attn.q_proj.weight"; "" if it is not a parameter.
        input: (B, L, D), the projected tensor.
        weight: (H, E, D), in its own dtype; None if unknown.
        bias: (H, E); None if absent or unknown.
        features: (H, E), index of each feature in the projection's output. In a fused projection q, k and v have
            different indices; repeated heads have equal ones.
        part: Whether the weight and its features are this rank's share of a tensor-parallel weight.
    """

    name: str
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    features: Tensor
    part: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Waypoint:
    """The values of a vector after one step between its projection and the product.

    Attributes:
        name: "norm", "rope", "rounded" (to a dtype of fewer bits), or "unknown" for a step that could not be followed.
        detail: Kind of the normalisation ("rms", "layer", "l2"), the dtype, or the operation.
        values: (B, H, L, E); None if unknown.
        gain: Name of a norm's gain, such as "layers.0.self_attn.q_norm.weight"; "" without one.
    """

    name: str
    detail: str
    values: Tensor | None
    gain: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """q, k or v of one attention.

    Attributes:
        values: The operand of the product: q . k for q and k, weights . v for v.
        factor: Factors already contained in `values`, such as a scale on q; a number or (H, 1, 1).
        projected: The projection's output; None if unknown.
        steps: Steps between projection and product, in order, without factors.
        projection: The projection; None if unknown.
        lines: Source lines "myport.py:14" on the way from the projection: "projection"; "split", where features become
            heads; "grouped", where the heads of q become groups; "order", where heads are picked in another order;
            "repeat", where k or v is repeated for query heads. Empty in a file.
        viewed: (B, L, D), what enters a projection of which heads are a view, `y.view(B, H, L, E)`: each number of them
            is another token's feature. None for any other, and in a file.
    """

    values: Tensor
    factor: Tensor | float = 1.0
    projected: Tensor | None = None
    steps: tuple[Waypoint, ...] = ()
    projection: Projection | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    viewed: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One step from the product to the softmax.

    Attributes:
        name: "scale" (a factor), "softcap" (its cap), "bias" (an addend), "mask" (True: visible), "sinks" (one logit
            per head, (Hq,)), or "unknown" (an operation that was not followed).
        value: A number, or a tensor that broadcasts to (B, Hq, L, S); None if unknown.
        detail: The kind of a mask, the name of a bias, the name of an unknown operation, or the formula
            z * tanh(z / c) that was used in place of a softcap.
        fill: For a mask, the number that was added to, or written over, the logits of hidden keys.
        added: For a mask, whether it was added.
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
        site: Module path.
        index: 0-based index among the attentions at this site.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        output: weights . v, (B, Hq, L, Ev).
        terms: Steps from the product of `query.values` and `key.values` to the softmax, in order; None if all are
            unknown, as in a file that holds only q, k, v and the output.
        lse: Log of the sum of exponentials of the logits, (B, Hq, L); None if unknown.
        kept: True where dropout kept the weight, broadcasts to (B, Hq, L, S); None without dropout.
        dropout: Dropout rate.
        dtype: Dtype of q at the product, such as "float32".
        logits_dtype: Dtype of the stored logits, or of the accumulator in a fused kernel.
        weights_dtype: Dtype of the weights in the product with v.
        missing: Reason why the output can't be computed again from these tensors; None if it can.
        call: The record; None if there is none.
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
    """The row statistics of one attention, on its device. A watch merges them over batches and ranks.

    Attributes:
        rows: (Hq, N), statistics of each head's rows over batch and positions.
        max_product: (), largest |q . k| of a visible key before any scale; None if not measured.
        total_rows: Number of rows per head in the call; `rows` may be a sample of them.
        padding: (), number of `rows` that pad a nested batch; None means zero.
        query_nonfinite: (), number of NaN or infinite elements of q; None if q is unknown.
        key_nonfinite: (), the same for k.
        stored_product: (), largest |q . k| over all keys as stored by the code; None for a kernel that stores none.
    """

    rows: RowStats
    max_product: Tensor | None
    total_rows: int
    padding: Tensor | None = None
    query_nonfinite: Tensor | None = None
    key_nonfinite: Tensor | None = None
    stored_product: Tensor | None = None


def some_tokens(values: Float[Tensor, "B H L E"]) -> Float[Tensor, "1 H N E"]:
    """Return at most `TOKENS` evenly spaced rows over all batches, which is enough to tell tensors apart.

    Example:
        >>> some_tokens(torch.zeros(8, 2, 100, 4)).shape
        torch.Size([1, 2, 64, 4])
    """
    rows = values.detach().transpose(0, 1).flatten(1, 2)
    count = rows.shape[1]
    if count > TOKENS:
        rows = rows[:, torch.linspace(0, count - 1, TOKENS).long().to(rows.device)]
    return rows.unsqueeze(0)
