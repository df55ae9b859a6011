"""Text in the two languages of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """The same sentence twice.

    Attributes:
        en: English.
        zh: Simplified Chinese.
    """

    en: str
    zh: str
