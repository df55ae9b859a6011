"""Compiles the kernel with the machine's compiler, tests it in a separate process, and keeps it.

It is compiled under another name and then renamed, so that a build that is interrupted, or runs twice at once, leaves a
complete library or none. A compiler may report success and leave half a file, which would crash the process that loads
it. So a separate process loads it first, and only a library that loads gets the name that others look for.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.kernel import compiler, libraries
from sqrtdk.impl.kernel.load import library, load_kernel, lock

TRIAL_S = 300.0  # to import torch and load the library, which usually takes seconds
ABANDONED_S = 3600.0  # age at which the folder of an interrupted build is removed
UNUSED_S = 90 * 86400.0  # age since a library was last read at which a build removes it
TRIAL_PROGRAM = """
import sys
library, sys.path[:] = sys.argv[1], sys.argv[2:]
import ctypes, torch
ctypes.CDLL(library)
torch.ops.sqrtdk_cpu.forward, torch.ops.sqrtdk_cpu.backward
"""


def ready() -> None:
    """Build the kernel unless it is built, and load it; of several threads, one does.

    Raises:
        UnsupportedError: See `build_kernel` and `load_kernel`.
    """
    with lock:
        build_kernel()
        load_kernel()


def build_kernel(force: bool = False) -> Path:
    """Compile for this CPU into the cache, unless a library there loads.

    Args:
        force: compile again.

    Returns:
        The library's path.

    Raises:
        UnsupportedError: The CPU, the system or the compiler is unsuitable; with the compiler's first error.
    """
    with lock:
        if not force:
            with contextlib.suppress(UnsupportedError):  # missing, or it does not load
                load_kernel()
                path = library()
                assert path is not None
                return path
        reason = libraries.unsupported()
        if reason is not None:
            raise libraries.unbuildable(reason)
        return compile_into(libraries.cache_folder(), libraries.this_target())


def compile_into(folder: Path, target: str) -> Path:
    """Compile for one of `TARGETS` into a folder, completely or not at all.

    Args:
        folder: The folder of the library.
        target: Name of a row of `TARGETS`.

    Returns:
        The library's path.

    Raises:
        UnsupportedError: There is no compiler, it fails, or its library can't be loaded; or the file can't be written,
            or others could write it.
    """
    reason = compiler.why_no_compiler()
    if reason is not None:
        raise libraries.unbuildable(reason)
    hint = "SQRTDK_CACHE names another directory."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = libraries.why_untrusted(folder)
        if reason is not None:
            raise UnsupportedError(f"the compiled kernel can't be kept safely: {reason}", hint=hint)
        # Within the folder, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-", ignore_cleanup_errors=True) as inner:
            made = Path(inner) / "attention.so"
            for command in commands(libraries.cpp_sources()[0], made, target):
                compiler.compile_by(command)
            _try(made)
            made.chmod(0o755)  # regardless of the umask
            path = folder / libraries.file_name(made, target)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            made.replace(path)
        _sweep(path, target)
    except OSError as error:
        text = f"the compiled kernel can't be kept in {folder}: {error.strerror or error}"
        raise UnsupportedError(text, hint=hint) from error
    return path


def commands(source: Path, made: Path, target: str) -> Iterable[list[str]]:
    """Yield the compiler's commands that make a library.

    Args:
        source: The C++ file.
        made: The library to make.
        target: Name of a row of `TARGETS`.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    program, whole = compiler.command(), str(made.with_suffix(".o"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-isystem{path}" for path in include_paths()]
    flags = [*libraries.COMPILE, *libraries.TARGETS[target].flags, abi, *includes]
    yield [*program, *flags, str(source), "-o", whole]
    searched = [f"-L{path}" for path in library_paths()]
    yield [*program, "-shared", whole, "-o", str(made), *searched, "-ltorch_cpu", "-lc10"]


def _try(made: Path) -> None:
    """Load a new library in a separate process.

    Raises:
        UnsupportedError: It does not exist, or can't be loaded.
    """
    start = "the compiler reported no error"
    if not made.exists():
        raise UnsupportedError(f"{start} and wrote no library", hint=compiler.COMPILER_HINT)
    words = [sys.executable, "-W", "ignore", "-c", TRIAL_PROGRAM, str(made), *sys.path]
    code, stderr = compiler.run_program(words, TRIAL_S, "the process that tries the library", compiler.COMPILER_HINT)
    if code:
        why = stderr[-1] if stderr and code > 0 else compiler.ending(code)
        text = f"{start}, and its library is no good; a process tried to load it: {why}"
        raise UnsupportedError(text, hint=compiler.COMPILER_HINT)


def _sweep(keep: Path, target: str) -> None:
    """Remove remains of killed builds, older libraries for the same target, and libraries unused for long."""
    now, folder, start = time.time(), keep.parent, libraries.stem(target)
    for left in [*folder.glob(".build-*"), *folder.glob("attention-*.so")]:
        with contextlib.suppress(OSError):  # another build sweeps too
            status = left.lstat()
            if left.suffix != ".so" and now - status.st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
            elif left.suffix == ".so" and left != keep:
                unused = now - max(status.st_mtime, status.st_atime) > UNUSED_S
                if unused or left.name.startswith(start):
                    left.unlink()
