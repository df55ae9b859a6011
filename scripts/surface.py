"""Everything that users rely on by name, a line each: what two trees offer is compared with `diff`.

    PYTHONPATH=src:lab/src python scripts/surface.py > before.txt     # and the same in the other tree
    diff before.txt after.txt

Verbs with their options and defaults, ids of sentences with their texts, fields of the JSON schemas, public names, and
the pages of the documentation. Runs on trees of either layout: with the lab in the library, or beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import sqrtdk
from sqrtdk import cli
from sqrtdk.messages._catalogue import topic, topics

ROOT = Path(__file__).resolve().parents[1]


def verbs(command: Any, context: Any) -> Iterator[str]:
    """Every verb with its options and arguments."""
    for name in sorted(command.list_commands(context)):
        child = command.get_command(context, name)
        inner = child.context_class(child, info_name=name, parent=context)
        for one in child.params:
            words, kind = ",".join(one.opts), "flag" if getattr(one, "is_flag", False) else one.nargs
            yield f"verb {inner.command_path} {words} {kind} {one.default}"
        yield f"verb {inner.command_path}"
        if hasattr(child, "list_commands"):
            yield from verbs(child, inner)


def fields(schema: Any, path: str) -> Iterator[str]:
    """Every field of a schema, with its place."""
    if isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            yield f"field {path}.{name}"
            yield from fields(inner, f"{path}.{name}")
        for name, inner in schema.get("$defs", {}).items():
            yield from fields(inner, f"{path.partition('#')[0]}#{name}")
        for part in ("items", "additionalProperties"):
            yield from fields(schema.get(part), path)
        for part in ("anyOf", "oneOf", "allOf"):
            for inner in schema.get(part, []):
                yield from fields(inner, path)


def lines() -> Iterator[str]:
    """All of it."""
    program: Any = typer.main.get_command(cli._app)
    yield from verbs(program, program.context_class(program, info_name="sqrtdk"))
    for name in topics():
        for key, text in topic(name).items():
            yield f"sentence {name}.{key} {text.en!r} {text.one!r} {text.zh!r}"
    for path in sorted((ROOT / "docs").glob("*.schema.json")):
        yield from fields(json.loads(path.read_text(encoding="utf-8")), path.name)
    for name in dir(sqrtdk):
        yield f"name sqrtdk.{name}"
        thing = getattr(sqrtdk, name)
        if type(thing).__name__ == "module":
            public = getattr(thing, "__all__", None) or [one for one in dir(thing) if one[0] != "_"]
            yield from (f"name sqrtdk.{name}.{one}" for one in public)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        yield f"page {path.relative_to(ROOT)}"


def main() -> int:
    """Print it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("sqrtdk_lab")  # adds its sentences
    print("\n".join(sorted(set(lines()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
