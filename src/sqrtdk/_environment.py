"""What figures depend on: versions, machine, threads, and whether the compiled kernel is in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from sqrtdk._machine import cpu_name
from sqrtdk.impl.kernel import build

LIBRARIES = ("sqrtdk", "torch", "numpy", "safetensors", "transformers", "onnxruntime", "onnx", "ray")


def environment() -> dict[str, Any]:
    """As they are now, ready for JSON.

    Returns:
        `versions` of Python and of libraries, `platform`, `cpu`, `cpus`, `threads` of torch, `gpus` by name, and
        `kernel`: `library` (its file, or ""), `built`, `loaded`, `reason` (why it is not in use; None where it is) and
        `compiler` (None where there is none).
    """
    kernel = build.state()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernel": {
            "library": str(kernel.path or ""),
            "built": kernel.built,
            "loaded": kernel.loaded,
            "reason": kernel.reason,
            "compiler": build.compiler(),
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
