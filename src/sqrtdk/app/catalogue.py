"""The page's words: one TOML file for each language, looked up by "table.key"."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from sqrtdk._language import Language
from sqrtdk.messages import Text

LANGUAGES: tuple[Language, ...] = ("en", "zh")
TAGS: Mapping[Language, str] = {"en": "en", "zh": "zh-CN"}


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one language."""

    language: Language
    entries: Mapping[str, str]

    def __call__(self, key: str, /, **parts: object) -> str:
        """Return the text of a key with its placeholders filled.

        Example:
            >>> words("zh")("control.keys")
            '键的个数 n'
        """
        return self.entries[key].format(**parts)

    def of(self, text: Text) -> str:
        """Return a bilingual text in this language."""
        return text.zh if self.language == "zh" else text.en

    def get(self, table: str, name: str) -> str:
        """Return the word for a name, or the name itself if the table does not list it.

        Example:
            >>> words("zh").get("control", "keys"), words("zh").get("control", "<b>")
            ('键的个数 n', '<b>')
        """
        return self.entries.get(f"{table}.{name}", name)


@functools.cache
def words(language: Language) -> Words:
    """Return the catalogue of a language."""
    text = importlib.resources.files("sqrtdk.app").joinpath("words", f"{language}.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return Words(language, {f"{table}.{key}": said for table, of in tables.items() for key, said in of.items()})


def language_of(accepted: str) -> Language:
    """Return the language for an Accept-Language header: Chinese if the browser asks for it first, else English.

    Example:
        >>> language_of("zh-TW,en;q=0.5"), language_of("de-DE,zh;q=0.9"), language_of("")
        ('zh', 'en', 'en')
    """
    return "zh" if accepted.strip().lower().startswith("zh") else "en"
