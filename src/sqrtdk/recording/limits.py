"""What a trace file may ask of a reader: a stranger wrote it."""

from __future__ import annotations

from typing import Any, NoReturn

from sqrtdk import _stranger
from sqrtdk._stranger import MAX_BRACKETS as MAX_BRACKETS
from sqrtdk._stranger import MAX_DEPTH as MAX_DEPTH
from sqrtdk._stranger import shown as shown
from sqrtdk.errors import TraceFileError

MAX_FILE_BYTES = 2**34
MAX_HEADER_BYTES = 2**24
MAX_TENSORS = 2**17
MAX_CALLS = 2**12
MAX_DIMENSIONS = 8
MAX_SIDE = 2**40  # of a dimension
MAX_NAME = 500
MAX_TEXT = 10_000
MAX_STEPS = 64  # of one vector, or terms of one call
MAX_RECORD_BYTES = 2**22
MAX_MASK = 2**30  # entries of one mask, a byte each once it is read
MAX_MASKS = 2**32  # of all masks of a file
# What a reader computes grows with rows x keys, of which a file with heads of one feature can name many in few bytes.
# 8192 rows and keys of 64 features in float16: 16 logits for each byte of q, k, v and output.
WORK_A_BYTE = 32
LEAST_WORK = 2**20  # that any file may ask for
REPLACE = "Write the file again; docs/en/trace-file.md says how."


def refuse(rule: str, hint: str = REPLACE) -> NoReturn:
    """Raise the error of a file that breaks a rule.

    Raises:
        TraceFileError: always.
    """
    raise TraceFileError(rule, hint=hint)


def at_most(count: int, limit: int, what: str) -> None:
    """Refuse what is more than a reader takes.

    Raises:
        TraceFileError: It is.

    Example:
        >>> at_most(9, 8, "dimensions")
        Traceback (most recent call last):
        sqrtdk.errors.TraceFileError: 9 dimensions; at most 8 are read
    """
    if count > limit:
        refuse(f"{count} {what}; at most {limit} are read", "Record less: --calls, --rows or --heads.")


def parse_json(text: bytes | str, what: str) -> Any:
    """Parse JSON of a stranger: no name twice, no NaN, no depth.

    Args:
        text: the document, of a size that was checked.
        what: it is, for a message.

    Raises:
        TraceFileError: It is no JSON, has too many containers, or is too deep.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "the header")
        Traceback (most recent call last):
        sqrtdk.errors.TraceFileError: the header has the name 'a' twice
    """
    return _stranger.parse_json(text, what, TraceFileError, REPLACE)
