"""Words of the catalogue by the names that `baseline`, `kv_cache`, `laws`, `watch_*` and `cli` still call them by."""

from __future__ import annotations

from collections.abc import Mapping

from sqrtdk._language import Language
from sqrtdk.messages import Text, say, unfilled
from sqrtdk.messages import word as _word
from sqrtdk.report.console import bracketed as bracketed

SEVERITIES = unfilled("words.severity")
WORDS = unfilled("terminal.mode")
_IDS = {
    "list comma": "words.mark.list",
    **{mark: f"words.mark.{mark}" for mark in ("comma", "colon", "semicolon", "stop")},
    "site": "words.column.site",
    "attentions with": "words.attentions_with",
    "findings": "terminal.findings",
    "site_counts": "words.sites",
    "title": "terminal.comment.title",
    "of": "terminal.done_of",
    "told": "terminal.baseline.not_counted",
    "column change": "terminal.baseline.change",
    "as in baseline": "terminal.baseline.same",
    **{key: f"terminal.{key.replace(' ', '_')}" for key in ("exit", "more_json", "no cache")},
}


def word(key: str, language: Language, /, **parts: str | int) -> str:
    """Return a word."""
    return _word(_IDS.get(key) or f"terminal.baseline.{key.replace(' ', '_')}", language, **parts)


def counted(one: str, several: str, number: int, language: Language) -> str:
    """Return a count with its noun."""
    return word(several, language, count=f"{number:,}")


def named(table: Mapping[str, Text], name: str, language: Language) -> str:
    """Return the word for a name."""
    return say(table[name], language) if name in table else name
