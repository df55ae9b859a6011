"""Sizes that make tiny calls many blocks, so that no implementation but the dense one sees a call at once."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "sqrtdk.impl.rows": {"block_rows": lambda call: 3},
    "sqrtdk.stats._sweep": {"TILE": 40, "MOST_TILE_KEYS": 5},
    "sqrtdk.stats.tiles": {"SCATTER_COST": 0.0},
}
