"""Sizes that make small calls many programs and blocks; for `monkeypatch.setattr`."""

from __future__ import annotations

from typing import Any

from sqrtdk.impl.gpu.configs import Backward, Config

TILE = 16
TINY = Config(TILE, TILE, 4, 1)
LAUNCH = "sqrtdk.impl.gpu.launch"
SMALL: dict[str, Any] = {
    f"{LAUNCH}.forward_config": lambda *args: TINY,
    "sqrtdk.impl.gpu.gradients.backward_config": lambda *args: Backward(TINY, TINY),
    f"{LAUNCH}.SHORTEST_PART": TILE,
    f"{LAUNCH}.LARGEST_PACKED": 40,
}
