"""The limit of attention on this CPU: the two matrix products alone, in the tiles of the compiled kernel."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from sqrtdk.impl.kernel import compiler, libraries

SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def build() -> None:
    """Compile and load them for the target of the kernel, once a process."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "products.so"
        flags = [flag for flag in libraries.COMPILE if flag != "-c"]
        flags += [*libraries.TARGETS[libraries.this_target()].flags, f"-I{libraries.KERNEL_FOLDER}"]
        flags += [f"-isystem{path}" for path in include_paths()]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-shared"]
        linked = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
        subprocess.run([*compiler.command(), *flags, str(SOURCE), "-o", str(made), *linked], check=True)
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
