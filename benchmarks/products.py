"""The limit of attention on this CPU: the two matrix products alone, in the tiles of the compiled kernel."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sqrtdk.impl.kernel import libraries
from sqrtdk.impl.kernel.build import commands

SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def build() -> None:
    """Compile and load them for the target of the kernel, once a process."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "products.so"
        for command in commands(SOURCE, made, libraries.this_target()):
            subprocess.run(command, check=True)
        torch.ops.load_library(str(made))  # type: ignore[no-untyped-call]


def products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(Q K^T) V without a softmax; 1 V where products of bfloat16 are computed in bfloat16. `build` comes first.

    Args:
        query: (B, H, L, E), float32 or bfloat16.
        key: (B, H, S, E).
        value: (B, H, S, E).
    """
    found: Tensor = torch.ops.sqrtdk_limit.products(query, key, value)
    return found
