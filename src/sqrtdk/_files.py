"""Files on disk: written whole or not at all, and never over an existing file."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import stat
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqrtdk.errors import OutputError, short_text
from sqrtdk.messages import Message

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_REASONS: dict[type[OSError], str] = {  # what the operating system says -> id of a sentence
    FileNotFoundError: "errors.os.no_file",
    PermissionError: "errors.os.permission",
    IsADirectoryError: "errors.os.directory",
    NotADirectoryError: "errors.os.no_directory",
}


def os_reason(error: OSError) -> str:
    """Return why the operating system refused a file, without the file's name.

    Example:
        >>> os_reason(FileNotFoundError(2, "No such file or directory"))
        'No such file or directory'
    """
    if error.errno == errno.ENOSPC:
        return Message("errors.os.full")
    return Message(_REASONS[type(error)]) if type(error) in _REASONS else error.strerror or short_text(error)


def check_writable(path: str | Path, force: bool = False) -> None:
    """Raise the errors of `write_text` at once, rather than after a model has run for an hour.

    Raises:
        OutputError: The file exists (and `force` is off), is not a regular file, or its directory is missing or not
            writable.
    """
    path = Path(path)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise OutputError(
            Message("errors.output.failed", path=str(path), reason=os_reason(error)),
            hint=Message("errors.hint.another_path"),
        ) from error
    if mode is not None and stat.S_ISDIR(mode):
        raise OutputError(Message("errors.output.directory", path=str(path)), hint=Message("errors.hint.file_inside"))
    if mode is not None and not (stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and not _leads_to_device(path))):
        raise OutputError(Message("errors.output.not_regular", path=str(path)), hint=Message("errors.hint.new_file"))
    if mode is not None and not force:
        raise _exists(path)
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(
            Message("errors.output.no_directory", path=str(path), folder=str(folder)),
            hint=Message("errors.hint.create_directory"),
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            Message("errors.output.no_permission", path=str(path), folder=str(folder)),
            hint=Message("errors.hint.another_directory"),
        )


def check_outputs(paths: Iterable[Path | None], force: bool = False) -> None:
    """Check all output files of a run, ignoring None: each must be writable, and no two the same.

    Raises:
        OutputError: See `check_writable`; or two of them are the same file.
    """
    paths_so_far: list[Path] = []
    for path in paths:
        if path is None:
            continue
        check_writable(path, force)
        if any(_one_file(path, other) for other in paths_so_far):
            raise OutputError(Message("errors.output.twice", path=str(path)), hint=Message("errors.hint.own_file"))
        paths_so_far.append(path)


def _one_file(path: Path, other: Path) -> bool:
    """Return whether two names are one file, which need not exist, in folders that exist and can be written.

    A folder that ignores case (macOS, Windows) takes `A.html` and `a.html` for one, and one that ignores how an accent
    is written two more; the folder itself says so, of a file that is made there for a moment.
    """
    if path.resolve() == other.resolve():
        return True
    if not os.path.samestat(path.parent.stat(), other.parent.stat()):
        return False
    if path.name == other.name or _folded(path.name) != _folded(other.name):
        return path.name == other.name
    pairs = enumerate(zip(path.name, other.name, strict=False))
    start, token = next((at for at, (one, two) in pairs if one != two), 0), secrets.token_hex(6)
    probe, twin = (each.with_name(f".{token}.{each.name[start:][:40]}.tmp") for each in (path, other))
    try:
        probe.touch(exist_ok=False)
        return twin.exists()
    except OSError:  # the folder takes no file after all: two reports that may be one are refused
        return True
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def write_text(path: str | Path, text: str, force: bool = False) -> None:
    """Write a text as UTF-8 to a new file, all of it or nothing; `write_parts` has the arguments and the errors."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), force)


def write_bytes(path: str | Path, data: bytes, force: bool = False) -> None:
    """Write bytes to a new file, all of them or nothing; `write_parts` has the arguments and the errors."""
    write_parts(path, (data,), force)


def write_parts(path: str | Path, parts: Iterable[bytes | memoryview], force: bool = False) -> None:
    """Write parts to a new file, one after the other, all of them or nothing.

    They go to a temporary file in the same directory, which is then renamed in one step: readers see the old state or
    the whole new file. Without `force` the rename fails if the name was taken meanwhile. With `force` a symbolic link
    is replaced, not followed. Ctrl-C and other signals wait until the current part is written, so that they leave no
    temporary file; if more parts were to come, no file is written.

    Args:
        path: the file to write; its directory must exist.
        parts: the content; each part is requested once those before it are written.
        force: replace an existing file.

    Raises:
        OutputError: See `check_writable`; or the disk is full, or another write error.
    """
    path = Path(path)
    check_writable(path, force)
    temporary = path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:80])}.{secrets.token_hex(6)}.tmp")
    with _signals_held() as came:
        try:
            with open(temporary, "xb") as file:
                for number, part in enumerate(parts):
                    if came and number:  # a file of a single part is written at once, so it is finished
                        raise InterruptedError(errno.EINTR, "a signal came before all of it was written")
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(temporary, path)
            else:
                _take_name(temporary, path)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            raise OutputError(
                Message("errors.output.failed", path=str(path), reason=os_reason(error)),
                hint=Message("errors.hint.another_path"),
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def _signals_held() -> Iterator[list[int]]:
    """Delay the signals that end a program; those that arrive inside are listed, and raised afterwards.

    Python runs handlers in the main thread only, so other threads need no delay. Ignored signals stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    # a handler that was not set from Python reads as None, and could not be restored
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN and old is not None}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        for number in came:
            signal.raise_signal(number)


def _take_name(temporary: Path, path: Path) -> None:
    """Rename without replacing: a hard link fails where the name exists, a rename would not."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: reserve the name, then fill it in one step
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()  # ours, and empty
            raise


def _leads_to_device(link: Path) -> bool:
    """Return whether a link names a device or a stream, as /dev/stdout does."""
    try:
        return os.readlink(link).startswith(("/dev/", "/proc/")) or not stat.S_ISREG(link.stat().st_mode)
    except OSError:  # a broken link
        return False


def _exists(path: Path) -> OutputError:
    return OutputError(Message("errors.output.exists", path=str(path)), hint=Message("errors.hint.force"))
