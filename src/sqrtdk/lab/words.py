"""The words of a claim, in English and Chinese: one TOML file beside its experiment, with placeholders for figures.

Each text is a table with `en` and `zh`; `{name}` in it is a placeholder. The experiment decides how a number is
written, so a placeholder is a name and nothing else; `{{` is a brace.
"""

from __future__ import annotations

import importlib.resources
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Text

LANGUAGES = ("en", "zh")
EVERY = ("statement", "method", "control", "why")  # texts that every claim must have


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of one file by key; keys of nested tables are joined by dots, as "part.mean".

    Attributes:
        source: name of the file.
        texts: with their placeholders.

    Example:
        >>> words = Words("x.toml", {"why": Text("It is {peak}.", "它是 {peak}。")})
        >>> words("why", peak=0.5).zh
        '它是 0.5。'
    """

    source: str
    texts: Mapping[str, Text]

    def __call__(self, key: str, **values: object) -> Text:
        """Return a text with its placeholders filled in.

        Args:
            key: of the text.
            values: one for each placeholder; a `Text` gives each language its own.

        Raises:
            InvalidValueError: There is no such text, or the values are not those of its placeholders.
        """
        if key not in self.texts:
            raise _error(self.source, [f"there is no text {key!r} among {', '.join(self.texts)}"])
        text = self.texts[key]
        wanted = set(_placeholders(text.en))
        if wanted != set(values):
            raise _error(self.source, [f"{key} has the placeholders {_names(wanted)}, and got {_names(set(values))}"])
        return Text(
            text.en.format_map(
                {name: value.en if isinstance(value, Text) else value for name, value in values.items()}
            ),
            text.zh.format_map(
                {name: value.zh if isinstance(value, Text) else value for name, value in values.items()}
            ),
        )


def words_of(module: str) -> Words:
    """Read the words beside a module, in the TOML file of its name.

    Args:
        module: its `__name__`.

    Raises:
        InvalidValueError: See `parse`; or there is no such file.
    """
    package, _, name = module.rpartition(".")
    source = f"{name}.toml"
    try:
        content = importlib.resources.files(package).joinpath(source).read_text(encoding="utf-8")
    except OSError as error:
        raise _error(source, [f"it cannot be read: {error}"]) from error
    return parse(content, source)


def parse(content: str, source: str) -> Words:
    """Read the words of a claim.

    Args:
        content: TOML.
        source: name of the file, for errors.

    Raises:
        InvalidValueError: It is no TOML; a required text is missing; a language is missing or empty, or has other
            placeholders than the other language. All faults are listed.

    Example:
        >>> same = '{en = "It is {peak}.", zh = "它是 {peak}。"}'
        >>> parse("".join(f"{key} = {same}\\n" for key in EVERY), "x.toml")("method", peak=1).en
        'It is 1.'
    """
    try:
        tables = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise _error(source, [f"it is no TOML: {error}"]) from error
    found = dict(_texts(tables))
    wrong = [f"the text {key!r} is missing" for key in EVERY if key not in found]
    wrong += [f"{key}: {fault}" for key, entry in found.items() for fault in _faults(entry)]
    if wrong:
        raise _error(source, wrong)
    return Words(source, {key: Text(entry["en"], entry["zh"]) for key, entry in found.items()})


def _texts(tables: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries that are not tables of tables, by their keys joined by dots."""
    for key, entry in tables.items():
        if isinstance(entry, dict) and entry and all(isinstance(one, dict) for one in entry.values()):
            yield from _texts(entry, f"{within}{key}.")
        else:
            yield within + key, entry


def _faults(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"a table with {' and '.join(LANGUAGES)} was expected; got {entry!r}"
        return
    for language in LANGUAGES:
        if not isinstance(entry.get(language), str) or not entry[language].strip():
            yield f"it has no text in {language}"
    if others := set(entry) - set(LANGUAGES):
        yield f"it has {_names(others)} beside {' and '.join(LANGUAGES)}"
    names = {}
    for language in LANGUAGES:
        if isinstance(text := entry.get(language), str):
            try:
                names[language] = set(_placeholders(text))
            except ValueError as error:
                yield f"{language}: {error}"
    if len(names) == len(LANGUAGES) and names["en"] != names["zh"]:
        yield f"en has the placeholders {_names(names['en'])}, zh {_names(names['zh'])}"


def _placeholders(text: str) -> Iterator[str]:
    for _, name, spec, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            written = f"{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            raise ValueError(f"a placeholder is a name in braces and nothing else; got {{{written}}}")
        yield name


def _names(names: set[str]) -> str:
    return ", ".join(sorted(map(repr, names))) or "(none)"


def _error(source: str, wrong: list[str]) -> InvalidValueError:
    return InvalidValueError(
        f"the words of the claim in {source} are not whole: {'; '.join(wrong)}",
        hint="Every text has English and Chinese with the same placeholders; the experiment gives each a value.",
    )
