"""Compiles the kernel with the machine's own compiler, keeps it, and loads it.

A library's name holds a hash of the sources, of torch's version and of the instructions that it uses: another kind of
CPU that shares the cache, or a new torch, has its own. It is compiled under another name and then renamed, so that a
build that is interrupted, or runs twice at once, leaves a whole file or none. To load a library is to run it: one that
another user owns or everyone can write is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sqrtdk.errors import UnsupportedError

HOME = Path(__file__).parent
PREBUILT = HOME / "prebuilt"  # of a wheel
NEEDED = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")  # x86-64-v4
# -fopenmp only compiles: at run time torch's own OpenMP library serves, so that there is one pool of threads.
COMPILE = ("-O3", "-mprefer-vector-width=512", "-std=c++20", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-c")
TARGETS = {"avx512": ("-march=x86-64-v4",), "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16")}
ABANDONED_S = 3600.0  # age of a folder that an interrupted build left
UNUSED_S = 90 * 86400.0  # since a library was last read, after which a build removes it
_lock = threading.RLock()  # of building and loading: torch takes an operator once


@dataclass(frozen=True, slots=True)
class State:
    """Whether the kernel can be used here.

    Attributes:
        path: of the library, whether it is there or not; None where the cache or the sources can't be found.
        built: whether it is there.
        loaded: whether this process uses it.
        reason: why it can't be used; None where it can.
    """

    path: Path | None
    built: bool
    loaded: bool
    reason: str | None


def state() -> State:
    """Look, and build nothing."""
    path = None
    with contextlib.suppress(UnsupportedError):  # kept as the reason when it was to be loaded
        path = library()
    return State(path, path is not None and os.path.exists(path), loaded(), unavailable())


def unable() -> str | None:
    """Why the kernel can't be built here; None where it can."""
    return _system() or _no_compiler()


def library(target: str | None = None) -> Path:
    """Where the library for a target lies, or will: in the cache, or with the package.

    Args:
        target: one of `TARGETS`; None: this CPU's.

    Raises:
        UnsupportedError: there is no home directory, or a source file is missing.
    """
    places = _places(target)
    there = [path for path in places if os.path.exists(path)]
    used = [path for path in there if os.path.realpath(path) in torch.ops.loaded_libraries]
    return (used or there or places)[0]


def file_name(target: str) -> str:
    """The name of the library for one of `TARGETS`."""
    return f"attention-{target}-{_digest(target)}.so"


def sources() -> list[Path]:
    """The C++ files, the one that includes the others first."""
    return [HOME / "attention.cpp", *sorted(HOME.glob("*.h"))]


def ready() -> None:
    """Build it, unless that is done, and load it; of many threads, one does.

    Raises:
        UnsupportedError: see `build` and `load`.
    """
    with _lock:
        build()
        load()


def build(force: bool = False) -> Path:
    """Compile for this CPU into the cache, unless there is a library that loads.

    Args:
        force: compile again.

    Raises:
        UnsupportedError: the CPU, the system or the compiler does not do; with the compiler's first error.
    """
    with _lock:
        if not force:
            with contextlib.suppress(UnsupportedError):  # not there, or no good
                load()
                return library()
        reason = _system()
        if reason is not None:
            raise _unbuildable(reason)
        path = _places()[0]
        compile_to(path, path.name.split("-")[1])
        return path


def compile_to(path: Path, target: str) -> None:
    """Compile for one of `TARGETS` into a file, all of it or nothing.

    Raises:
        UnsupportedError: there is no compiler or it fails, or the file can't be written, or others could write it.
    """
    reason = _no_compiler()
    if reason is not None:
        raise _unbuildable(reason)
    hint = "SQRTDK_CACHE names another directory."
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _untrusted(path.parent)
        if reason is not None:
            raise UnsupportedError(f"the compiled kernel can't be kept safely: {reason}", hint=hint)
        _sweep(path.parent, path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            made = Path(folder) / path.name
            for command in _commands(made, target):
                _run(command)
            made.chmod(0o755)  # whatever the umask
            made.replace(path)
    except OSError as error:
        text = f"the compiled kernel can't be kept in {path.parent}: {error.strerror or error}"
        raise UnsupportedError(text, hint=hint) from error


# A plain value, None once the operators are there: `torch.compile` reads it, and can't follow what loads a library.
_reason: str | None = "it was not looked for"


def loaded() -> bool:
    """Whether the operators are there."""
    return _reason is None


def unavailable() -> str | None:
    """Why the operators are not there, as of the last look; None where they are."""
    return _reason


def load() -> None:
    """Load the library, and tell torch of its operators; once.

    Raises:
        UnsupportedError: there is none, or it can't be loaded.
    """
    global _reason
    with _lock:
        if _reason is not None:
            _reason = _attempt()
        if _reason is not None:
            text = f"the compiled kernel can't be used: {_reason}"
            raise UnsupportedError(text, hint="`sqrtdk build --force` builds it again.")


def load_if_built() -> None:
    """Load what is there, and compile nothing; `unavailable` tells why the operators are not there then."""
    with contextlib.suppress(UnsupportedError):
        load()


def compiler() -> str | None:
    """The C++ compiler: that of CXX, which may be a command with arguments, or GCC by its usual names."""
    return shlex.join(_compiler()) or None


def _attempt() -> str | None:
    """Load the first library that is there and does; else why not: of the first that is there."""
    reason = _system()
    if reason is not None:
        return reason
    found = []
    try:
        for path in _places():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append(_against(path))
                if found[-1] is None:
                    return None
    except UnsupportedError as error:
        return str(error)
    return found[0] if found else unable() or "it is not built: `sqrtdk build`"


def _against(path: Path) -> str | None:
    """Load one library, or say why not."""
    from sqrtdk.impl.kernel.operators import register

    try:
        # Whoever can write the package's own folder can do worse; the cache's name is known to everyone.
        reason = _untrusted(path) or (None if path.parent == PREBUILT else _untrusted(path.parent))
        if reason is not None:
            return f"the library is not loaded: {reason}"
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        register()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, RuntimeError) as error:
        text = str(error.__cause__ or error) or type(error).__name__  # the cause is the loader's own text
        return f"the library can't be loaded: {text.splitlines()[0]}"
    return None


def _untrusted(path: Path) -> str | None:
    """Why what lies there may be another's."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user, {found.st_uid}"
    return f"everyone can write {path}" if found.st_mode & stat.S_IWOTH else None


def _unbuildable(reason: str) -> UnsupportedError:
    return UnsupportedError(f"the compiled kernel can't be built: {reason}", hint="impl='tiled' runs everywhere.")


def _compiler() -> list[str]:
    """The command; empty where there is none."""
    named = os.environ.get("CXX", "").strip()
    commands = [[named]] if named else [["g++"], ["c++"]]
    with contextlib.suppress(ValueError):  # a quote that does not end
        commands += [shlex.split(named)] if named else []
    found = ((shutil.which(program), rest) for program, *rest in commands)
    return next(([path, *rest] for path, rest in found if path), [])


def _no_compiler() -> str | None:
    if _compiler():
        return None
    named = os.environ.get("CXX", "").strip()
    return f"CXX names {named!r}, which is not found" if named else "there is no C++ compiler"


def _system() -> str | None:
    if sys.platform != "linux":
        return f"it is for Linux; this is {sys.platform}"
    lacking = [name for name in NEEDED if name not in _features()]
    return f"the CPU has no {', '.join(lacking)}" if lacking else None


@cache
def _digest(target: str) -> str:
    try:
        texts = [path.read_text(encoding="utf-8") for path in sources()]
    except OSError as error:
        raise _unbuildable(f"a source can't be read: {error}") from error
    whole = "\n".join([*texts, torch.__version__, *COMPILE, *TARGETS[target]])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@cache
def _features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def _places(target: str | None = None) -> tuple[Path, Path]:
    """Where a library may lie: in the cache, where it is built, and with the package. The first wins."""
    name = file_name(target or ("avx512_bf16" if "avx512_bf16" in _features() else "avx512"))
    return _cache() / name, PREBUILT / name


def _cache() -> Path:
    try:
        home = os.environ.get("SQRTDK_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home).expanduser().resolve() / "sqrtdk"
    except (OSError, RuntimeError) as error:
        text = f"the cache directory is unknown: {error}"
        raise UnsupportedError(text, hint="SQRTDK_CACHE names one.") from error


def _sweep(folder: Path, keep: Path) -> None:
    """Remove what killed builds left, and libraries that nobody has used for long."""
    now = time.time()
    for left in [*folder.glob(".build-*"), *folder.glob("attention-*.so")]:
        with contextlib.suppress(OSError):  # another build sweeps too
            found = left.stat()
            if left.suffix != ".so" and now - found.st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
            elif left.suffix == ".so" and left != keep and now - max(found.st_mtime, found.st_atime) > UNUSED_S:
                left.unlink()


def _commands(made: Path, target: str) -> Iterable[list[str]]:
    from torch.utils.cpp_extension import include_paths, library_paths

    program, whole = _compiler(), str(made.with_suffix(".o"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-isystem{path}" for path in include_paths()]
    yield [*program, *COMPILE, *TARGETS[target], abi, *includes, str(sources()[0]), "-o", whole]
    searched = [f"-L{path}" for path in library_paths()]
    yield [*program, "-shared", whole, "-o", str(made), *searched, "-ltorch_cpu", "-lc10"]


def _run(command: list[str]) -> None:
    hint = "It has to be GCC 11 or newer; CXX names another one."
    try:
        given = os.environ | {"LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=given)
    except OSError as error:
        text = f"the compiler {command[0]} can't be started: {error.strerror or error}"
        raise UnsupportedError(text, hint=hint) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line] or lines[-1:]
        raise UnsupportedError(f"the compiler failed: {errors[0] if errors else done.returncode}", hint=hint)


load_if_built()
