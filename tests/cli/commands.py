"""Every verb and group of the program, as Typer built them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from sqrtdk import cli

PROGRAM: Any = typer.main.get_command(cli._app)


def _commands(command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every group and verb with its path, "lab run", its command and a context to ask it in."""
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is None:  # of a distribution that is not installed
            continue
        inner = child.context_class(child, info_name=name, parent=context)
        yield inner.command_path.removeprefix("sqrtdk "), child, inner
        if hasattr(child, "list_commands"):
            yield from _commands(child, inner)


COMMANDS = {
    path: (command, context)
    for path, command, context in _commands(PROGRAM, PROGRAM.context_class(PROGRAM, info_name="sqrtdk"))
}
EVERY = {path: found for path, found in COMMANDS.items() if not hasattr(found[0], "list_commands")}
