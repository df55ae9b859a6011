"""`sqrtdk lab show ID`: one claim and how it is measured."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


def show(
    claim: Annotated[str, typer.Argument(metavar="ID", help="A claim of `sqrtdk lab list`.")],
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Show a claim: statement, formula, method, control, parameters, and what counts as true."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.errors import InvalidValueError
        from sqrtdk.lab.register import SEE_ALL, find
        from sqrtdk.report import lab

        if claim == "all":
            raise InvalidValueError("one claim can be shown; got 'all'", hint=SEE_ALL)
        (chosen,) = find([claim])
        text = (
            lab.claim_json(chosen)
            if json_
            else lab.claim_text(chosen, options.language(lang), width=width(), color=colors())
        )
        print_text(text)
