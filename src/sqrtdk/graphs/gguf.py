"""The metadata of a GGUF file: names and values before its tensors. Arrays are passed over, tensors are not read."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

from sqrtdk.errors import ModelError, short_text
from sqrtdk.models.limits import check_file

MAX_BYTES = 2**44
MAX_ENTRIES = 2**16
MAX_TEXT = 2**20  # bytes of a text; a chat template has some ten thousand
MAX_ARRAY = 2**24  # elements
MAX_NESTED = 4  # arrays in arrays
MAX_METADATA = 2**30  # bytes that are passed over in all
VERSIONS = (2, 3)
_FIXED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
Value = str | int | float | bool


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Value]:
    """Names and values of a GGUF file, without its arrays.

    Args:
        path: of the file; version 2 or 3, little-endian.

    Raises:
        ModelError: it can't be read, is of another version, is cut off, or beyond a limit.
    """
    shown = str(path)[:200]
    try:
        check_file(os.fspath(path), f"the file {shown!r}", MAX_BYTES)
        with open(path, "rb") as file:
            return _entries(file)
    except OSError as error:
        raise ModelError(f"can't read {shown!r}: {short_text(error)}", hint="Check the path.") from error
    except (struct.error, UnicodeDecodeError, _OddError) as error:
        raise ModelError(
            f"{shown!r} is not a GGUF file of version 2 or 3: {short_text(error)}", hint="Convert or download it again."
        ) from error


class _OddError(Exception):
    """What no GGUF file holds."""


def _entries(file: BinaryIO) -> dict[str, Value]:
    if file.read(4) != b"GGUF":
        raise _OddError("it does not begin with GGUF")
    version = _number(file, "<I")
    if version not in VERSIONS:
        raise _OddError(f"version {version}")
    _number(file, "<Q")  # of tensors
    count = int(_number(file, "<Q"))
    if count > MAX_ENTRIES:
        raise _OddError(f"{count} entries, at most {MAX_ENTRIES} are read")
    found: dict[str, Value] = {}
    for _ in range(count):
        name = _text(file)
        kind = int(_number(file, "<I"))
        if kind == _ARRAY:
            _pass_over(file, 0)
        elif kind == _TEXT:
            found[name] = _text(file)
        elif kind in _FIXED:
            found[name] = _number(file, _FIXED[kind])
        else:
            raise _OddError(f"a value of kind {kind}")
    return found


def _number(file: BinaryIO, form: str) -> int | float | bool:
    value: int | float | bool = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value


def _length(file: BinaryIO, most: int) -> int:
    length = int(_number(file, "<Q"))
    if length > most:
        raise _OddError(f"a length of {length}, at most {most} is read")
    return length


def _text(file: BinaryIO) -> str:
    length = _length(file, MAX_TEXT)
    content = file.read(length)
    if len(content) < length:
        raise _OddError("it is cut off")
    return content.decode("utf-8", "replace")


def _pass_over(file: BinaryIO, depth: int) -> None:
    kind, count = int(_number(file, "<I")), _length(file, MAX_ARRAY)
    if depth > MAX_NESTED or file.tell() > MAX_METADATA:
        raise _OddError("arrays that are nested too deep, or too long")
    if kind in _FIXED:
        file.seek(count * struct.calcsize(_FIXED[kind]), os.SEEK_CUR)
        return
    for _ in range(count):
        if kind == _TEXT:
            file.seek(_length(file, MAX_TEXT), os.SEEK_CUR)
        elif kind == _ARRAY:
            _pass_over(file, depth + 1)
        else:
            raise _OddError(f"an array of kind {kind}")
