"""Translates the package's own English sentences into Chinese by matching them against the catalogues in `words`.

Findings, alarms and reasons are made and recorded in English, and a record that is read back holds only the finished
sentence. So the sentence is matched against the templates of the catalogues. A value inside it that is a sentence of a
catalogue itself is translated too. A sentence that no template matches stays English.

Sentences are looked up in `CATALOGUES`. Catalogues of single words, such as `TITLES`, are used only if a caller names
them: a module may be called "query", and its name must not be translated.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from sqrtdk._language import Language
from sqrtdk.messages import Message
from sqrtdk.messages import said as message_said

CATALOGUES = ("findings", "laws", "alarms", "reasons", "verbs", "sources")
TITLES = ("titles",)
Catalogues = tuple[str, ...]
_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
_JOINTS = {"; ": "；", " and ": "，以及 "}
# "first sentence; second sentence", and " and " before a declaration such as "config.scale_attn_weights"
_JOINT = re.compile(r"; | and (?=config\.)")
_FEW = 5  # a template with fewer letters than this is hardly more than punctuation
_LONGEST = 2000  # characters; none of our sentences is longer, so a longer one is untrusted text and stays as it is
_DEEPEST = 40  # levels of sentences inside sentences; a deeper text stays as it is


@dataclass(frozen=True, slots=True)
class Template:
    """A sentence with placeholders.

    Attributes:
        english: the sentence, with `{name}` for each value.
        chinese: its translation, with the same names.
        pattern: matches a whole sentence, with a group for each name.
        joiner: whether it is hardly more than punctuation, as "{a}: {b}", which would match almost any text. A joiner
            matches only if one of its values is a known sentence or all are numbers.
    """

    english: str
    chinese: str
    pattern: re.Pattern[str]
    joiner: bool


def said(text: str, language: Language, catalogues: Catalogues = CATALOGUES) -> str:
    """Return a sentence in a language.

    Args:
        text: a sentence made by a rule, an alarm or the trace.
        language: "en" returns the text unchanged.
        catalogues: names of the catalogues to look in.

    Returns:
        The Chinese sentence, or the English one if no template matches.

    Example:
        >>> said("no reason given", "zh"), said("no reason given", "en"), said("another sentence", "zh")
        ('未给出理由', 'no reason given', 'another sentence')
    """
    if language == "en" or isinstance(text, Message):
        return message_said(text, language)
    chinese = _chinese(text, catalogues)
    return text if chinese is None else chinese


@functools.lru_cache(maxsize=4096)
def _chinese(text: str, catalogues: Catalogues, depth: int = 0) -> str | None:
    if len(text) > _LONGEST or depth > _DEEPEST:
        return None
    mark = _JOINT.search(text)
    both = mark and [_chinese(one, catalogues, depth + 1) for one in (text[: mark.start()], text[mark.end() :])]
    if mark and both and all(both):  # first of all, as a template would take both sides for one value
        return f"{both[0]}{_JOINTS[mark[0]]}{both[1]}"
    for template in templates(catalogues):
        found = template.pattern.fullmatch(text)
        if found is None:
            continue
        english = found.groupdict()
        parts = {name: _chinese(part, catalogues, depth + 1) for name, part in english.items()}
        # "{a}: {b}" would match any text with a colon, so one value must be known, or all must be numbers
        if template.joiner and not any(parts.values()) and not all(map(_NUMBER.fullmatch, english.values())):
            continue
        return template.chinese.format_map({name: parts[name] or part for name, part in english.items()})
    return None


@functools.cache
def templates(catalogues: Catalogues = CATALOGUES) -> tuple[Template, ...]:
    """Return the templates of the catalogues, most literal text first, so that the most specific one matches."""
    tables = (table for name in catalogues for table in read(name).values())
    made = [_template(english, chinese) for table in tables for english, chinese in table.items()]
    return tuple(sorted(made, key=lambda template: -sum(map(len, _literals(template.english)))))


def placeholders(text: str) -> set[str]:
    """Return the names of a text's placeholders.

    Example:
        >>> sorted(placeholders("{value} of {name}"))
        ['name', 'value']
    """
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def read(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return a catalogue: its tables of English -> Chinese, in the order of the file."""
    content = importlib.resources.files("sqrtdk.report").joinpath("words", f"{name}.toml").read_text(encoding="utf-8")
    tables: Mapping[str, Mapping[str, str]] = tomllib.loads(content)
    return tables


def _template(english: str, chinese: str) -> Template:
    parts = []
    for literal, name, _, _ in string.Formatter().parse(english):
        parts.append(re.escape(literal))
        if name is not None:
            parts.append(f"(?P<{name}>.+?)")
    joiner = bool(parts[1:]) and sum(map(str.isalpha, "".join(_literals(english)))) < _FEW
    return Template(english, chinese, re.compile("".join(parts), re.DOTALL), joiner)


def _literals(text: str) -> list[str]:
    return [literal for literal, _, _, _ in string.Formatter().parse(text)]
