"""Reads records from JSON that may be damaged or hostile: a document within limits, and from it a dataclass.

msgspec checks types, required fields and `msgspec.Meta` limits, and makes the records. What it leaves to this file: a
name that stands twice, the depth and size of a document, fields that a dataclass lacks (msgspec ignores them), numbers
that JSON lacks (see `sqrtdk._json`), and errors that show what was received.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from sqrtdk._json import NONFINITE_NAMES
from sqrtdk.errors import SqrtdkError

Record = TypeVar("Record")
_UNIONS = (types.UnionType, typing.Union)
# an error of msgspec: "Expected `str`, got `int` - at `$.calls[0].site`", "... - at `key` in `$.packages`"
_MSGSPEC_ERROR = re.compile(r"(?P<rule>.*?)(?: - at (?P<key>`key` in )?`\$(?P<at>[^`]*)`)?", re.DOTALL)
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
MAX_BRACKETS = 2**19  # containers in one document; parsed, each takes 30 times its size in the text
MAX_RECORD_DEPTH = 16


def quote(text: object) -> str:
    r"""Return an untrusted text for a message: short, quoted, and without terminal control characters.

    Example:
        >>> quote("a\x1b[31m")
        "'a\\x1b[31m'"
    """
    text = str(text)
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def parse_json(text: bytes | str, what: str, error: type[SqrtdkError], hint: str) -> Any:
    """Parse untrusted JSON: no duplicate names, no NaN, limited depth.

    Args:
        text: the document, whose size was checked before.
        what: its name, for a message.
        error: class of the error to raise.
        hint: of the error.

    Raises:
        SqrtdkError: As `error`: it is no JSON, has too many containers, or is too deep.

    Example:
        >>> from sqrtdk.errors import InvalidValueError
        >>> parse_json('{"a": 1, "a": 2}', "the header", InvalidValueError, "")
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: the header has the name 'a' twice
    """
    opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if opened > MAX_BRACKETS:
        raise error(f"{opened} brackets in {what}; at most {MAX_BRACKETS} are read", hint=hint)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            keys_so_far: set[str] = set()
            twice = next(name for name, _ in pairs if name in keys_so_far or keys_so_far.add(name))  # type: ignore[func-returns-value]
            raise error(f"{what} has the name {quote(twice)} twice", hint=hint)
        return names

    def constant(name: str) -> NoReturn:
        raise error(f"{what} has {name}, which is no JSON", hint='Write "NaN", "Infinity" or "-Infinity", in quotes.')

    try:
        document = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except error:
        raise
    except RecursionError:
        raise _too_deep(what, error, hint) from None
    except (ValueError, UnicodeDecodeError) as broken:
        raise error(f"{what} is not JSON: {quote(broken)}", hint=hint) from broken
    if _is_deep(document):
        raise _too_deep(what, error, hint)
    return document


def _too_deep(what: str, error: type[SqrtdkError], hint: str) -> SqrtdkError:
    return error(f"{what} is nested too deeply; at most {MAX_RECORD_DEPTH} levels are read", hint=hint)


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_RECORD_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def record_from_json(
    kind: type[Record],
    document: Any,
    what: str,
    error: type[SqrtdkError],
    hint: str,
    *,
    others: bool = False,
    longest: int | None = None,
) -> Record:
    """Return the record that a JSON document holds.

    Args:
        kind: a dataclass of numbers, texts, lists, mappings and other dataclasses. Where its type is `float`, null is
            NaN, unless it may be None, and "NaN", "Infinity" and "-Infinity" are the numbers of these names.
        document: parsed JSON.
        what: its name, for a message.
        error: class of the error to raise.
        hint: of the error.
        others: pass over fields that the record lacks, instead of refusing them.
        longest: largest number of characters of a text.

    Raises:
        SqrtdkError: As `error`: a field is missing, unknown, of another type or beyond a limit.

    Example:
        >>> from sqrtdk.errors import InvalidValueError
        >>> from sqrtdk.messages import Text
        >>> record_from_json(Text, {"en": "scale", "zh": "缩放"}, "it", InvalidValueError, "")
        Text(en='scale', zh='缩放')
        >>> record_from_json(Text, {"en": 3, "zh": ""}, "the text", InvalidValueError, "")
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: the text.en is '3'; expected str, got int
    """
    import msgspec  # here, as most runs read no record

    def refuse(rule: str) -> NoReturn:
        raise error(rule, hint=hint)

    ready = _Reader(refuse, others, longest).ready(document, kind, what)
    try:
        return msgspec.convert(ready, kind)
    except msgspec.ValidationError as broken:
        refuse(_as_our_error(str(broken), ready, what))
    except UnicodeEncodeError:  # msgspec fails to say what is wrong with "\\ud800", half of a surrogate pair
        refuse(f"{what} has a text that is not Unicode, where no text belongs")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Turns JSON data into what msgspec takes, along the types of a record."""

    refuse: Callable[[str], NoReturn]
    others: bool
    longest: int | None

    def ready(self, value: Any, hint: Any, at: str) -> Any:
        """Return a parsed value as msgspec can convert it to a type.

        Args:
            value: The value.
            hint: The type.
            at: Its place in the document, for an error.
        """
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.ready(value, inner[0], at)
        if origin in _UNIONS:
            return value if value is None and types.NoneType in inner else self._one_of(value, inner, at)
        if origin is typing.Literal and value not in inner:
            self.refuse(f"{at} {_received(value)}; one of {', '.join(map(str, inner))} belongs there")
        if hint is float:
            if isinstance(value, int) and abs(value) > sys.float_info.max:  # JSON's integers have no end
                self.refuse(f"{at} is {quote(value)}, beyond every number that is read")
            return math.nan if value is None else NONFINITE_NAMES.get(value, value) if isinstance(value, str) else value
        if hint is str and self.longest is not None and isinstance(value, str) and len(value) > self.longest:
            self.refuse(f"{at} has {len(value)} characters; at most {self.longest} are read")
        if isinstance(value, dict):
            return self._object(value, hint, inner, at)
        if isinstance(value, list | tuple) and inner:
            pair = origin is tuple and inner[-1] is not Ellipsis  # tuple[str, float], whose length msgspec checks
            of = (*inner, *[Any] * len(value)) if pair else (inner[0],) * len(value)
            return [self.ready(item, of[number], f"{at}[{number}]") for number, item in enumerate(value)]
        return value

    def _one_of(self, value: Any, choices: Sequence[Any], at: str) -> Any:
        """Return a value of a union ready; records have no union of two records or two lists."""
        bare = [typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in choices]
        nested = isinstance(value, dict | list | tuple)
        wanted = [one for one in bare if nested != (one in (str, int, float, bool, types.NoneType))]
        best = float if float in wanted else str if str in wanted else wanted[0] if wanted else Any
        return self.ready(value, best, at)

    def _object(self, value: dict[str, Any], hint: Any, inner: Sequence[Any], at: str) -> dict[str, Any]:
        if not dataclasses.is_dataclass(hint):
            of = inner[1] if len(inner) == 2 else Any
            return {name: self.ready(item, of, f"{at}[{quote(name)}]") for name, item in value.items()}
        hints = _hints(typing.cast(type, hint))
        if not self.others and (unknown := value.keys() - hints.keys()):
            self.refuse(f"{at} has the unknown field {quote(min(unknown))}")
        return {name: self.ready(value[name], of, f"{at}.{name}") for name, of in hints.items() if name in value}


@functools.cache  # get_type_hints evaluates all annotations on each call
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _as_our_error(text: str, document: Any, what: str) -> str:
    """Return an error of msgspec as one of ours: where it is, what was received, and the rule."""
    match = _MSGSPEC_ERROR.fullmatch(text)
    assert match is not None
    rule, at = match["rule"].replace("`", ""), match["at"] or ""
    if (name := rule.removeprefix("Object missing required field ")) != rule:
        return f"{what}{at} lacks {name!r}"
    rule = rule[0].lower() + rule[1:]
    if match["key"] or "[...]" in at:  # a name of a mapping, or what stands below one: msgspec does not say which
        return f"{what}{at} has a wrong {'name' if match['key'] else 'value'}; {rule}"
    for name, number in _PATH_STEP.findall(at):
        document = document[int(number)] if number else document[name]
    return f"{what}{at} {_received(document)}; {rule}"


def _received(value: Any) -> str:
    """Return what an error says of a value: itself if it is short, else its size."""
    if isinstance(value, str) and len(value) > 80:
        return f"has {len(value)} characters"
    if isinstance(value, dict | list):
        return f"is {'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return f"is {quote(value)}"
