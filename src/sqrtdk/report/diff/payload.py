"""Prepares the data that the script of a comparison's page draws: logits of both sides, and masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sqrtdk.compare.records import MaskPicture, PairDiff, Scatter
from sqrtdk.compare.words import site_of_pair
from sqrtdk.report.diff.fold import PairFold
from sqrtdk.report.json_values import rounded
from sqrtdk.report.plain import plain

_LOGIT_DIGITS = 6  # of a logit
_MASK_CELLS = frozenset(".+ab")


def diff_page_data(folds: Sequence[PairFold]) -> dict[str, Any]:
    """Return the data for the page's script, JSON-ready, with every text passed through `plain`.

    Args:
        folds: the folded pairs in the page's order.

    Returns:
        A dictionary whose `folds` lists, for each fold, its drawable pairs. Each has a `label`, `heads` (finite logits
        as points, and the number of points dropped) and a `picture` of the masks.
    """
    return {"folds": [[_pair(pair) for pair in drawable(fold.pairs)] for fold in folds]}


def drawable(pairs: Iterable[PairDiff]) -> list[PairDiff]:
    """Return the pairs that the page can draw: those with a scatter of logits or a picture of masks."""
    return [pair for pair in pairs if pair.scatter or pair.picture is not None]


def _pair(pair: PairDiff) -> dict[str, Any]:
    return {
        "label": plain(site_of_pair(pair)),
        "heads": [_points(scatter) for scatter in pair.scatter],
        "picture": None if pair.picture is None else _picture(pair.picture),
    }


def _points(scatter: Scatter) -> dict[str, Any]:
    every = list(zip(scatter.rows, scatter.keys, scatter.a, scatter.b, strict=True))
    # a point at infinity would leave all others on one line
    points = [point for point in every if math.isfinite(point[2]) and math.isfinite(point[3])]
    return {
        "head": scatter.head,
        "points": [[row, key, rounded(a, _LOGIT_DIGITS), rounded(b, _LOGIT_DIGITS)] for row, key, a, b in points],
        "dropped": len(every) - len(points),
    }


def _picture(picture: MaskPicture) -> dict[str, Any]:
    """Return the mask picture with rows of equal length. Unknown and missing cells count as hidden in both (".")."""
    wide = max(map(len, picture.rows), default=0)
    rows = ["".join(cell if cell in _MASK_CELLS else "." for cell in row).ljust(wide, ".") for row in picture.rows]
    return {"row": picture.first_row, "key": picture.first_key, "rows": rows}
