"""A report that was saved as JSON, read as a stranger's: whole and of the right types, or refused with one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sqrtdk.app.catalogue import Words
from sqrtdk.app.saved_check import check_html
from sqrtdk.app.saved_diff import diff_html
from sqrtdk.app.saved_watch import runs_html
from sqrtdk.app.settings import RefusedValueError

LARGEST = 16 * 2**20  # bytes of a report
DEEPEST = 24  # lists and objects inside one another; a report has half as many
SCHEMA_VERSION = 1
KINDS: Mapping[str, Callable[[dict[str, Any], Words], Markup]] = {
    "check": check_html,
    "diff": diff_html,
    "watch": runs_html,
}
_MARKS = (  # keys that only such a document has
    ("check", {"calls", "findings", "not_measured"}),
    ("diff", {"pairs", "a", "b", "paragraphs"}),
    ("watch", {"run", "sites", "alarms"}),
    ("watch", {"a", "b", "differences"}),
    ("watch", {"runs"}),
)


def to_html(content: bytes, kind: str, words: Words) -> Markup:
    """Draw a saved report.

    Args:
        content: of the file.
        kind: "check", "diff" or "watch".
        words: of the page.

    Raises:
        RefusedValueError: it is too large, no JSON, no report of sqrtdk, one of another kind or version, or damaged.
    """
    document = _document(content)
    found = next((name for name, keys in _MARKS if keys <= document.keys()), None)
    if found is None:
        raise RefusedValueError("error.no_report")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise RefusedValueError("error.version", got=str(document.get("schema_version"))[:20])
    if found != kind:
        raise RefusedValueError("error.other_kind", found=f"tab.{found}")
    try:
        return KINDS[kind](document, words)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RefusedValueError("error.damaged", reason=f"{type(error).__name__}: {error}"[:200]) from error


def _document(content: bytes) -> dict[str, Any]:
    if len(content) > LARGEST:
        raise RefusedValueError("error.large", most=LARGEST // 2**20)
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        key = "error.page" if content.lstrip()[:1] == b"<" else "error.no_json"
        raise RefusedValueError(key) from error
    tool = document.get("tool") if isinstance(document, dict) else None
    if not isinstance(tool, dict) or tool.get("name") != "sqrtdk" or _deep(document):
        raise RefusedValueError("error.no_report")
    assert isinstance(document, dict)
    return document


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _whole(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError("a number of more digits than a report has")
    return int(digits)


def _deep(value: Any, depth: int = 0) -> bool:
    if depth > DEEPEST:
        return True
    inside: Sequence[Any] = ()
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list):
        inside = value
    return any(_deep(one, depth + 1) for one in inside if isinstance(one, (dict, list)))
