"""Verbs on this machine: `sqrtdk env` describes it, `build` compiles the kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message


def env(
    json_: options.Json = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Print the versions, the machine and its kernels.

    Args:
        json_: Whether to print JSON.
        lang: Language of the text.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk import _json
        from sqrtdk.cli.output import colors, print_text, width, working
        from sqrtdk.report.environment import to_text

        with working(Message("progress.looking")):
            from sqrtdk._environment import environment

            machine = environment()
        if json_:
            print_text(_json.json_document(machine))
        else:
            print_text(to_text(machine, width=width(), color=colors(), language=options.language_of_choice(lang)))


def build_verb(
    force: Annotated[bool, typer.Option("--force", help="cli.build.force")] = False,
    if_possible: Annotated[bool, typer.Option("--if-possible", help="cli.build.if_possible")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Compile the attention kernel for CPUs, load it, and print the path of the library.

    Args:
        force: Whether to compile although a library exists.
        if_possible: Whether a kernel that can't be built or loaded is reported on stderr only, rather than an error.
        lang: Language of messages.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk.cli.output import print_path, tell_reader, working
        from sqrtdk.errors import UnsupportedError

        try:
            with working(Message("progress.compiling")):
                from sqrtdk.impl.kernel.build import build_kernel
                from sqrtdk.impl.kernel.load import load_kernel

                path = build_kernel(force)
                load_kernel()  # a library that can't be loaded counts as not built
        except UnsupportedError as error:
            if not if_possible:
                raise
            tell_reader(Message("progress.done_without", error=error.message, hint=error.hint))
        else:
            print_path(str(path))
