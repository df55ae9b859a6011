"""Where numbers land when heads are split or merged by a view, in any order of the axes but the one that is meant.

`x.view(B, H, L, E)` of (B, L, H E) takes the memory as it lies: token j is in head j H // L alone. The transpose that
was forgotten may be any, so every order of the axes is computed, on numbers of tokens; none is known by a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PARTS = (1, 2, 3)  # q alone; k and v, or q and k, of one projection; q, k and v
MOST = 2**26  # entries of what is computed for one order


def split_by_view(moved: Tensor, features: int, tokens: int, where: tuple[int, int]) -> bool | None:
    """Whether the cells of q, k or v that moved with one token are those of a view without its transpose.

    None where heads moved at other rows each, and by no view that is known.

    Args:
        moved: (B, H, L), whether any feature there moved.
        features: E.
        tokens: of each sample that entered, N.
        where: batch and token that were changed.

    Example:
        >>> x = torch.zeros(1, 6, 4)
        >>> x[0, 2] = 1
        >>> moved = x.view(1, 2, 6, 2).any(-1)
        >>> split_by_view(moved, 2, 6, (0, 2)), split_by_view(x.view(1, 6, 2, 2).transpose(1, 2).any(-1), 2, 6, (0, 2))
        (True, False)
    """
    batch, heads, length = moved.shape
    if bool((moved == moved[:, :1]).all()):
        return False  # every head has it at the same rows, wherever that is
    numel = batch * heads * length * features
    for parts in PARTS:
        if parts * numel % (batch * tokens) or parts * numel > MOST:
            continue
        width = parts * numel // (batch * tokens)
        sizes = (parts, batch, heads, length, features)
        for entered in _entered(batch, tokens, width, where):
            for cells in _viewed(entered, sizes):
                if any(torch.equal(part, moved) for part in cells.any(-1)):
                    return True
    return None


def merged_by_view(rows: Tensor, sizes: Sequence[int], cells: Tensor, *, channels_first: bool = False) -> int | None:
    """Rows of the output that a row of all heads reaches, where heads are merged without their transpose; else None.

    Args:
        rows: (R,), whether any channel of a row moved; R = B L.
        sizes: B, H, L, E of what attention gives.
        cells: (B, H, L), rows of the heads that were changed.
        channels_first: heads are merged to (B, H E, L), not to (B, L, H E).

    Example:
        >>> cells = torch.zeros(1, 2, 6, dtype=torch.bool)
        >>> cells[0, 1, 2] = True
        >>> out = cells[..., None].expand(1, 2, 6, 3)
        >>> merged_by_view(out.reshape(6, 6).any(1), (1, 2, 6, 3), cells)
        2
        >>> merged_by_view(out.transpose(1, 2).reshape(6, 6).any(1), (1, 2, 6, 3), cells)
    """
    batch, _, length, features = sizes
    if rows.numel() != batch * length or merged_right(rows, cells):
        return None
    row = torch.zeros_like(cells)
    row[0, :, length // 2] = True
    for order in itertools.permutations(range(4)):
        reached = [_rows(marked, features, order, channels_first) for marked in (cells, row)]
        if torch.equal(reached[0], rows):
            return int(reached[1].sum())
    return None


def _rows(cells: Tensor, features: int, order: Sequence[int], channels_first: bool) -> Tensor:
    """The rows (B L,) that cells reach when heads in some order are cut into rows, or channels, as they lie."""
    batch, _, length = cells.shape
    laid = cells[..., None].expand(*cells.shape, features).permute(*order)
    if channels_first:
        return laid.reshape(batch, -1, length).any(1).flatten()
    return laid.reshape(batch * length, -1).any(1)


def merged_right(rows: Tensor, cells: Tensor) -> bool:
    """Whether each row that was changed moved its own, wherever else it went."""
    size = cells.shape[0] * cells.shape[2]
    return rows.numel() == size and any(bool((rows & right).sum() == right.sum()) for right in _right(cells))


def _right(cells: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of (B, L, D), and of (L, B, D)."""
    own = cells.any(1)
    return own.flatten(), own.T.flatten()


def _entered(batch: int, tokens: int, width: int, where: tuple[int, int]) -> Iterator[Tensor]:
    """Memory of what entered, True where it is the token's: of (B, N, W) and of (N, B, W)."""
    own = torch.zeros(batch, tokens, dtype=torch.bool)
    own[where] = True
    yield own.flatten().repeat_interleave(width)
    if batch > 1:
        yield own.T.flatten().repeat_interleave(width)


def _viewed(entered: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Memory read as (parts, B, H, L, E) in every order of these axes."""
    count = len(sizes)
    for order in itertools.permutations(range(count)):
        if sizes[0] == 1 and order[0] != 0:
            continue  # an axis of one entry: the same again
        back = [order.index(axis) for axis in range(count)]
        yield entered.view([sizes[axis] for axis in order]).permute(back)
