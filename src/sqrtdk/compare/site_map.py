"""Which site of A belongs to which of B, as a user says it: a mapping, or a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError

_LARGEST = 2**20  # bytes


def read_map(mapping: Mapping[str, str] | str | Path | None) -> dict[str, str]:
    """The map of sites, from a mapping or a JSON file.

    Raises:
        InvalidValueError: it is no JSON object of names to names.
    """
    if mapping is None:
        return {}
    hint = 'Write an object of names: {"layers.0.attn": "h.0.attn"}.'
    if isinstance(mapping, str | Path):
        path = Path(mapping)
        try:
            if path.stat().st_size > _LARGEST:
                raise InvalidValueError(f"the map {path} has more than {_LARGEST} bytes", hint=hint)
            mapping = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        except OSError as error:
            raise InvalidValueError(f"the map {path} can't be read: {error.strerror}", hint=hint) from error
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise InvalidValueError(f"the map {path} is no JSON", hint=hint) from error
    if not isinstance(mapping, Mapping) or not all(isinstance(x, str) for pair in mapping.items() for x in pair):
        raise InvalidValueError("the map is no object of names", hint=hint)
    return dict(mapping)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names are there once: of two partners none is the one that is meant."""
    once: dict[str, Any] = {}
    for name, value in pairs:
        if name in once:
            raise InvalidValueError(f"the map names {name[:200]!r} of A twice", hint="A call has one partner.")
        once[name] = value
    return once
