"""The arguments of an experiment: its parameters, its randomness, and a way to compute many cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sqrtdk.engines import Cell as Cell

Map = Callable[[Callable[[Cell], dict[str, Any]], Sequence[Cell]], list[dict[str, Any]]]


def here(function: Callable[[Cell], dict[str, Any]], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Compute cells one after the other in this process."""
    return [function(cell) for cell in cells]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an experiment.

    Attributes:
        parameters: by name; `run["samples"]` reads one.
        seed: of everything random.
        map: `run.map(function, cells)` computes cells, perhaps in other processes, and gives the results in order.
            The function is a module's own; cells and results are JSON data. Equal cells are computed once, also
            across claims and across interrupted runs.
    """

    parameters: Mapping[str, Any]
    seed: int = 0
    map: Map = here

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]

    def generator(self, *labels: str | float) -> torch.Generator:
        """A generator of its own for each combination of seed and labels.

        Example:
            >>> run = Run({}, seed=1)
            >>> a, b = (torch.randn(2, generator=run.generator("q", 64)) for _ in range(2))
            >>> torch.equal(a, b)
            True
        """
        return torch.Generator().manual_seed(stable_seed([self.seed, *labels]))


def stable_seed(content: Any) -> int:
    """A seed below 2^63 from JSON data: the same in every process and on every machine.

    Example:
        >>> stable_seed({"d_k": 64, "seed": 0}) == stable_seed({"seed": 0, "d_k": 64})
        True
    """
    text = json.dumps(content, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
