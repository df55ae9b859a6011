"""Padding that is seen, and tokens that are hidden: the masks of an attention against the padding of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.tracing.read.masks import band
from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.steps import Hide, Unknown
from sqrtdk.tracing.tell.sight import Sight

# From site, batch, rows, columns and whether it is self-attention to rows (B, L) and keys (B, S), True at a token.
TokensOf = Callable[[str, int, int, int, bool | None], tuple[Tensor, Tensor] | None]


def against_padding(
    reading: Reading, sight: Sight, tokens: TokensOf | None, self_attention: bool | None
) -> tuple[int | None, int | None]:
    """Keys of padding that the row of a token sees in some head, and keys of tokens that no such row sees in any.

    (None, None) where no padding is known, or not all masks are.
    """
    layout = reading.layout
    known = tokens and tokens(reading.site, layout.batch, layout.rows, layout.columns, self_attention)
    visible = _visible(reading, sight) if known else None
    if not known or visible is None:
        return None, None
    rows, keys = (part.to(visible.device) for part in known)
    by_row = visible.any(1).expand(layout.batch, layout.rows, layout.columns)
    seen = (by_row & rows[:, :, None]).any(1)
    return int((seen & ~keys).sum()), int((~seen & keys & rows.any(1, keepdim=True)).sum())


def _visible(reading: Reading, sight: Sight) -> Tensor | None:
    """(B, H, L, S), any of them 1: True where the row sees the key; None where that is not known."""
    if reading.fault is not None or reading.operands is None or reading.carried.remasked:
        return None
    if any(_unread(step) for step in reading.steps):
        return None
    if sight.visible is not None:
        return sight.visible
    if sight.causal:
        return band(reading.layout.rows, reading.layout.columns, 0, reading.device)
    return None if sight.mask is not None else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=reading.device)


def _unread(step: object) -> bool:
    """Whether a step may hide keys that nothing is known of."""
    unread = isinstance(step, Hide) and not step.causal and step.visible is None and step.fill is None
    return unread or isinstance(step, Unknown)
