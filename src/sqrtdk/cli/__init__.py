"""The command line: one file for each verb or family of verbs, without logic of its own.

No file here imports torch at the top: `sqrtdk --help` must answer at once, so each verb imports what it needs itself.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli import process
from sqrtdk.cli.baseline import baseline
from sqrtdk.cli.check import check
from sqrtdk.cli.configs import configs, params
from sqrtdk.cli.diff import diff
from sqrtdk.cli.errors import PlainMessages, fail
from sqrtdk.cli.lab import lab
from sqrtdk.cli.machine import app, build, env
from sqrtdk.cli.output import drop_stdout, keep_streams, open_closed_streams, unwritable
from sqrtdk.cli.record import record
from sqrtdk.cli.verbs import examples, register
from sqrtdk.cli.watch import watch

_app = typer.Typer(
    name="sqrtdk",
    help="Attention with the right scale: audit the 1/sqrt(d_k) of any PyTorch model.",
    epilog=examples(
        "sqrtdk check demo:unscaled         # a model without its 1/sqrt(d_k)",
        "sqrtdk check --help                # options and examples of a verb",
        "sqrtdk --install-completion        # the Tab key completes verbs and options",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help would double the start-up time
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb in (check, configs, diff, record, params, build, env, app):
    register(_app, _verb)
for _group in (baseline, lab, watch):
    _app.add_typer(_group)


def main() -> None:
    """Run the program `sqrtdk`, and end the process with its exit code."""
    open_closed_streams()
    try:
        process.begin()
        keep_streams()
        PlainMessages().__enter__()  # never exited: the model's threads, exit handlers and finalisers outlive this
        process.end(_exit_code())
    except KeyboardInterrupt:  # raised at most once, so the end itself is not interrupted
        process.end(process.INTERRUPTED)


def _exit_code() -> int:
    """Run the verb that the arguments name, and return its exit code."""
    try:
        code = _app(prog_name="sqrtdk", standalone_mode=False)
    except typer.Abort:
        return process.INTERRUPTED
    except OSError as error:  # typer itself writes help and --version to stdout
        drop_stdout()
        fail(unwritable(error))
        return process.FAILED
    except Exception as error:
        fail(error)
        return process.FAILED
    return code if isinstance(code, int) else 0  # a verb that ends without typer.Exit succeeded


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
