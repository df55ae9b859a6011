"""The Triton and the GPUs of this machine, checked once when this module is imported (by `load`, only if needed)."""

from __future__ import annotations

import importlib.util
import re

import torch

from sqrtdk.errors import short_text, text_of
from sqrtdk.impl.gpu import GPUS, gpu_count

OLDEST = (3, 6)  # the version that comes with the oldest supported torch
OLDEST_NVIDIA = (8, 0)  # compute capability: bfloat16 and asynchronous copies


def _against_triton() -> str | None:
    try:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed; torch's builds for GPUs bring it"
        import triton
        import triton.language

        version = str(getattr(triton, "__version__", ""))
    except Exception as error:  # a damaged installation may raise anything
        line = next(iter(text_of(error).splitlines()), "")
        return f"Triton can't be imported: {line or type(error).__name__}"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return "the module `triton` that is imported here bears no version"
    if tuple(map(int, numbers.groups())) < OLDEST:
        return f"Triton {version} is installed, and {_dotted(OLDEST)} or newer is needed"
    return None


def _against_device(kind: str, index: int) -> str | None:
    """Return why the kernel can't use a GPU that torch can use; None if it can."""
    if kind != "cuda" or torch.version.hip is not None:
        return None
    try:
        capability = torch.cuda.get_device_capability(index)
    except (RuntimeError, AssertionError) as error:
        return f"torch can't use cuda {index}: {short_text(error)}"
    if capability < OLDEST_NVIDIA:
        return f"the GPU has compute capability {_dotted(capability)}, and {_dotted(OLDEST_NVIDIA)} or newer is needed"
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


REASON: str | None = _against_triton()
DEVICES: dict[tuple[str, int], str | None] = {
    (kind, index): _against_device(kind, index) for kind in GPUS for index in range(gpu_count(kind))
}
