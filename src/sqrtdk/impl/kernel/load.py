"""Loads the compiled kernel, once per process, and remembers why it could not be loaded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import compiler, libraries
from sqrtdk.impl.kernel.libraries import PREBUILT

lock = threading.RLock()  # for building and loading: torch registers an operator only once
# Plain values, with reason None once the operators exist: `torch.compile` reads them, but can't trace the loading.
_reason: str | None = "it was not looked for"
_path: Path | None = None
_beats_torch = False


@dataclass(frozen=True, slots=True)
class KernelState:
    """Whether the kernel can be used here.

    Attributes:
        path: of the library in use, or else of the first with the right name; None if there is none.
        built: whether an intact library exists.
        loaded: whether this process uses it.
        reason: why it can't be used; None if it can.
    """

    path: Path | None
    built: bool
    loaded: bool
    reason: str | None


def kernel_state() -> KernelState:
    """Return whether the kernel is built and loaded, without building it."""
    paths = [path for path, _ in _candidates() if path is not None]
    built = loaded() or any(libraries.why_refused(path) is None for path in paths)
    reason = None if loaded() else libraries.unsupported() or why_not_loaded()
    return KernelState(_path or next(iter(paths), None), built, loaded(), reason)


def library() -> Path | None:
    """Return the path of the library that this process uses; None if it uses none."""
    return _path


def loaded() -> bool:
    """Return whether the kernel's operators exist in this process."""
    return _reason is None


def beats_torch() -> bool:
    """Return whether the library in use is faster than torch's kernel for large plain calls."""
    return _reason is None and _beats_torch


def why_not_loaded() -> str | None:
    """Return the reason why the operators did not exist when they were last looked for; None if they did."""
    return _reason


def load_kernel() -> None:
    """Load the library and register its operators with torch, once.

    Raises:
        UnsupportedError: There is no library, or it can't be loaded.
    """
    global _path, _reason, _beats_torch
    with lock:
        if _reason is not None:
            _path, _reason = _attempt()
            _beats_torch = _path is not None and libraries.TARGETS[libraries.this_target()].beats_torch
        if _reason is not None:
            text = f"the compiled kernel can't be used: {_reason}"
            raise UnsupportedError(text, hint="`sqrtdk build --force` builds it again.")


def load_if_built() -> None:
    """Load the library if it is built; compile nothing.

    `why_not_loaded` gives the reason if the operators don't exist afterwards.
    """
    with contextlib.suppress(UnsupportedError):
        load_kernel()


def _attempt() -> tuple[Path | None, str | None]:
    """Load the first usable library and return its path, or else the reason against the first one."""
    reason = libraries.unsupported()
    if reason is not None:
        return None, str(reason)  # torch.compile traces plain texts only
    reasons = []
    for path, reason in _candidates():
        reason = _against(path) if path is not None else reason
        if reason is None:
            return path, None
        reasons.append(reason)
    return None, reasons[0] if reasons else compiler.why_no_compiler() or "it is not built: `sqrtdk build`"


def _candidates() -> Iterator[tuple[Path | None, str | None]]:
    """Yield libraries that may be loaded, or why a folder can't be read: first the cache, then the package."""
    for place in (libraries.cache_folder, lambda: PREBUILT):
        try:
            folder = place()
            paths = libraries.cached_libraries(folder, libraries.this_target())
            reason = libraries.why_untrusted(folder) if paths and folder != PREBUILT else None
        except UnsupportedError as error:
            yield None, str(error)
        except OSError as error:
            yield None, f"{folder} can't be read: {error.strerror or error}"
        else:
            yield from [(path, None) for path in paths] if reason is None else [(None, f"it is not loaded: {reason}")]


def _against(path: Path) -> str | None:
    """Load one library, or return why it can't be loaded."""
    from sqrtdk.impl.kernel.operators import register_operators

    reason = libraries.why_refused(path)
    if reason is not None:
        return f"the library is not loaded: {reason}"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        register_operators()
    except (OSError, RuntimeError) as error:
        text = str(error.__cause__ or error) or type(error).__name__  # the cause has the loader's own message
        return f"the library can't be loaded: {text.splitlines()[0]}"
    return None


load_if_built()
