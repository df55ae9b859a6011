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
    """A text in one language, with what stands in its braces.

    Example:
        >>> say(Text("head {head}", "头 {head}"), "zh", head=3)
        '头 3'
    """
    words = text.zh if language == "zh" else text.en
    return words.format(**parts) if parts else words
