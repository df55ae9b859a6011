"""Computes where numbers land when heads are split or merged by a view instead of the right transpose.

`x.view(B, H, L, E)` of (B, L, H E) reads the memory in order: token j is in head j H // L alone. Any transpose may have
been forgotten, so every order of the axes is computed on token numbers; none is recognised by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PROJECTION_PARTS = (1, 2, 3)  # q alone; k and v, or q and k, of one projection; q, k and v of one
MOST_VIEW_ENTRIES = 2**26  # entries of the tensor that is computed for one order


def split_by_view(moved: Tensor, features: int, tokens: int, where: tuple[int, int]) -> bool | None:
    """Return whether the cells of q, k or v that moved with one token are those of a view without its transpose.

    Returns None if heads moved at different rows each, and by no view that is tried.

    Args:
        moved: Whether any feature moved, (B, H, L).
        features: E.
        tokens: Number of tokens in each input sample, N.
        where: Batch and token that were changed.

    Example:
        >>> x = torch.zeros(1, 6, 4)
        >>> x[0, 2] = 1
        >>> moved = x.view(1, 2, 6, 2).any(-1)
        >>> split_by_view(moved, 2, 6, (0, 2)), split_by_view(x.view(1, 6, 2, 2).transpose(1, 2).any(-1), 2, 6, (0, 2))
        (True, False)
    """
    batch, heads, length = moved.shape
    if bool((moved == moved[:, :1]).all()):
        return False  # every head has the token at the same rows, wherever these are
    numel = batch * heads * length * features
    for parts in PROJECTION_PARTS:
        if parts * numel % (batch * tokens) or parts * numel > MOST_VIEW_ENTRIES:
            continue
        width = parts * numel // (batch * tokens)
        sizes = (parts, batch, heads, length, features)
        for entered in _entered(batch, tokens, width, where):
            for cells in _viewed(entered, sizes):
                if any(torch.equal(part, moved) for part in cells.any(-1)):
                    return True
    return None


def merged_by_view(rows: Tensor, sizes: Sequence[int], cells: Tensor, *, channels_first: bool = False) -> int | None:
    """Return how many rows a row of all heads reaches if heads are merged without their transpose, else None.

    Args:
        rows: Whether any channel of an output row moved, (R,); R = B L.
        sizes: B, H, L, E of the attention's output.
        cells: Rows of heads that were changed, (B, H, L).
        channels_first: Heads are merged to (B, H E, L), not to (B, L, H E).

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
    """Return the rows (B L,) that cells reach if heads, in some order of axes, are cut into rows or channels."""
    batch, _, length = cells.shape
    laid = cells[..., None].expand(*cells.shape, features).permute(*order)
    if channels_first:
        return laid.reshape(batch, -1, length).any(1).flatten()
    return laid.reshape(batch * length, -1).any(1)


def merged_right(rows: Tensor, cells: Tensor) -> bool:
    """Return whether every merged row that belongs to a changed row of a head has moved; others may have, too.

    Args:
        rows: Which rows of the merged output moved, (B L,) or (L B,).
        cells: Which rows of single heads were changed, (B, H, L).

    Returns:
        False also if `rows` has not B L entries.
    """
    size = cells.shape[0] * cells.shape[2]
    return rows.numel() == size and any(bool((rows & right).sum() == right.sum()) for right in _right(cells))


def _right(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right rows of (B, L, D), and of (L, B, D)."""
    own = cells.any(1)
    return own.flatten(), own.T.flatten()


def _entered(batch: int, tokens: int, width: int, where: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the input's memory, True at the token's numbers, for (B, N, W) and for (N, B, W)."""
    own = torch.zeros(batch, tokens, dtype=torch.bool)
    own[where] = True
    yield own.flatten().repeat_interleave(width)
    if batch > 1:
        yield own.T.flatten().repeat_interleave(width)


def _viewed(entered: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield the memory read as (parts, B, H, L, E) in every order of these axes."""
    count = len(sizes)
    for order in itertools.permutations(range(count)):
        if sizes[0] == 1 and order[0] != 0:
            continue  # moving an axis of size 1 gives nothing new
        back = [order.index(axis) for axis in range(count)]
        yield entered.view([sizes[axis] for axis in order]).permute(back)
