"""Checks where the files of a model directory really are: inside it, or in the hub cache that it is a snapshot of.

An untrusted directory can hold a link to any file of this machine, and what is read from it ends up in a report.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sqrtdk import _files
from sqrtdk.errors import ModelError
from sqrtdk.messages import Message

READ_FOLDERS = ("additional_chat_templates",)  # subfolders that transformers reads


def refuse_stray_files(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a model directory with an entry that leads elsewhere, to nothing, or to something that is not a file.

    The directory itself may be a link, because the user named it. Entries whose name begins with a dot are skipped:
    they are never read.

    Args:
        directory: Directory of the model.
        trust_remote_code: Also check links to Python files and to folders, at every depth.

    Raises:
        ModelError: A link leads to itself, to nothing, or out of the directory and of the hub cache's repository that
            it belongs to; an entry is a pipe, socket or device; or a name is not UTF-8.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            Message("errors.files.name_not_utf8", directory=repr(str(directory))), hint=Message("errors.hint.rename")
        ) from error
    root = Path(os.path.realpath(directory))
    homes = homes_of(root)
    try:
        for path in _read_names(root, trust_remote_code):
            _refuse_stray(path, homes, path.relative_to(root))
    except OSError as error:
        raise ModelError(
            Message(
                "errors.files.directory_unreadable", directory=repr(str(directory)), reason=_files.os_reason(error)
            ),
            hint=Message("errors.hint.permissions"),
        ) from error


def homes_of(root: Path) -> tuple[Path, ...]:
    """Return the folders in which a model's files may lie.

    Returns:
        The model's directory; if that is a snapshot of a hub cache, also the repository, to whose blobs it links.
    """
    # models--org--name/snapshots/COMMIT links to models--org--name/blobs.
    for folder in root.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return root, folder.parent
    return (root,)


def _read_names(root: Path, trust_remote_code: bool) -> Iterator[Path]:
    """Yield the entries of a directory that may be read, without following a link."""
    for folder, folders, files in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(folder, name) for name in (*folders, *sorted(files)) if not name.startswith(".")]
        if Path(folder) == root or (Path(folder).parent == root and Path(folder).name in READ_FOLDERS):
            yield from paths
        else:
            yield from (path for path in paths if path.is_symlink() and (path.suffix == ".py" or path.is_dir()))
        if not trust_remote_code:
            folders[:] = [name for name in folders if Path(folder) == root and name in READ_FOLDERS]


def _raise(error: OSError) -> None:
    raise error


def _refuse_stray(path: Path, homes: tuple[Path, ...], shown: Path) -> None:
    """Check one entry of a model's directory.

    Raises:
        ModelError: It leads out of the folders in `homes`, leads nowhere, or is neither a file nor a directory.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        try:
            target = Path(os.path.realpath(path, strict=True))
        except OSError as error:
            raise ModelError(
                Message("errors.files.dead_link", path=repr(str(shown)), reason=_files.os_reason(error)),
                hint=Message("errors.hint.remove_link"),
            ) from error
        if not any(target.is_relative_to(home) for home in homes):
            raise ModelError(
                Message("errors.files.link_outside", path=repr(str(shown)), target=repr(str(target))),
                hint=Message("errors.hint.no_links"),
            )
        status = target.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ModelError(
            Message("errors.files.path_not_regular", path=repr(str(shown))), hint=Message("errors.hint.remove_endless")
        )
