"""The lines of a `config.json`: which field stands on which, and which of them declare a scale."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from sqrtdk.audit.places import listed
from sqrtdk.audit.records import JudgedCall
from sqrtdk.errors import ModelError
from sqrtdk.models.checkpoint import config_path
from sqrtdk.models.config import MAX_CONFIG_BYTES
from sqrtdk.models.limits import read_bytes

KeyPath = tuple[str, ...]  # keys from the outermost object inwards
Lines = Mapping[KeyPath, int]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,\n]|[^][{}:,"\s]+')
_FIELD = re.compile(r"\bconfig\.(\w+(?:\.\w+)*)")


def field_lines(text: str) -> dict[KeyPath, int]:
    r"""The 1-based line of every key of a JSON document's nested objects; objects in lists are passed over.

    Args:
        text: a document that a JSON parser has accepted.

    Example:
        >>> field_lines('{"a": 1,\n "b": {\n "c": [{"d": 2}]}}')
        {('a',): 1, ('b',): 2, ('b', 'c'): 3}
    """
    lines: dict[KeyPath, int] = {}
    line, depth_in_lists = 1, 0
    keys: list[str] = []  # that lead to the object which is open
    last: str | None = None  # text, which is a key if a colon follows
    key: str | None = None
    for token in (found[0] for found in _TOKEN.finditer(text)):
        if token == "\n":
            line += 1
        elif token in ("[", "]"):
            depth_in_lists += 1 if token == "[" else -1
        elif depth_in_lists:
            continue
        elif token == "{":
            keys.append(key or "")
        elif token == "}":
            keys.pop()
        elif token == ":" and last is not None:
            key = json.loads(last)
            lines[(*keys[1:], key)] = line  # of a name that is there twice the last counts
        last = token if token.startswith('"') else last if token == "\n" else None
    return lines


def read_lines(home: Path | None) -> dict[KeyPath, int]:
    """The lines of a model's config, which is a file or lies in a directory; empty if it can't be read."""
    if home is None:
        return {}
    with contextlib.suppress(OSError, ModelError, ValueError, IndexError):
        path = config_path(home)
        return field_lines(read_bytes(path, path.name, MAX_CONFIG_BYTES).decode("utf-8"))
    return {}


def config_file(home: Path) -> str:
    """The path of a model's config, as a report shows it."""
    return str(config_path(home)).replace(os.sep, "/")


def declared_at(judged: JudgedCall, home: Path | None, lines: Lines) -> str | None:
    """File and line of the fields that declare a call's scale; of the model type, where a field has its default.

    Args:
        judged: the call, with the declaration in words.
        home: of the model: the config, or the directory that holds it.
        lines: of the config, from `read_lines`.
    """
    if judged.declared_by is None or home is None:
        return None
    fields = _FIELD.findall(judged.declared_by)
    if not fields and not judged.declared_by.startswith("family "):
        return None  # an attribute or a norm declares it
    parts = judged.call.site.replace("_", ".").split(".")
    found = (_line(lines, tuple(field.split(".")), parts) or model_type_line(lines, parts) for field in fields or [""])
    return listed(f"{config_file(home)}:{line}" for line in found if line)


def model_type_line(lines: Lines, parts: list[str] | None = None) -> int | None:
    """The line that names the type of the model, or of the part of a composite that a site's parts name."""
    return _line(lines, ("model_type",), parts or [])


def _line(lines: Lines, field: KeyPath, parts: list[str]) -> int | None:
    """The line of a field: in the sub-config that a site's parts name, else the outermost."""

    def rank(path: KeyPath) -> tuple[bool, int]:
        return not any(key.removesuffix("_config") in parts for key in path[: -len(field)]), len(path)

    paths = [path for path in lines if path[-len(field) :] == field]
    return lines[min(paths, key=rank)] if paths else None
