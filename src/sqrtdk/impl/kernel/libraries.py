"""Compiled libraries: their names, their folders, and whether one may be opened.

To load a library is to run it. A library that another user owns, or that a group or everyone can write, is never
loaded; nor is one that is not bit for bit as built, since an open file that is truncated crashes the process. The name
has the instructions it uses, a hash of the sources and of torch's version (another kind of CPU that shares the cache,
or a new torch, has its own), and the checksum of the file, so that one rename keeps both or neither.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sqrtdk.errors import UnsupportedError
from sqrtdk.messages import Message

KERNEL_FOLDER = Path(__file__).parent
PREBUILT = KERNEL_FOLDER / "prebuilt"  # shipped in a wheel
# -fopenmp only at compile time: at run time torch's own OpenMP library is used, so that there is one pool of threads.
COMPILE = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-c")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU that the kernel is compiled for.

    Attributes:
        machine: as in `platform.machine()`.
        features: that /proc/cpuinfo must list.
        flags: of the compiler.
        beats_torch: whether a large plain call, without statistics, was measured to be faster than torch's own kernel.
    """

    machine: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    beats_torch: bool = True


_SSE4 = ("ssse3", "sse4_1", "sse4_2", "popcnt")  # x86-64-v2
_AVX2 = (*_SSE4, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")  # x86-64-v3
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")  # x86-64-v4
_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
TARGETS: Mapping[str, Target] = {  # of one machine the fastest first
    "avx512_bf16": Target("x86_64", (*_AVX512, "avx512_bf16"), (*_WIDE, "-mavx512bf16")),
    "avx512": Target("x86_64", _AVX512, _WIDE),
    "avx2": Target("x86_64", _AVX2, ("-march=x86-64-v3",)),
    "sse4": Target("x86_64", _SSE4, ("-march=x86-64-v2",), beats_torch=False),
    "neon": Target("aarch64", ("asimd",), ("-march=armv8-a",), beats_torch=False),
}
MAX_LIBRARY_BYTES = 2**26  # bytes of a library that is read at most; half a MiB is usual


def targets_here() -> list[str]:
    """Return the names of the `TARGETS` for this machine's architecture, the fastest first."""
    return [name for name, target in TARGETS.items() if target.machine == platform.machine()]


def unsupported() -> str | None:
    """Return the reason, a sentence, why the kernel can't run on this system; None if it can.

    It looks at the system, the architecture, SQRTDK_KERNEL and the features of the CPU, and not at the compiler.
    """
    if sys.platform != "linux":
        return Message("machine.kernel.system", system=sys.platform)
    features, here, named = _features(), targets_here(), os.environ.get("SQRTDK_KERNEL")
    if not here:
        return Message("machine.kernel.architecture", machine=platform.machine() or "unknown")
    if named and named not in here:
        return Message("machine.kernel.no_target", name=named, names=", ".join(here))
    if not features:
        return Message("machine.kernel.unknown_cpu")
    lacking = [name for name in TARGETS[named or here[-1]].features if name not in features]
    return Message("machine.kernel.flags", flags=", ".join(lacking)) if lacking else None


def unbuildable(reason: str) -> UnsupportedError:
    """Return an UnsupportedError, to be raised, which says that the kernel can't be built, for the given reason."""
    return UnsupportedError(f"the compiled kernel can't be built: {reason}", hint="impl='tiled' runs everywhere.")


def this_target() -> str:
    """Return the name of the fastest of `TARGETS` that this CPU takes, or the one that SQRTDK_KERNEL names.

    Raises:
        UnsupportedError: The kernel can't run on this system.
    """
    reason = unsupported()
    if reason is not None:
        raise UnsupportedError(reason)
    fit = (name for name in targets_here() if _features().issuperset(TARGETS[name].features))
    return os.environ.get("SQRTDK_KERNEL") or next(fit)


def cpp_sources() -> list[Path]:
    """Return the paths of the C++ files of the kernel; the first is the one to compile, and includes the others."""
    return [KERNEL_FOLDER / "attention.cpp", *sorted(KERNEL_FOLDER.glob("*.h"))]


def stem(target: str) -> str:
    """Return the common prefix of all library names for one of `TARGETS`, whichever compiler made them.

    Raises:
        UnsupportedError: A source file can't be read.
    """
    return f"attention-{target}-{_digest(target)}-"


def file_name(made: Path, target: str) -> str:
    """Return the name of a finished library, which ends in a checksum of its content.

    Args:
        made: The compiled library, which is read.
        target: Name of a row of `TARGETS`.

    Raises:
        UnsupportedError: See `stem`.
    """
    return f"{stem(target)}{_checksum(made)}.so"


def cache_folder() -> Path:
    """Return the folder of libraries, whether it exists or not.

    Raises:
        UnsupportedError: There is no home directory.
    """
    try:
        home = os.environ.get("SQRTDK_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home).expanduser().resolve() / "sqrtdk"
    except (OSError, RuntimeError) as error:
        text = f"the cache directory is unknown: {error}"
        raise UnsupportedError(text, hint="SQRTDK_CACHE names one.") from error


def cached_libraries(folder: Path, target: str) -> list[Path]:
    """Return all files named like a library for one of `TARGETS`, intact or not, newest first.

    Args:
        folder: The folder of libraries; it need not exist.
        target: Name of a row of `TARGETS`.

    Raises:
        OSError: The folder exists and can't be listed.
        UnsupportedError: See `stem`.
    """
    start = stem(target)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((folder / name for name in names if name.startswith(start) and name.endswith(".so")), key=_age)


def why_untrusted(path: Path) -> str | None:
    """Return why another user may have written the file; None if only this user or root can.

    Raises:
        OSError: It can't be examined.
    """
    status = path.stat()
    if sys.platform != "win32" and status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user, {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return f"everyone can write {path}"
    return f"its group can write {path}" if status.st_mode & stat.S_IWGRP else None


def why_refused(path: Path) -> str | None:
    """Return the reason why a library is not opened; None if it may be opened.

    Another user may own it, or the file may differ from what was built.
    """
    try:
        status = path.stat()  # before it is opened, as opening a pipe would block for ever
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is no file: `sqrtdk build` replaces it"
        # Whoever can write the package's own files can do worse, but the cache's name is known to everyone.
        reason = None if path.parent == PREBUILT else why_untrusted(path)
        if reason is not None:
            return reason
        # The loader opens the file again by name: meanwhile only the owners of the folder could change it.
        if not 0 < status.st_size <= MAX_LIBRARY_BYTES or _checksum(path) != path.stem.rpartition("-")[2]:
            return f"{path} is damaged: `sqrtdk build` builds it again"
    except OSError as error:
        return f"{path} can't be read: {error.strerror or error}"
    return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


@cache
def _digest(target: str) -> str:
    try:
        texts = [path.read_text(encoding="utf-8") for path in cpp_sources()]
    except OSError as error:
        raise unbuildable(f"a source can't be read: {error}") from error
    whole = "\n".join([*texts, torch.__version__, *COMPILE, *TARGETS[target].flags])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@cache
def _features() -> frozenset[str]:
    """Return the CPU's features in /proc/cpuinfo; empty if it lists none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())
