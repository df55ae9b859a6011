"""`sqrtdk lab list`: the register."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sqrtdk.cli.errors import reported

Language = Literal["en", "zh"]


def list_claims(
    language: Annotated[Language, typer.Option(help="Language of the statements.")] = "en",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """List every claim of the register: its id, who says it, and what it says."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.report import lab

        print_text(lab.register_json() if json_ else lab.register_text(language, width=width(), color=colors()))
