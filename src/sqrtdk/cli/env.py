"""`sqrtdk env`: versions, machine, and whether the attention kernels are in use."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli.errors import reported


def env(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Show versions, the machine, and whether each attention kernel is in use, or why it is not.

    Exit code 0.
    """
    with reported(show_traceback):
        from sqrtdk import _json
        from sqrtdk.cli.output import print_text, working
        from sqrtdk.report.environment import to_text

        with working("Looking"):
            from sqrtdk._environment import environment

            machine = environment()
        print_text(_json.document(machine) if json_ else to_text(machine))
