"""Reads the catalogue: one TOML file for each topic, and in it for each sentence a table with a text a language.

The id of a sentence is the file's name and the table's, joined by dots. In words/laws.toml:

    [causal.earlier_moves]  # id: laws.causal.earlier_moves
    en = "outputs of {count} earlier positions of {cut} move with later tokens"
    one = "outputs of {count} earlier position of {cut} move with later tokens"
    zh = "前面 {cut} 个位置中有 {count} 个的输出随后面的词元变化"

`one` is English for a `count` of 1. A placeholder is a name and nothing else: the caller writes its numbers out.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from importlib.abc import Traversable

LANGUAGES = ("en", "zh")
SINGULAR = "one"
COUNT_VALUE = "count"  # the value that decides between `one` and `en`
_CHINESE = re.compile("[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")  # characters and punctuation of full width
_FOLDERS: list[Traversable] = [importlib.resources.files("sqrtdk.messages").joinpath("words")]


@dataclass(frozen=True, slots=True)
class Text:
    """The same text in every language.

    Attributes:
        en: English.
        zh: Simplified Chinese.
        one: English for a count of 1, where it differs.
    """

    en: str
    zh: str
    one: str | None = field(default=None, repr=False)

    def filled(self, /, **values: object) -> Text:
        """Return the text with its placeholders filled in; a value may be a text of two languages itself.

        Example:
            >>> Text("{what} ({site})", "{what}（{site}）").filled(what=Text("a head", "一个头"), site="h.0").zh
            '一个头（h.0）'
        """
        english = {name: value.en if isinstance(value, Text) else value for name, value in values.items()}
        chinese = {name: value.zh if isinstance(value, Text) else value for name, value in values.items()}
        return Text(self.english(values).format_map(english), self._chinese(values).format_map(chinese))

    def _chinese(self, values: Mapping[str, object]) -> str:
        """Return the Chinese template without the blanks that stand between two Chinese characters once it is filled.

        The blank of "{sites} 的差异" is for "h.0 的差异"; a value "另有 2 处" gives "另有 2 处的差异".
        """
        template = self.zh
        for name, value in values.items():
            if isinstance(value, Text):
                if _CHINESE.match(value.zh[-1:]):
                    template = re.sub(rf"(?<={{{name}}}) (?={_CHINESE.pattern})", "", template)
                if _CHINESE.match(value.zh):
                    template = re.sub(rf"(?<={_CHINESE.pattern}) (?={{{name}}})", "", template)
        return template

    def english(self, values: Mapping[str, object]) -> str:
        """Return the English template of the sentence: its singular if there is one and `values` has a `count` of 1.

        Args:
            values: Values of the template's parts.
        """
        return self.one if self.one is not None and values.get(COUNT_VALUE) in (1, "1") else self.en

    def of(self, language: str) -> str:
        """Return the template in a language: the Chinese one for "zh", and otherwise the English one."""
        return self.zh if language == "zh" else self.en


def in_language(text: Text, language: str, /, **values: object) -> str:
    """Return a text in one language, with its placeholders filled in.

    Example:
        >>> in_language(Text("head {head}", "头 {head}"), "zh", head=3)
        '头 3'
    """
    return (text.filled(**values) if values else text).of(language)


def add_words(folder: Traversable) -> None:
    """Add the topics of another distribution to the catalogue; a second call with the same folder does nothing.

    Args:
        folder: Folder with a file `<topic>.toml` for each topic; it may extend a topic of another folder.
    """
    if folder not in _FOLDERS:
        _FOLDERS.append(folder)
        topic.cache_clear()
        topics.cache_clear()


@functools.cache
def topic(name: str) -> Mapping[str, Text]:
    """Return the texts of a topic.

    Args:
        name: Name of its files, without ".toml".

    Returns:
        The texts by key, which is the names of the nested tables joined by dots; {} if no file has that name.
    """
    files = (path for folder in _FOLDERS if (path := folder.joinpath(f"{name}.toml")).is_file())
    tables = (tomllib.loads(path.read_text(encoding="utf-8")) for path in files)
    return {key: Text(**entry) for table in tables for key, entry in entries(table)}


@functools.cache
def topics() -> tuple[str, ...]:
    """Return the names of all topics."""
    files = (path.name for folder in _FOLDERS for path in folder.iterdir())
    return tuple(sorted({name.removesuffix(".toml") for name in files if name.endswith(".toml")}))


def catalogue_text(id: str) -> Text:
    """Return the text of an id with its placeholders.

    Raises:
        KeyError: there is no such sentence.

    Example:
        >>> catalogue_text("joins.semicolon").en
        '{first}; {second}'
    """
    name, _, key = id.partition(".")
    # an id may come from an untrusted record: only a plain name becomes the name of a file
    texts = topic(name) if name.isidentifier() and name in topics() else {}
    if key not in texts:
        raise KeyError(f"no sentence has the id {id!r}")
    return texts[key]


def unfilled(section: str) -> dict[str, Text]:
    """Return the texts of a section by their keys, for a page's script, which fills the placeholders itself.

    Example:
        >>> unfilled("pages.script")["fails"].zh, unfilled("pages.script")["title"].en
        ('有错误', '{site} · head {head}')
    """
    name, _, within = section.partition(".")
    start = f"{within}."
    return {key.removeprefix(start): text for key, text in topic(name).items() if key.startswith(start)}


def entries(tables: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables.

    Args:
        tables: Nested dicts; a dict is an entry if one of its values is not a dict.
        within: Prefix of the keys.

    Yields:
        The names of the tables joined by dots, and the entry.
    """
    for key, entry in tables.items():
        if isinstance(entry, dict) and entry and all(isinstance(one, dict) for one in entry.values()):
            yield from entries(entry, f"{within}{key}.")
        else:
            yield within + key, entry


def faults(entry: Any) -> Iterator[str]:
    """Yield what is wrong with an entry: a missing language, a placeholder that another language lacks.

    Example:
        >>> list(faults({"en": "It is {peak}.", "zh": "它是 {top}。"}))
        ["en has the placeholders 'peak', zh 'top'"]
    """
    if not isinstance(entry, dict):
        yield f"a table with {' and '.join(LANGUAGES)} was expected; got {entry!r}"
        return
    for language in LANGUAGES:
        if not isinstance(entry.get(language), str) or not entry[language].strip():
            yield f"it has no text in {language}"
    if others := set(entry) - {*LANGUAGES, SINGULAR}:
        yield f"it has {quoted(others)} beside {' and '.join(LANGUAGES)}"
    names = {}
    for language in (*LANGUAGES, SINGULAR):
        if isinstance(words := entry.get(language), str):
            try:
                names[language] = placeholders(words)
            except ValueError as error:
                yield f"{language}: {error}"
    for language in (LANGUAGES[1], SINGULAR):
        if LANGUAGES[0] in names and names.get(language, names[LANGUAGES[0]]) != names[LANGUAGES[0]]:
            yield f"en has the placeholders {quoted(names['en'])}, {language} {quoted(names[language])}"
    if SINGULAR in names and COUNT_VALUE not in names[SINGULAR]:
        yield f"it has a singular and no placeholder {COUNT_VALUE!r}"


def placeholders(words: str) -> set[str]:
    """Return the names of a text's placeholders.

    Raises:
        ValueError: a placeholder is more than a name.

    Example:
        >>> sorted(placeholders("{value} of {name}"))
        ['name', 'value']
    """
    names = set()
    for _, name, spec, conversion in string.Formatter().parse(words):
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            written = f"{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            raise ValueError(f"a placeholder is a name in braces and nothing else; got {{{written}}}")
        names.add(name)
    return names


def quoted(names: set[str]) -> str:
    """Return names as a list for an error."""
    return ", ".join(sorted(map(repr, names))) or "(none)"
