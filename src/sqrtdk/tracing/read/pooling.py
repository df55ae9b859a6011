"""Q or k pooled over rows: by a mean or a maximum, or by a convolution of each channel (MViT, Restormer)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, replay

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

    Follow = Callable[[Node, str], Side]

POOLS = frozenset(
    {
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
    }
)
REDUCTIONS = frozenset({"mean", "amax", "max"})  # over rows, for which the factors before them go on
_GREATEST = frozenset({"amax", "max", "max_pool2d_with_indices", "max_pool3d_with_indices"})


def pooled(node: Node, main: Node, where: str, follow: Follow) -> Side | None:
    """The side of a mean or a maximum over rows; None of one over channels, and of one that turns factors around."""
    if node.op in REDUCTIONS and not _over_rows(node, main):
        return None
    side = follow(main, where)
    if node.op in _GREATEST and not all(factor.value is None or factor.value > 0 for factor in side.factors):
        return None
    basis = None if side.basis is None or side.moves else replay(node, side.basis)
    return side.then(Stage(where, "pool", node.op), basis=basis)


def _over_rows(node: Node, main: Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and all(d % len(main.shape) != len(main.shape) - 1 for d in dims or ())


def convolved(node: Node, where: str, follow: Follow) -> Side | None:
    """The side of a convolution of each channel that a projection fed; None where it is the projection itself."""
    before = follow(node.branches[0][0], where)
    projected = before.root is not None and before.root.op in {*ops.CONTRACTIONS, *ops.PROJECTIONS}
    if not projected or before.unknown or before.moves or before.norm:
        return None
    shrinks = math.prod(node.shape) < math.prod(node.branches[0][0].shape)
    side = before.then(Stage(where, "pool" if shrinks else "convolution", node.label))
    return replace(side, root=node, basis=node.value if before.factor == 1.0 else None)
