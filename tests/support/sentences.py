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


def facts_of(id: str, sentence: object) -> dict[str, Any] | None:
    """Values of the message of an id, which a sentence is or has inside; None if it has none.

    Example:
        >>> facts_of("joins.same", Message("joins.brackets", first=Message("joins.same"), second="h.0"))
        {}
        >>> facts_of("joins.comma", Message("joins.same")) is None
        True
    """
    if not isinstance(sentence, Message):
        return None
    if sentence.id == id:
        return facts(sentence)[1]
    inside = (facts_of(id, value) for value in sentence.values.values())
    return next((values for values in inside if values is not None), None)
