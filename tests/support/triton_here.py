"""Whether the Triton kernel can run here: on a GPU, or on a CPU in Triton's interpreter, which `conftest` turns on."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from sqrtdk.impl.gpu.load import interpreted, unavailable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


def unable() -> str | None:
    """Why it can't; None where it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted() and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 does not run with NumPy 2.4"
    return unavailable(DEVICE)


needs_triton = pytest.mark.skipif(unable() is not None, reason=f"no Triton: {unable()}")
in_the_interpreter = pytest.mark.skipif(not interpreted(), reason="it is about the interpreter")
# NumPy, which the interpreter computes with, warns of what a GPU does without a word
overflows = pytest.mark.filterwarnings("ignore:(.* encountered in |All-NaN slice):RuntimeWarning")
