"""Untrusted input: JSON within limits, and texts made safe for a message."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from sqrtdk.errors import SqrtdkError

MAX_BRACKETS = 2**19  # containers in one document; parsed, each takes 30 times its size in the text
MAX_DEPTH = 16


def shown(text: object) -> str:
    r"""Return an untrusted text for a message: short, quoted, and without terminal control characters.

    Example:
        >>> shown("a\x1b[31m")
        "'a\\x1b[31m'"
    """
    text = str(text)
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def parse_json(text: bytes | str, what: str, error: type[SqrtdkError], hint: str) -> Any:
    """Parse untrusted JSON: no duplicate names, no NaN, limited depth.

    Args:
        text: the document, whose size was checked before.
        what: its name, for a message.
        error: class of the error to raise.
        hint: of the error.

    Raises:
        SqrtdkError: As `error`: it is no JSON, has too many containers, or is too deep.

    Example:
        >>> from sqrtdk.errors import InvalidValueError
        >>> parse_json('{"a": 1, "a": 2}', "the header", InvalidValueError, "")
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: the header has the name 'a' twice
    """
    opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if opened > MAX_BRACKETS:
        raise error(f"{opened} brackets in {what}; at most {MAX_BRACKETS} are read", hint=hint)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise error(f"{what} has the name {shown(twice)} twice", hint=hint)
        return names

    def constant(name: str) -> NoReturn:
        raise error(f"{what} has {name}, which is no JSON", hint='Write "NaN", "Infinity" or "-Infinity", in quotes.')

    try:
        document = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except error:
        raise
    except RecursionError:
        raise _too_deep(what, error, hint) from None
    except (ValueError, UnicodeDecodeError) as broken:
        raise error(f"{what} is not JSON: {shown(broken)}", hint=hint) from broken
    if _is_deep(document):
        raise _too_deep(what, error, hint)
    return document


def _too_deep(what: str, error: type[SqrtdkError], hint: str) -> SqrtdkError:
    return error(f"{what} is nested too deeply; at most {MAX_DEPTH} levels are read", hint=hint)


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
