"""A band along the diagonal, row i sees keys i - below to i + above: its name from its bounds, and its mask."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 2**28  # elements of a mask, one byte each


def kind(rows: int, columns: int, above: int | None, below: int | None) -> str | None:
    """What `masks.pattern` calls the band's mask, without the mask; None where it hides no key."""
    right = columns - 1 if above is None else min(above, columns - 1)
    left = rows - 1 if below is None else min(below, rows - 1)
    if (left, right) == (rows - 1, columns - 1):
        return None
    if rows == 1 or right < -left:
        return "padding"  # every row sees the same
    if columns == 1:
        return "causal"  # as good a name as any for what one key's rows see
    if left == rows - 1 and right in (0, columns - rows):
        return "causal" if right == 0 else "causal_lower_right"
    shift = columns - rows
    return "window" if shift - right >= 0 or shift + left < rows - 1 else "mask"


def mask(rows: int, columns: int, above: int | None, below: int | None, device: torch.device) -> Tensor:
    """(1, 1, L, S) bool, True where the row sees the key."""
    band = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device)
    if above is not None:
        band = band.tril_(above)
    return band if below is None else band.triu_(-below)
