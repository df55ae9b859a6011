"""Reads the metadata of a GGUF file: the names and values before its tensors.

Arrays, such as a tokenizer's vocabulary, are skipped. Tensors are not read.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

from sqrtdk.errors import ModelError, short_text

MAX_METADATA_ENTRIES = 2**16
MAX_STRING_BYTES = 2**20  # bytes of one string; a chat template has about ten thousand
MAX_HELD_BYTES = 2**22  # bytes of all names and strings together: they stay in memory
MAX_ARRAY = 2**24  # elements of one array
MAX_SKIPPED = 2**21  # strings and nested arrays skipped one by one, in the whole file; a vocabulary has 2^18
MAX_NESTED = 4  # levels of arrays inside arrays
MAX_METADATA = 2**30  # bytes skipped in the whole file
VERSIONS = (2, 3)
_NUMBER_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
Value = str | int | float | bool


def odd_file(path: str | os.PathLike[str]) -> ModelError | None:
    """Return the error of a file that is no GGUF file; None if it is one, or can't be read, or has too much to read."""
    try:
        metadata_entries(path)
    except ModelError as error:
        return error if isinstance(error.__cause__, _ODD) else None
    return None


def metadata_entries(path: str | os.PathLike[str]) -> dict[str, Value]:
    """Return the names and values of a little-endian GGUF file of version 2 or 3, without its arrays.

    Raises:
        ModelError: The file can't be read, is no GGUF file, or exceeds one of the limits above.
    """
    shown = str(path)[:200]
    try:
        with open(path, "rb") as file:
            return _Reader(file).entries()
    except _LimitError as error:
        raise ModelError(
            f"the metadata of {shown!r} has more than is read: {error}",
            hint="Names, texts and numbers of it are needed alone: write it without what a tokenizer needs.",
        ) from error
    except OSError as error:
        raise ModelError(f"can't read {shown!r}: {short_text(error)}", hint="Check the path.") from error
    except _ODD as error:
        raise ModelError(
            f"{shown!r} is not a GGUF file of version 2 or 3: {short_text(error)}", hint="Convert or download it again."
        ) from error


class _OddError(Exception):
    """Bytes that no valid GGUF file holds."""


_ODD = (struct.error, UnicodeDecodeError, _OddError)


class _LimitError(Exception):
    """A valid entry that would take too much memory or time to read."""


class _Reader:
    """Reads one file from its start, and counts the bytes kept and the items skipped.

    The counters are needed because a small file can announce any length.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes_stored = self._passed = 0

    def entries(self) -> dict[str, Value]:
        """Return the names and values of the metadata; arrays are passed over."""
        if self._file.read(4) != b"GGUF":
            raise _OddError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise _OddError(f"version {version}")
        self._number("<Q")  # the number of tensors, not needed
        count = int(self._number("<Q"))
        if count > MAX_METADATA_ENTRIES:
            raise _LimitError(f"{count} entries, at most {MAX_METADATA_ENTRIES} are read")
        found: dict[str, Value] = {}
        for _ in range(count):
            name = self._text()
            kind = int(self._number("<I"))
            if kind == _ARRAY:
                self._pass_over(0)
            elif kind == _TEXT:
                found[name] = self._text()
            elif kind in _NUMBER_FORMATS:
                found[name] = self._number(_NUMBER_FORMATS[kind])
            else:
                raise _OddError(f"a value of kind {kind}")
        return found

    def _number(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(form, self._file.read(struct.calcsize(form)))[0]
        return value

    def _length(self, most: int) -> int:
        length = int(self._number("<Q"))
        if length > most:
            raise _LimitError(f"a length of {length}, at most {most} is read")
        return length

    def _text(self) -> str:
        length = self._length(MAX_STRING_BYTES)
        self._bytes_stored += length
        if self._bytes_stored > MAX_HELD_BYTES:
            raise _LimitError(f"{self._bytes_stored} bytes of names and texts, at most {MAX_HELD_BYTES} are read")
        content = self._file.read(length)
        if len(content) < length:
            raise _OddError("it is cut off")
        return content.decode("utf-8", "replace")

    def _pass_over(self, depth: int) -> None:
        """Pass over an array, and the arrays in it."""
        kind, count = int(self._number("<I")), self._length(MAX_ARRAY)
        if depth > MAX_NESTED or self._file.tell() > MAX_METADATA:
            raise _OddError("arrays that are nested too deep, or too long")
        if (
            kind in _NUMBER_FORMATS
        ):  # skipped at once; strings and arrays have lengths of their own and are skipped one by one
            self._file.seek(count * struct.calcsize(_NUMBER_FORMATS[kind]), os.SEEK_CUR)
            return
        self._passed += count
        if self._passed > MAX_SKIPPED:
            raise _LimitError(f"{self._passed} texts and arrays in arrays, at most {MAX_SKIPPED} are passed over")
        for _ in range(count):
            if kind == _TEXT:
                self._file.seek(self._length(MAX_STRING_BYTES), os.SEEK_CUR)
            elif kind == _ARRAY:
                self._pass_over(depth + 1)
            else:
                raise _OddError(f"an array of kind {kind}")
