"""Causes: one a file, each with `NAME` and `suspect(pair)`, which yields the changes that would explain a difference.

The table is in the order in which they are tried: what comes first in an attention comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqrtdk.compare.causes import (
    bias,
    bias_scaled,
    dropout,
    group_order,
    head_order,
    kv_scale,
    length_factor,
    mask_alignment,
    mask_magnitude,
    mask_offset,
    padding,
    positions,
    projection_bias,
    qk_norm,
    qk_norm_axis,
    qk_norm_eps,
    qk_norm_order,
    rope_base,
    rope_layout,
    rope_missing,
    rope_partial,
    rounding,
    scale,
    sinks,
    softcap,
    softcap_order,
    weights,
    window,
)
from sqrtdk.compare.suspect import Sides, Suspicion

CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
    # from the input to the product
    head_order.NAME: head_order.suspect,
    weights.NAME: weights.suspect,
    projection_bias.NAME: projection_bias.suspect,
    qk_norm.NAME: qk_norm.suspect,
    qk_norm_order.NAME: qk_norm_order.suspect,
    qk_norm_axis.NAME: qk_norm_axis.suspect,
    qk_norm_eps.NAME: qk_norm_eps.suspect,
    rope_missing.NAME: rope_missing.suspect,
    rope_partial.NAME: rope_partial.suspect,
    rope_layout.NAME: rope_layout.suspect,
    rope_base.NAME: rope_base.suspect,
    positions.NAME: positions.suspect,
    length_factor.NAME: length_factor.suspect,
    kv_scale.NAME: kv_scale.suspect,
    group_order.NAME: group_order.suspect,
    # from the product to the output
    scale.NAME: scale.suspect,
    softcap.NAME: softcap.suspect,
    softcap_order.NAME: softcap_order.suspect,
    bias_scaled.NAME: bias_scaled.suspect,
    bias.NAME: bias.suspect,
    mask_alignment.NAME: mask_alignment.suspect,
    mask_offset.NAME: mask_offset.suspect,
    window.NAME: window.suspect,
    padding.NAME: padding.suspect,
    mask_magnitude.NAME: mask_magnitude.suspect,
    sinks.NAME: sinks.suspect,
    rounding.NAME: rounding.suspect,
    dropout.NAME: dropout.suspect,
}
