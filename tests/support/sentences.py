"""What a sentence says, without its words: the id that the catalogue knows it by, and the values in it."""

from __future__ import annotations

from typing import Any

from sqrtdk.messages import Message


def facts(sentence: object) -> tuple[str, dict[str, Any]]:
    """Id and values of a message; those of a message inside it likewise.

    Example:
        >>> facts(Message("joins.brackets", first=Message("joins.same"), second="h.0"))
        ('joins.brackets', {'first': ('joins.same', {}), 'second': 'h.0'})
    """
    assert isinstance(sentence, Message), f"not of the catalogue: {sentence!r}"
    values = sentence.values.items()
    return sentence.id, {name: facts(value) if isinstance(value, Message) else value for name, value in values}
