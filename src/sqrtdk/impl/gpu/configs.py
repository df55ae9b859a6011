"""Sizes of tiles and programs, by architecture; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut: rows and keys of a tile, warps and pipeline stages, whether loads go by descriptor."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False


INTERPRETER = Config(64, 32, 4, 1)


def forward_config(target: str, dtype: torch.dtype, width: int, causal: bool, statistics: bool) -> Config:
    """The configuration of the forward kernel."""
    return INTERPRETER if target == "interpreter" else Config(64, 64, 4, 2)
