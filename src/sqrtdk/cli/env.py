"""`sqrtdk env`: versions, machine, and whether the attention kernels are in use."""

from __future__ import annotations

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


def env(
    json_: options.Json = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Show versions, the machine, and whether each attention kernel is in use, or why it is not.

    Exit code 0.
    """
    with reported(show_traceback):
        from sqrtdk import _json
        from sqrtdk.cli.output import colors, print_text, width, working
        from sqrtdk.report.environment import to_text

        with working("Looking"):
            from sqrtdk._environment import environment

            machine = environment()
        if json_:
            print_text(_json.document(machine))
        else:
            print_text(to_text(machine, width=width(), color=colors(), language=options.language(lang)))
