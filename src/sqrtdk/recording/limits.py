"""What a trace file may ask of a reader: a stranger wrote it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from sqrtdk.errors import TraceFileError

MAX_FILE_BYTES = 2**34
MAX_HEADER_BYTES = 2**24
MAX_BRACKETS = 2**19  # containers in the JSON of a header; each costs a reader 30 times its own size
MAX_TENSORS = 2**17
MAX_CALLS = 2**12
MAX_DIMENSIONS = 8
MAX_SIDE = 2**40  # of a dimension
MAX_NAME = 500
MAX_TEXT = 10_000
MAX_STEPS = 64  # of one vector, or terms of one call
MAX_DEPTH = 16
MAX_RECORD_BYTES = 2**22
MAX_MASK = 2**30  # entries of one mask, a byte each once it is read
MAX_MASKS = 2**32  # of all masks of a file
REPLACE = "Write the file again; docs/trace-file.md says how."


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


def shown(text: object) -> str:
    r"""A stranger's text for a message: short, quoted, and with nothing in it that a terminal would obey.

    Example:
        >>> shown("a\x1b[31m")
        "'a\\x1b[31m'"
    """
    text = str(text)
    return ascii(text if len(text) <= 80 else text[:77] + "...")


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
    opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    at_most(opened, MAX_BRACKETS, f"brackets in {what}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            refuse(f"{what} has the name {shown(twice)} twice")
        return names

    def constant(name: str) -> NoReturn:
        refuse(f"{what} has {name}, which is no JSON", 'Write "NaN", "Infinity" or "-Infinity", in quotes.')

    try:
        document = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except TraceFileError:
        raise
    except RecursionError:
        refuse(f"{what} is nested too deeply; at most {MAX_DEPTH} levels are read")
    except (ValueError, UnicodeDecodeError) as error:
        refuse(f"{what} is not JSON: {shown(error)}")
    _check_depth(document, what)
    return document


def _check_depth(document: Any, what: str) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    refuse(f"{what} is nested too deeply; at most {MAX_DEPTH} levels are read")
