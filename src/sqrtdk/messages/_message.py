"""A sentence that knows how it was made, so that it can be said in another language and read by a program."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqrtdk._language import Language
from sqrtdk.messages._catalogue import Text, catalogue_text, placeholders, topic

Value = str | int | float
_MAX_NESTED_SENTENCES = 20  # sentences inside sentences: a long list, each item joined to those before it
_MAX_SENTENCE_CHARACTERS = 2000  # characters; none of our sentences is longer
_MAX_FILLED_CHARACTERS = 20_000  # a sentence may quote a long error of foreign code


class Message(str):
    """A sentence of the catalogue: an English `str` that remembers its id and values.

    Args:
        id: "topic.key", see `sqrtdk.messages._catalogue`.
        values: one for each placeholder, as it shall be written; a `Message` inside is said in the same language.

    Raises:
        KeyError: the id is not in the catalogue, or a placeholder has no value.

    Example:
        >>> message = Message("joins.brackets", first=Message("joins.same"), second="h.0")
        >>> message, message.id, message.said("zh")
        ('the same (h.0)', 'joins.brackets', '相同（h.0）')

    Reference:
        zope.i18nmessageid.Message, a `str` with the id and the mapping that made it.
    """

    __slots__ = ("id", "values")
    id: str
    values: Mapping[str, Value]

    def __new__(cls, id: str, /, **values: Value) -> Message:
        return cls._made(id, values, catalogue_text(id).english(values).format_map(values))

    @classmethod
    def _made(cls, id: str, values: Mapping[str, Value], english: str) -> Message:
        self = str.__new__(cls, english)
        self.id = id
        self.values = MappingProxyType(dict(values))
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Message._made, (self.id, dict(self.values), str(self))

    def said(self, language: Language) -> str:
        """Return the sentence in a language."""
        return self.text.of(language) if language != "en" else str.__str__(self)

    @property
    def text(self) -> Text:
        """The sentence in English and Chinese."""
        return Text(
            str.__str__(self),
            catalogue_text(self.id).filled(**{n: text_of_value(v) for n, v in self.values.items()}).zh,
        )


def said(sentence: str, language: Language) -> str:
    """Return a sentence in a language; a plain `str`, such as a name or an older record, stays as it is.

    Example:
        >>> said(Message("joins.same"), "zh"), said(Message("joins.same"), "en"), said("h.0", "zh")
        ('相同', 'the same', 'h.0')
    """
    return sentence.said(language) if isinstance(sentence, Message) else sentence


def id_of(sentence: object) -> str | None:
    """Return the id of a sentence, by which code decides; None for a plain text.

    Example:
        >>> id_of(Message("joins.same")), id_of("the same")
        ('joins.same', None)
    """
    return sentence.id if isinstance(sentence, Message) else None


def mentions(sentence: object, id: str) -> bool:
    """Return whether a sentence is the message of an id, or has it inside.

    Example:
        >>> mentions(joined([Message("joins.same"), "h.0"]), "joins.same"), mentions("the same", "joins.same")
        (True, False)
    """
    if not isinstance(sentence, Message):
        return False
    return sentence.id == id or any(mentions(value, id) for value in sentence.values.values())


def text_of_value(value: object) -> Text:
    """Return a value in all languages: a message in its own words, anything else as it is written."""
    if isinstance(value, Text):
        return value
    return value.text if isinstance(value, Message) else Text(str(value), str(value))


def word(id: str, language: Language, /, **values: Value) -> str:
    """Return a sentence of the catalogue in a language.

    Example:
        >>> word("joins.comma", "zh", first="h.0", second="h.1")
        'h.0、h.1'
    """
    return Message(id, **values).said(language)


def named(section: str, name: str) -> str:
    """Return the word for a name, or the name itself if the section has none for it.

    Args:
        section: of the catalogue, as "words.verdict".
        name: a key of the section, or an untrusted name.

    Example:
        >>> said(named("words.verdict", "exact"), "zh"), named("words.verdict", "another")
        ('相符', 'another')
    """
    # A name of an untrusted record may be no key of the section: it is shown as it is.
    topic_of, _, within = section.partition(".")
    return Message(f"{section}.{name}") if f"{within}.{name}" in topic(topic_of) else name


def capitalised(sentence: str) -> Text:
    """Return a sentence in all languages, in English with a capital letter, unless it begins with a value: a name.

    Example:
        >>> capitalised(Message("joins.same")).en, capitalised(joined(["h.0", Message("joins.same")])).en
        ('The same', 'h.0; the same')
    """
    text = text_of_value(sentence)
    return text if _begins_with_value(sentence) else Text(text.en[:1].upper() + text.en[1:], text.zh)


def _begins_with_value(sentence: object) -> bool:
    if not isinstance(sentence, Message):
        return True
    template = catalogue_text(sentence.id).english(sentence.values)
    first = re.match(r"{(\w+)}", template)
    return first is not None and _begins_with_value(sentence.values[first.group(1)])


def joined(sentences: Sequence[str], by: str = "semicolon") -> str:
    """Return sentences as one.

    Args:
        sentences: one or more.
        by: "semicolon" joins sentences; "comma" joins items of a list; "and" puts "and" before the last item.

    Example:
        >>> joined(["q", "k", "v"], "and"), said(joined(["q", "k", "v"], "and"), "zh")
        ('q, k and v', 'q、k 和 v')
    """
    if by == "and" and len(sentences) > 1:
        return Message("joins.and", first=joined(sentences[:-1], "comma"), second=sentences[-1])
    return functools.reduce(lambda first, second: Message(f"joins.{by}", first=first, second=second), sentences)


def fields(sentence: str | None) -> dict[str, Any]:
    """Return what a JSON record holds beside a sentence: `message_id` and `values`, both null for a plain text.

    Example:
        >>> fields(Message("joins.brackets", first=Message("joins.same"), second=3))
        {'message_id': 'joins.brackets', 'values': {'first': {'message': 'the same', 'message_id': 'joins.same', \
'values': {}}, 'second': 3}}
        >>> fields("h.0")
        {'message_id': None, 'values': None}
    """
    if not isinstance(sentence, Message):
        return {"message_id": None, "values": None}
    values = {
        name: {"message": str.__str__(value)} | fields(value) if isinstance(value, Message) else value
        for name, value in sentence.values.items()
    }
    return {"message_id": sentence.id, "values": values}


def recorded(sentence: str, message_id: object, values: object) -> str:
    """Return the sentence that a record holds: a `Message` if its `fields` fit the catalogue, else the plain text.

    Args:
        sentence: as recorded, in English; it stays as it is, even if the catalogue says it otherwise today.
        message_id: of `fields`; None in older records.
        values: of `fields`.

    Example:
        >>> recorded("the same", "joins.same", {}).said("zh")
        '相同'
        >>> type(recorded("another", "joins.unknown", {})).__name__
        'str'
    """
    return _recorded(sentence, message_id, values, 0)


def _recorded(sentence: str, id: object, values: object, depth: int) -> str:
    if (
        not isinstance(id, str)
        or not isinstance(values, dict)
        or depth > _MAX_NESTED_SENTENCES
        or len(sentence) > _MAX_SENTENCE_CHARACTERS
    ):
        return sentence
    try:
        # A record of another version may have an id that this catalogue has not, or other values for it.
        names = placeholders(catalogue_text(id).en)
    except KeyError:
        return sentence
    read: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            inner = value.get("message")
            if not isinstance(inner, str):
                return sentence
            value = _recorded(inner, value.get("message_id"), value.get("values"), depth + 1)
        if not isinstance(value, (str, int, float)) or len(str(value)) > _MAX_FILLED_CHARACTERS:
            return sentence
        read[name] = value
    if set(read) != names:
        return sentence
    made = Message._made(id, read, sentence)
    # An entry may have a value several times: nested, a small record would become a text of gigabytes.
    return made if len(made.text.zh) <= _MAX_FILLED_CHARACTERS else sentence


def table_of(value: Any) -> dict[str, dict[str, Any]]:
    """Return `fields` of each message in dataclasses and containers, by its English text.

    Example:
        >>> table_of({"how": Message("joins.same"), "site": "h.0"})
        {'the same': {'message_id': 'joins.same', 'values': {}}}
    """
    return {str(message): fields(message) for message in _messages(value)}


def said_again(value: Any, table: object) -> Any:
    """Return dataclasses and tuples that were read back, with their sentences as messages.

    Args:
        value: as it was read; anything but dataclasses, tuples and texts in it stays as it is.
        table: what `table_of` returned, of an untrusted file; a sentence without a fitting entry stays as it is.

    Example:
        >>> said_again(("the same", "h.0"), table_of(Message("joins.same")))[0].said("zh")
        '相同'
    """
    return _again(value, table) if isinstance(table, dict) and table else value


def _messages(value: Any) -> Iterator[Message]:
    if isinstance(value, Message):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _messages(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _messages(getattr(value, field.name))


def _again(value: Any, table: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        entry = table.get(value)
        return recorded(value, entry.get("message_id"), entry.get("values")) if isinstance(entry, dict) else value
    if isinstance(value, tuple):
        return tuple(_again(item, table) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _again(getattr(value, field.name), table) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
