"""Causes: one a file, each with `NAME` and `suspect(sides)`, which yields the changes that would explain a difference.

The table is in the order in which they are tried: what comes first in an attention comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqrtdk.compare.causes import (
    bias,
    bias_scaled,
    dropout,
    mask_alignment,
    mask_magnitude,
    mask_offset,
    padding,
    rounding,
    scale,
    sinks,
    softcap,
    softcap_order,
    window,
)
from sqrtdk.compare.suspect import Sides, Suspicion

CAUSES: dict[str, Callable[[Sides], Iterator[Suspicion]]] = {
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
