"""Reads the JSON objects of a trace file field by field. Wrong types and unknown fields are refused."""

from __future__ import annotations

from typing import Any

from sqrtdk.recording.codec import number_from_json
from sqrtdk.recording.limits import MAX_TEXT, refuse, shown

_NONE = object()


class Fields:
    """A JSON object from which fields are taken one by one. A field that is null counts as absent."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            refuse(f"{what} is a {type(value).__name__}; an object belongs there")
        self.what = what
        self._rest: dict[str, Any] = dict(value)

    def __contains__(self, name: str) -> bool:
        return name in self._rest

    def take(self, name: str, default: Any = None) -> Any:
        """Return the field unchecked, or the default."""
        return self._rest.pop(name, default)

    def names(self, limit: int) -> list[str]:
        """Return the names of all fields left, at most `limit`."""
        if len(self._rest) > limit:
            refuse(f"{self.what} has {len(self._rest)} fields; at most {limit} are read")
        return list(self._rest)

    def text(self, name: str, default: Any = _NONE, limit: int = MAX_TEXT) -> Any:
        """Return a text, or `default` if the field is absent."""
        value = self._rest.pop(name, None)
        if value is None:
            if default is _NONE:
                refuse(f"{self.what} has no {name!r}", f"Give {name!r} as a text.")
            return default
        if not isinstance(value, str):
            refuse(f"{self.what} has {name} {shown(value)}, which is no text")
        if len(value) > limit:
            refuse(f"{name} of {self.what} has {len(value)} characters; at most {limit} are read")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Return a text that must be one of `choices`."""
        value = self.text(name, default)
        if value not in choices:
            refuse(f"{self.what} has {name} {shown(value)}", f"Use one of: {', '.join(choices)}.")
        return str(value)

    def number(self, name: str, default: float | None) -> float | None:
        """Return a number, or `default` if the field is absent."""
        value = self._rest.pop(name, None)
        return default if value is None else number_from_json(value, f"{name} of {self.what}")

    def flag(self, name: str) -> bool:
        """Return true or false; false if the field is absent."""
        value = self._rest.pop(name, None)
        if value is not None and type(value) is not bool:
            refuse(f"{self.what} has {name} {shown(value)}, which is neither true nor false")
        return bool(value)

    def count(self, name: str, default: int | None) -> int | None:
        """Return a whole number >= 0, or `default` if the field is absent."""
        value = self.whole(name)
        if value is not None and value < 0:
            refuse(f"{self.what} has {name} {value}; it is at least 0")
        return default if value is None else value

    def whole(self, name: str) -> int | None:
        """Return a whole number, or None if the field is absent."""
        value = self._rest.pop(name, None)
        if value is not None and type(value) is not int:
            refuse(f"{self.what} has {name} {shown(value)}, which is no whole number")
        return value

    def counts(self, name: str, limit: int) -> tuple[int, ...] | None:
        """Return a list of at most `limit` whole numbers >= 0, or None if the field is absent."""
        value = self._rest.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > limit or any(type(x) is not int or x < 0 for x in value):
            refuse(f"{self.what} has {name} {shown(value)}; up to {limit} whole numbers from 0 on belong there")
        return tuple(value)

    def items(self, name: str, limit: int) -> list[Any] | None:
        """Return a list of at most `limit` items, or None if the field is absent."""
        value = self._rest.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list):
            refuse(f"{self.what} has {name} of type {type(value).__name__}; a list belongs there")
        if len(value) > limit:
            refuse(f"{self.what} has {len(value)} {name}; at most {limit} are read")
        return value

    def end(self) -> None:
        """Refuse fields that are left: a field that was never read is misspelt or from another version."""
        if self._rest:
            refuse(
                f"{self.what} has a field {shown(min(self._rest))}, which the format lacks",
                "Check its spelling against docs/en/trace-file.md, or leave it out.",
            )
