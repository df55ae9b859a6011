"""A draft of a record: what reading an eager or a fused attention gives, before it is put into words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.stats import CallStats
from sqrtdk.trace import masks
from sqrtdk.trace.carried import Carried
from sqrtdk.trace.chain import Chain
from sqrtdk.trace.lineage import Side
from sqrtdk.trace.numeric import Slope
from sqrtdk.trace.records import Factor, Mask


@dataclass(slots=True)
class Layout:
    """Sizes of one attention."""

    batch: int
    heads: int
    rows: int
    columns: int
    width: int
    value_width: int


@dataclass(slots=True)
class Draft:
    """What both kinds of attention give the record."""

    site: str
    kind: str
    op: str
    layout: Layout
    query: Side
    key: Side
    chain: Chain
    fused_factors: list[Factor]
    implicit_causal: bool
    dtype: torch.dtype
    logits_dtype: torch.dtype
    device: torch.device
    score: str | None = None  # where the logits are no product of q and k
    dropout: float = 0.0
    sinks: bool = False  # beside the sum, as no column of the logits
    carried: Carried = field(default_factory=Carried)  # what the weights went through after the softmax
    visible: Tensor | None = None  # (broadcastable to) (B, H, L, S)
    mask_names: dict[int, str] = field(default_factory=dict)
    mask: Mask | None = None
    slope: Slope | None = None
    slope_reason: str | None = None
    stats: CallStats | None = None
    stats_reason: str | None = None
    output_rms: float | None = None
    max_product: float | None = None
    kv_axis: int | None = None  # heads of a key that was not repeated


def looks_ahead(draft: Draft) -> bool:
    """Whether rows may see keys after their own: as many rows as keys, and no causal mask."""
    causal = draft.mask is not None and draft.mask.kind in ("causal", "causal_lower_right")
    return draft.layout.rows == draft.layout.columns and not causal


def root_mean_square(output: Tensor) -> float | None:
    """Size of the weights . v product; None without data."""
    if output.is_meta or not output.numel() or output.is_nested:
        return None
    return float(output.detach().to(torch.float32).square().mean().sqrt())


def scaled_by(chain: Chain, position: int) -> float | None:
    """Product of the factors that came after the step at `position`; None when there were none."""
    product, found = 1.0, False
    for step in chain.steps[position + 1 :]:
        if step.kind == "scale" and step.factor is not None and step.factor.value is not None:
            product, found = product * step.factor.value, True
    return product if found and product != 1.0 else None


def mask_facts(
    draft: Draft, kind: str, form: str, weights: Tensor | None, fill: float | None, factor: float | None
) -> Mask:
    """Counts over (batch, head, row), also where the mask was given once for several of them."""
    assert draft.visible is not None
    layout = draft.layout
    seeing = draft.visible.any(-1)
    blind = int((~seeing.expand(layout.batch, layout.heads, layout.rows)).sum())
    leaked: float | None = None
    if weights is not None and weights.numel():
        hidden = weights.detach().masked_fill(draft.visible[..., : weights.shape[-1]], 0.0).sum(-1)
        leaked = float(hidden.masked_fill(~seeing, 0.0).max())
    finite = fill is not None and math.isfinite(fill)
    whole = draft.visible.expand(*draft.visible.shape[:-2], layout.rows, layout.columns)
    return Mask(kind, form, blind, blind if finite else 0, leaked, fill, factor, **masks.reach(whole))


def causal_mask(rows: int) -> Mask:
    """What `is_causal` of a fused call is, upper-left: every row sees key 0 and its own."""
    return Mask("causal", "implicit", 0, 0, 0.0, -math.inf, least=0, greatest=rows - 1, band=True, ahead_by_one=0)
