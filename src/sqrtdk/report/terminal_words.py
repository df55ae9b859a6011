"""Words of the catalogue by the names that `laws`, `watch_html`, `watch_terminal` and `cli` still call them by."""

from __future__ import annotations

from sqrtdk._language import Language
from sqrtdk.messages import unfilled
from sqrtdk.messages import word as _word

SEVERITIES = unfilled("words.severity")
_IDS = {
    "list comma": "words.mark.list",
    "comma": "words.mark.comma",
    "colon": "words.mark.colon",
    "of": "terminal.done_of",
}


def word(key: str, language: Language, /, **parts: str | int) -> str:
    """Return a word."""
    return _word(_IDS[key], language, **parts)
