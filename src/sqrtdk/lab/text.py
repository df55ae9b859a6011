"""Text in the two languages of the report."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk._language import Language


@dataclass(frozen=True, slots=True)
class Text:
    """The same sentence twice.

    Attributes:
        en: English.
        zh: Simplified Chinese.
    """

    en: str
    zh: str


def say(text: Text, language: Language, /, **parts: object) -> str:
    """Return a text in one language, with its placeholders filled in.

    Example:
        >>> say(Text("head {head}", "头 {head}"), "zh", head=3)
        '头 3'
    """
    words = text.zh if language == "zh" else text.en
    return words.format(**parts) if parts else words


def filled(text: Text, /, **parts: object) -> Text:
    """Fill in the placeholders of a text; the values may have two languages themselves.

    Example:
        >>> filled(Text("{told} ({site})", "{told}（{site}）"), told=Text("a head", "一个头"), site="h.0").zh
        '一个头（h.0）'
    """
    english = {name: part.en if isinstance(part, Text) else part for name, part in parts.items()}
    chinese = {name: part.zh if isinstance(part, Text) else part for name, part in parts.items()}
    return Text(say(text, "en", **english), say(text, "zh", **chinese))
