"""What figures depend on: versions, machine, threads, and which kernels of the package are in use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
from typing import Any

import torch

from sqrtdk._machine import cpu_name
from sqrtdk.errors import short_text
from sqrtdk.impl.gpu import load as gpu
from sqrtdk.impl.kernel import compiler, load

LIBRARIES = ("sqrtdk", "torch", "numpy", "safetensors", "transformers", "onnxruntime", "onnx", "ray")
TRITONS = (
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-xpu",
    "pytorch-triton-xpu",
)  # one module


def environment() -> dict[str, Any]:
    """As they are now, ready for JSON.

    Returns:
        `versions` of Python and of libraries (None where one is not installed, "unknown" where it does not tell),
        `platform`, `cpu` ("unknown" likewise), `cpus` (None likewise), `threads` of torch, `gpus` that torch sees, by
        name or by what it says in place of one, `kernel`: `library` (its file, or ""), `built` (whether one is there
        that is whole), `loaded`, `reason` (why it is not in use; None where it is) and `compiler` (None where there is
        none), and `triton`: `version` (as in `versions`), `available` (whether the Triton kernel can run here),
        `interpreted` (whether its interpreter would run it, on a CPU) and `reason` (why it can't run; None where it
        can). Triton is imported where there is a GPU or its interpreter is asked for, and nowhere else.
    """
    kernel = load.state()
    triton = gpu.state()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())],
        "kernel": {
            "library": str(kernel.path or ""),
            "built": kernel.built,
            "loaded": kernel.loaded,
            "reason": kernel.reason,
            "compiler": shlex.join(compiler.command()) or None,
        },
        "triton": {
            "version": next(filter(None, map(_version, TRITONS)), None),
            "available": triton.reason is None,
            "interpreted": triton.interpreted,
            "reason": triton.reason,
        },
    }


def _version(name: str) -> str | None:
    runs = getattr(sys.modules.get(name), "__version__", None)  # whatever is installed
    if runs is not None:
        return str(runs)
    try:
        return importlib.metadata.version(name) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if _importable(name) else None
    except Exception:  # whatever a damaged record of an installation brings about
        return "unknown"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _gpu(at: int) -> str:
    try:
        return torch.cuda.get_device_name(at)
    except (RuntimeError, AssertionError) as error:
        return f"device {at}, which torch can't use: {short_text(error)}"
