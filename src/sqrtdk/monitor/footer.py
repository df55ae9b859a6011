"""The footer of a Parquet file, read as bytes: the codecs that pyarrow must not meet unchecked.

pyarrow ends the process (`std::terminate`) if it is asked for the codec of a column and the file names an unknown
codec, which one flipped bit can cause. The footer is a struct of Thrift's compact protocol at the end of the file:

    PAR1 ... pages ... | FileMetaData | its length, 4 bytes, little endian | PAR1
"""

from __future__ import annotations

from typing import Any

from sqrtdk.errors import RunFolderError

SNAPPY = 1  # in Parquet's enumeration of codecs
_MAGIC = b"PAR1"
_ROW_GROUPS, _COLUMNS, _META_DATA, _CODEC = 4, 1, 3, 4  # field numbers on the path from the footer to a codec
_MAX_FOOTER_DEPTH = 16  # nesting of structs and lists; a footer has 8 levels
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGER_TYPES = (4, 5, 6)


def codecs(content: bytes) -> list[int]:
    """Return the codec of each column of each row group, as numbers of Parquet's enumeration.

    Args:
        content: the whole file.

    Raises:
        RunFolderError: There is no footer, or it breaks off.

    Example:
        >>> codecs(b"PAR1 and no more")
        Traceback (most recent call last):
        sqrtdk.errors.RunFolderError: it is damaged: it does not end as a Parquet file does
    """
    if len(content) < 12 or content[-4:] != _MAGIC or content[:4] != _MAGIC:
        raise RunFolderError("it is damaged: it does not end as a Parquet file does")
    length = int.from_bytes(content[-8:-4], "little")
    if length > len(content) - 12:
        raise RunFolderError(f"it is damaged: a footer of {length} bytes in a file of {len(content)}")
    try:
        groups = _Reader(content[-8 - length : -8]).struct(0)[_ROW_GROUPS]
        found = [column[_META_DATA][_CODEC] for group in groups for column in group[_COLUMNS]]
        if not all(isinstance(codec, int) for codec in found):
            raise TypeError
        return found
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError("it is damaged: its footer is no Parquet footer") from error


class _Reader:
    """Reader of consecutive values; each takes at least one byte, so the work is bounded by the length."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Return the fields of a struct by number."""
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            step, kind = header >> 4, header & 15
            number = number + step if step else self._integer()
            # a bool field has its value in its kind: 0x11 is "field 1, true"
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_FOOTER_DEPTH:
            raise ValueError("too deep")
        if kind in _INTEGER_TYPES:
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_LIST, _SET):
            header = self._byte()
            count = header >> 4 if header >> 4 != 15 else self._varint()
            return [self._value(header & 15, depth + 1) for _ in range(count)]
        if kind == _BINARY:
            return self._bytes(self._varint())
        sizes = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}  # in a list, a bool is a byte of its own
        return self._bytes(sizes[kind])

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._content) - self._at:
            raise IndexError
        self._at += count
        return self._content[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)  # zigzag: 0, -1, 1, -2, ... are 0, 1, 2, 3, ...
