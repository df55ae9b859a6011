"""What decides the numbers besides the parameters: the package's own files, and the versions of what it stands on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

_LIBRARIES = ("sqrtdk", "torch", "numpy", "scipy", "scikit-learn")
_DRAWING = ("cli", "report")  # they decide no number


@cache
def code() -> str:
    """Hash of the package's files, data included, without those that print and draw; of the first call's state.

    Example:
        >>> len(code()), code() == code()
        (16, True)
    """
    root = Path(__file__).parent
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        if name.split("/")[0] not in _DRAWING and not name.endswith(".pyc"):
            digest.update(f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


@cache
def numbers_from() -> Mapping[str, str]:
    """Code and versions: runs of equal ones, on one machine, give equal numbers.

    Python's is among them since its standard library is what models are trained on, and the compiled attention kernel,
    which rounds in another order than torch's does.
    """
    from sqrtdk.impl.kernel.load import library

    path = library()
    kernel = "none" if path is None else path.name
    found = {"code": code(), "python": platform.python_version(), "kernel": kernel}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
