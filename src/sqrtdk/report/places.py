"""Names the lines of code that wrote the parts of an attention."""

from __future__ import annotations

import re

from sqrtdk._language import Language
from sqrtdk.messages import word
from sqrtdk.report.figures import format_number
from sqrtdk.tracing.records import AttentionCall


def source_lines(call: AttentionCall, language: Language = "en") -> dict[str, str]:
    """Return "file:line" -> the parts written there: the product, factors of the scale, the softmax."""
    factors = [
        (word("terminal.by_kernel" if factor.where == "op" else "terminal.factor_on", language,
              value=format_number(factor.value), where=factor.where), factor.at)
        for factor in call.scale.factors
    ]  # fmt: skip
    parts: dict[str, list[str]] = {}
    for what, at in (("q.k", call.product_at), *factors, ("softmax", call.softmax_at)):
        if at is not None:
            parts.setdefault(at, []).append(what)
    return {at: word("words.mark.list", language).join(dict.fromkeys(whats)) for at, whats in parts.items()}


def in_files(call: AttentionCall) -> bool:
    """Return whether the places are lines of files. A graph's places, `<node>:12`, are unlike in each layer."""
    return not any(at.startswith("<") for at in source_lines(call))


def at_text(at: str, language: Language = "en") -> str:
    """Return a finding's files and lines with the language's punctuation between them.

    Example:
        >>> at_text("a.py:3, b.py:14"), at_text("a.py:3, b.py:14", "zh")
        ('a.py:3, b.py:14', 'a.py:3、b.py:14')
    """
    return re.sub(r"(?<=:)(\d+), ", rf"\1{word('words.mark.list', language)}", at)


def places_text(call: AttentionCall, language: Language = "en") -> str:
    """Return the result of `source_lines` as one line; empty if no place is known."""
    written = source_lines(call, language).items()
    return word("words.mark.semicolon", language).join(
        word("terminal.what_at", language, what=what, at=at) for at, what in written
    )
