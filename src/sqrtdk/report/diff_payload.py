"""The data that the page of a comparison draws with its own script: logits of both sides, and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqrtdk.compare.records import MaskPicture, PairDiff, Scatter
from sqrtdk.compare.words import place_of
from sqrtdk.report.diff_fold import PairFold
from sqrtdk.report.plain import plain

_CELLS = frozenset(".+ab")


def payload(folds: Sequence[PairFold]) -> dict[str, Any]:
    """Return what the page's script needs, as JSON-ready data in which every text is made visible.

    Args:
        folds: in the order of the page.

    Returns:
        `folds`: for each, its pairs that have something to draw: a `label`, `heads` (points of the logits, those that
        are not finite counted and left out) and a `picture`.
    """
    return {"folds": [[_pair(pair) for pair in fold.pairs if drawable(pair)] for fold in folds]}


def drawable(pair: PairDiff) -> bool:
    """Whether there are logits or masks to draw."""
    return bool(pair.scatter) or pair.picture is not None


def _pair(pair: PairDiff) -> dict[str, Any]:
    return {
        "label": plain(place_of(pair)),
        "heads": [_points(scatter) for scatter in pair.scatter],
        "picture": None if pair.picture is None else _picture(pair.picture),
    }


def _points(scatter: Scatter) -> dict[str, Any]:
    every = list(zip(scatter.rows, scatter.keys, scatter.a, scatter.b, strict=True))
    points = [point for point in every if math.isfinite(point[2]) and math.isfinite(point[3])]
    return {
        "head": scatter.head,
        "points": [[row, key, _short(a), _short(b)] for row, key, a, b in points],
        "dropped": len(every) - len(points),
    }


def _picture(picture: MaskPicture) -> dict[str, Any]:
    """Rows of one length; a character that is none of the four is as hidden as what is not there."""
    wide = max(map(len, picture.rows), default=0)
    rows = ["".join(cell if cell in _CELLS else "." for cell in row).ljust(wide, ".") for row in picture.rows]
    return {"row": picture.first_row, "key": picture.first_key, "rows": rows}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
