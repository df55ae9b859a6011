"""Limits on what a trace file, which is untrusted, may make a reader allocate and compute."""

from __future__ import annotations

from typing import Any, NoReturn

from sqrtdk import _records
from sqrtdk._records import MAX_BRACKETS as MAX_BRACKETS
from sqrtdk._records import MAX_RECORD_DEPTH as MAX_RECORD_DEPTH
from sqrtdk._records import Record
from sqrtdk._records import quote as quote
from sqrtdk.errors import TraceFileError

MAX_TRACE_BYTES = 2**34  # 16 GiB
MAX_HEADER_BYTES = 2**24  # 16 MiB
MAX_TENSORS = 2**17
MAX_TRACE_CALLS = 2**12
MAX_DIMENSIONS = 8
# Far above any real size, but low enough that products of sizes are cheap to compare with the file's.
MAX_SIDE = 2**40  # entries in one dimension
MAX_NAME_CHARACTERS = 500  # characters
MAX_TEXT_CHARACTERS = 10_000  # characters
MAX_STEPS = 64  # steps of one vector, or terms of one call
MAX_RANGES = 2**10  # ranges of rows, keys or heads of one call on a rank
MAX_RECORD_BYTES = 2**22  # 4 MiB of JSON on one call
MAX_MASK = 2**30  # entries of one mask; each takes a byte once the mask is unpacked
MAX_MASKS = 2**32  # entries of all masks of a file
# Logits to compute for each byte of the file. A reader's work grows with rows x keys, and a file whose heads have one
# feature names many of them in few bytes. A real call stays below: 8192 rows and keys of 64 features in float16 have 16
# logits for each byte of q, k, v and output.
WORK_A_BYTE = 32
LEAST_WORK = 2**20  # logits that any file may ask for, however small it is
REPLACE = "Write the file again; docs/en/trace-file.md says how."


def refuse_file(rule: str, hint: str = REPLACE) -> NoReturn:
    """Raise the error of a file that breaks a rule.

    Raises:
        TraceFileError: always.
    """
    raise TraceFileError(rule, hint=hint)


def at_most(count: int, limit: int, what: str) -> None:
    """Check a count against a limit.

    Raises:
        TraceFileError: The count exceeds the limit.

    Example:
        >>> at_most(9, 8, "dimensions")
        Traceback (most recent call last):
        sqrtdk.errors.TraceFileError: 9 dimensions; at most 8 are read
        Hint: Record less: --calls, --rows or --heads.
    """
    if count > limit:
        refuse_file(f"{count} {what}; at most {limit} are read", "Record less: --calls, --rows or --heads.")


def parse_trace_json(text: bytes | str, what: str) -> Any:
    """Parse untrusted JSON: repeated names, NaN and deep nesting are refused.

    Args:
        text: the document. The caller has checked its size.
        what: the document's name in error messages.

    Raises:
        TraceFileError: The text is not JSON, repeats a name, or has too many or too deep containers.

    Example:
        >>> parse_trace_json('{"a": 1, "a": 2}', "the header")
        Traceback (most recent call last):
        sqrtdk.errors.TraceFileError: the header has the name 'a' twice
        Hint: Write the file again; docs/en/trace-file.md says how.
    """
    return _records.parse_json(text, what, TraceFileError, REPLACE)


def trace_record(kind: type[Record], document: Any, what: str) -> Record:
    """Return the record that a part of a trace file's JSON holds: see `_records.record_from_json`.

    Raises:
        TraceFileError: A field is missing, unknown, of another type or beyond a limit.
    """
    return _records.record_from_json(kind, document, what, TraceFileError, REPLACE, longest=MAX_TEXT_CHARACTERS)
