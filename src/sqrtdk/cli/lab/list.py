"""`sqrtdk lab list`: the register."""

from __future__ import annotations

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


def list_claims(
    lang: options.Lang = "auto",
    json_: options.Json = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """List every claim of the register: its id, who says it, and what it says."""
    with reported(show_traceback):
        from sqrtdk.cli.output import colors, print_text, width
        from sqrtdk.report import lab

        print_text(
            lab.register_json() if json_ else lab.register_text(options.language(lang), width=width(), color=colors())
        )
