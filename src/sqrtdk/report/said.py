"""What the product says in English sentences of its own making, in Chinese: matched against the catalogues of `words`.

Findings, alarms and reasons are made and recorded in English; a record that was read back has the sentence alone. So
the Chinese is found by the sentence: it is matched against the templates, and what stands in their places, where that
is a sentence of a catalogue itself, is put over as well. Where none fits, the English is kept.

Sentences are looked up in `CATALOGUES`. Single words would be found where a module is called so: the catalogues that
have some, such as `TITLES`, are named by who asks.
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

CATALOGUES = ("findings", "laws", "alarms", "reasons", "verbs", "sources")
TITLES = ("titles",)
Catalogues = tuple[str, ...]
_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
_JOINTS = {"; ": "；", " and ": "，以及 "}
_JOINT = re.compile(r"; | and (?=config\.)")
_FEW = 5  # letters
_LONGEST = 2000  # characters; a longer one is a stranger's, and is kept as it is
_DEEPEST = 40  # sentences within sentences, the sides of a joint counted; a deeper text is kept as it is


@dataclass(frozen=True, slots=True)
class Template:
    """A sentence with places.

    Attributes:
        english: with `{name}` for each place.
        chinese: with the same names.
        pattern: what a whole sentence must be, a group for each name.
        joiner: hardly anything but marks and places: it fits where one of its parts is known, or all are numbers.
    """

    english: str
    chinese: str
    pattern: re.Pattern[str]
    joiner: bool


def said(text: str, language: Language, catalogues: Catalogues = CATALOGUES) -> str:
    """A sentence in a language.

    Args:
        text: as the rules, the alarms and the trace make it.
        language: "en" gives the text itself.
        catalogues: where it is looked up.

    Returns:
        The Chinese; the English where no template fits.

    Example:
        >>> said("head 3 has a logit 61.5 above the mean of its row", "zh")
        '头 3 的最大 logit 比该行均值高 61.5'
        >>> said("head 3 has a logit 61.5 above the mean of its row", "en"), said("another sentence", "zh")
        ('head 3 has a logit 61.5 above the mean of its row', 'another sentence')
    """
    if language == "en":
        return text
    chinese = _chinese(text, catalogues)
    return text if chinese is None else chinese


@functools.lru_cache(maxsize=4096)
def _chinese(text: str, catalogues: Catalogues, depth: int = 0) -> str | None:
    if len(text) > _LONGEST or depth > _DEEPEST:
        return None
    mark = _JOINT.search(text)
    both = mark and [_chinese(one, catalogues, depth + 1) for one in (text[: mark.start()], text[mark.end() :])]
    if mark and both and all(both):  # before a template takes both for one part
        return f"{both[0]}{_JOINTS[mark[0]]}{both[1]}"
    for template in templates(catalogues):
        found = template.pattern.fullmatch(text)
        if found is None:
            continue
        english = found.groupdict()
        parts = {name: _chinese(part, catalogues, depth + 1) for name, part in english.items()}
        if template.joiner and not any(parts.values()) and not all(map(_NUMBER.fullmatch, english.values())):
            continue
        return template.chinese.format_map({name: parts[name] or part for name, part in english.items()})
    return None


@functools.cache
def templates(catalogues: Catalogues = CATALOGUES) -> tuple[Template, ...]:
    """All sentences of the catalogues, those that say most themselves in front."""
    tables = (table for name in catalogues for table in read(name).values())
    made = [_template(english, chinese) for table in tables for english, chinese in table.items()]
    return tuple(sorted(made, key=lambda template: -sum(map(len, _literals(template.english)))))


def placeholders(text: str) -> set[str]:
    """The names of a text's places.

    Example:
        >>> sorted(placeholders("{value} of {name}"))
        ['name', 'value']
    """
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def read(name: str) -> Mapping[str, Mapping[str, str]]:
    """A catalogue: its tables, each English = Chinese, in their order."""
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
