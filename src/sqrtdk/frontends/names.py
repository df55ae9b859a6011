"""What every front end makes of names: signatures of inputs, unique parameters, and the error that lists operations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.messages import Message

_MOST_NAMED = 5  # operations that an error names


def argument_names(function: Any, skipped: int) -> tuple[str, ...]:
    """Return the names of a function's positional arguments, without the first `skipped`; () if it tells none."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][skipped:]
    except (ValueError, TypeError):  # a function of C has none
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY))


def input_signature(names: Sequence[str], count: int, named: Sequence[str]) -> inspect.Signature:
    """Return the signature of a program's inputs.

    Args:
        names: Names of the function's arguments.
        count: Number of inputs by position; those beyond `names` are "input_3".
        named: Names of the inputs by name, which come last.

    Raises:
        InvalidValueError: An input is given both by position and by name.
    """
    placed = [*names[:count], *(f"input_{at}" for at in range(len(names[:count]), count))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if twice := set(placed) & set(named):
        raise InvalidValueError(Message("frontends.twice", name=min(twice)), hint=Message("frontends.hint.twice"))
    return inspect.Signature([inspect.Parameter(name, kind) for name in (*placed, *named)])


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names, each repeated one with a number.

    Example:
        >>> unique_names(["a", "b", "a"])
        ['a', 'b', 'a_2']
    """
    made: list[str] = []
    for name in names:
        made.append(name if name not in made else f"{name}_{len(made)}")
    return made


def setting_key(value: Any) -> Any:
    """Return what a setting of a call is told apart by: the value itself, or its identity if it can't be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def refuse_unread(unread: Mapping[str, str], framework: str, version: str, hint: Message) -> None:
    """Raise one error that names all operations that are not read; do nothing if there are none.

    Args:
        unread: Place of the first of each kind, "net.py:12" or "", by the operation's name.
        framework: Name of the framework.
        version: Its version.
        hint: What to write in their place.

    Raises:
        ModelError: There are such operations.
    """
    if not unread:
        return
    named = [f"{name} ({line})" if line else name for name, line in [*unread.items()][:_MOST_NAMED]]
    more = len(unread) - len(named)
    names = ", ".join(named) + (f" (+{more})" if more else "")
    raise ModelError(Message("frontends.unread", framework=framework, names=names, version=version), hint=hint)


def common_path(names: Sequence[str]) -> str:
    """Return the path of the module that holds all parameters of these names."""
    parts = [name.split(".")[:-1] for name in names]
    same = []
    for here in zip(*parts, strict=False):
        if len(set(here)) > 1:
            break
        same.append(here[0])
    return ".".join(same)


def with_layer_numbers(name: str, numbers: Sequence[tuple[str, int]]) -> str:
    """Return the name of a parameter of one layer.

    Example:
        >>> with_layer_numbers("layers.attn.wq", [("layers", 3)]), with_layer_numbers("wq", [("", 3)])
        ('layers.3.attn.wq', '3.wq')
        >>> with_layer_numbers("groups.layers.w", [("groups", 1), ("groups.layers", 2)])
        'groups.1.layers.2.w'
    """
    parts = name.split(".")
    for home, n in reversed(numbers):
        parts.insert(home.count(".") + 1 if home else 0, str(n))
    return ".".join(parts)


def layer_path(home: str, numbers: Sequence[tuple[str, int]]) -> str:
    """Return the path of one layer of a scan inside others.

    Example:
        >>> layer_path("groups.layers", [("groups", 1), ("groups.layers", 2)]), layer_path("", [("", 2)])
        ('groups.1.layers.2', '2')
    """
    return with_layer_numbers(f"{home}.", numbers).strip(".") if home else ".".join(str(n) for _, n in numbers)
