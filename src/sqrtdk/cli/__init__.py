"""The command line: one file a verb, and no logic of its own.

Nothing here imports torch: `sqrtdk --help` must answer at once, so a verb imports what it runs when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli.bench import bench
from sqrtdk.cli.build import build
from sqrtdk.cli.check import check
from sqrtdk.cli.env import env
from sqrtdk.cli.lab import lab
from sqrtdk.cli.output import end_stdout, open_closed_streams
from sqrtdk.cli.params import params

_app = typer.Typer(
    name="sqrtdk",
    help="Attention with the right scale: audit the 1/sqrt(d_k) of any PyTorch model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the rich help costs as much start-up time as all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)
_app.command()(check)
_app.command()(params)
_app.command()(bench)
_app.command()(build)
_app.command()(env)
_app.add_typer(lab)


def main() -> None:
    """Run the program `sqrtdk`; it ends the process with the exit code."""
    open_closed_streams()
    try:
        _app(prog_name="sqrtdk")
    finally:
        end_stdout()


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"sqrtdk {importlib.metadata.version('sqrtdk')}")
        raise typer.Exit


@_app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
