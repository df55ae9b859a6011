"""The command line: one file for each verb or family of verbs, without logic of its own.

No file here imports torch at the top: `sqrtdk --help` must answer at once, so each verb imports what it needs itself.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sqrtdk.cli import options, process
from sqrtdk.cli.check import check_verb
from sqrtdk.cli.diff import diff_verb
from sqrtdk.cli.errors import PlainMessages, fail
from sqrtdk.cli.kv import kv
from sqrtdk.cli.machine import build_verb, env
from sqrtdk.cli.output import drop_stdout, keep_streams, open_closed_streams, speak, unwritable
from sqrtdk.cli.params import params
from sqrtdk.cli.record import record_verb
from sqrtdk.cli.verbs import group_of, pass_language_on, register_verb
from sqrtdk.cli.watch import watch
from sqrtdk.errors import EXIT_INTERRUPTED


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"sqrtdk {importlib.metadata.version('sqrtdk')}")
        raise typer.Exit


def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="cli.options.version")
    ] = False,
    lang: options.Lang = "auto",
) -> None:
    pass_language_on(context, lang)


_app = group_of("sqrtdk", short_help=None, help="cli.program", callback=_program, pretty_exceptions_enable=False)
for _name, _verb in (
    ("check", check_verb), ("diff", diff_verb), ("kv", kv), ("record", record_verb), ("params", params),
    ("build", build_verb), ("env", env),
):  # fmt: skip
    register_verb(_app, _verb, _name)
_app.add_typer(watch)


def main() -> None:
    """Run the program `sqrtdk` with the arguments of this process, and end the process with its exit code.

    The code is 0 if nothing was found, 1 for findings, 2 for a wrong usage or an error, 130 after Ctrl-C.
    """
    open_closed_streams()
    try:
        process.handle_interrupts()
        keep_streams()
        PlainMessages().__enter__()  # never exited: the model's threads, exit handlers and finalisers outlive this
        process.end(_exit_code())
    except KeyboardInterrupt:  # raised at most once, so the end itself is not interrupted
        process.end(EXIT_INTERRUPTED)


def _exit_code() -> int:
    """Run the verb that the arguments name, and return its exit code."""
    speak(options.language_asked_for(sys.argv[1:]))
    try:
        code = _app(prog_name="sqrtdk", standalone_mode=False)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except OSError as error:  # typer itself writes help and --version to stdout
        drop_stdout()
        fail(unwritable(error))
        return process.EXIT_FAILED
    except Exception as error:
        fail(error)
        return process.EXIT_FAILED
    return code if isinstance(code, int) else 0  # a verb that ends without typer.Exit succeeded
