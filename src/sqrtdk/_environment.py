"""Versions, machine and kernels, and everything besides its parameters that decides the numbers of a run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sqrtdk.errors import short_text
from sqrtdk.impl.gpu import load as gpu
from sqrtdk.impl.kernel import compiler, load

REPORTED_LIBRARIES = ("sqrtdk", "torch", "numpy", "safetensors", "transformers", "onnxruntime", "onnx", "ray")
TRITONS = (
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-xpu",
    "pytorch-triton-xpu",
)  # they all install the module triton


def environment() -> dict[str, Any]:
    """Return the environment of this process as it is now, ready for JSON.

    Returns:
        `versions` of Python and libraries (None if not installed, "unknown" if it has no version), `platform`, `cpu`
        ("unknown" if unknown), `cpus` (None if unknown), `threads` of torch, `gpus`: their names, or the error that
        torch gives. `kernel`: `library` (its file, or ""), `built` (whether an intact file exists), `loaded`, `reason`
        (why it is not in use; None if it is) and `compiler` (None if there is none). `triton`: `version` (as in
        `versions`), `available` (whether the Triton kernel can run here), `interpreted` (whether its interpreter would
        run it, on a CPU) and `reason` (why it can't run; None if it can). Triton is imported only if there is a GPU or
        its interpreter is enabled.
    """
    kernel = load.kernel_state()
    triton = gpu.state()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in REPORTED_LIBRARIES},
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
    runs = getattr(sys.modules.get(name), "__version__", None)  # any installed module, with any kind of version
    if runs is not None:
        return str(runs)
    try:
        return importlib.metadata.version(name) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if _importable(name) else None
    except Exception:  # a damaged installation record may raise anything
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


_NUMERIC_LIBRARIES = ("sqrtdk", "torch", "numpy", "scipy", "scikit-learn")
_DRAWING = ("cli/", "cli.py", "report/")  # what changes no number


def _home(package: str) -> Path:
    return Path(str(importlib.resources.files(package)))


@cache
def code_hash(*without: str, packages: tuple[str, ...] = ("sqrtdk",)) -> str:
    """Return a hash of the files of packages, data included, but without those that only print and draw.

    Args:
        without: starts of the paths of further files that change no number of the caller, such as "messages/".
        packages: their names.

    Example:
        >>> len(code_hash()), code_hash() == code_hash()
        (16, True)
    """
    digest = hashlib.sha256()
    for package in packages:
        root = _home(package)
        for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()):
            if not name.startswith((*_DRAWING, *without)) and not name.endswith(".pyc"):
                digest.update(f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


@cache
def numbers_from(*packages: str) -> Mapping[str, str]:
    """Return code and versions: two runs with equal ones, on one machine, give equal numbers.

    Python's version is included because models are trained on its standard library, and the compiled attention kernel
    because it rounds in another order than torch's.

    Args:
        packages: names of packages beside this one whose code gives the numbers too.
    """
    from sqrtdk.impl.kernel.load import library

    path = library()
    kernel = "none" if path is None else path.name
    code = code_hash(packages=("sqrtdk", *packages))
    found = {"code": code, "python": platform.python_version(), "kernel": kernel}
    for name in _NUMERIC_LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """Return the name of the processor; on Linux from /proc/cpuinfo, as Python has none there.

    ARM's has no name either: then the architecture.
    """
    with suppress(OSError, ValueError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"
