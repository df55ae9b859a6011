"""Verbs on this machine: `sqrtdk env` describes it, `build` compiles the kernel, `app` serves the explorer."""

from __future__ import annotations

from typing import Annotated

import typer

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


def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again, also where it is built.")] = False,
    if_possible: Annotated[
        bool, typer.Option("--if-possible", help="Exit with 0, and the reason on stderr, where it can't be built.")
    ] = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Compile the attention kernel with this machine's C++ compiler, for CPUs with AVX-512; it takes half a minute.

    GCC 11 or newer is needed; CXX names another than g++. The library is kept in $SQRTDK_CACHE/sqrtdk, or else in
    $XDG_CACHE_HOME/sqrtdk or ~/.cache/sqrtdk, one for each version of torch and kind of CPU, and used by every process
    from then on; where it is there already, and whole, nothing is compiled. What the compiler made is loaded in a
    process of its own before it is kept. Prints the path of the library.

    Exit code 0: built, or there already; 2: it can't be built, and why.
    """
    with reported(show_traceback):
        from sqrtdk.cli.output import print_path, say, working
        from sqrtdk.errors import UnsupportedError

        try:
            with working("Compiling the kernel"):
                from sqrtdk.impl.kernel import build as kernel
                from sqrtdk.impl.kernel.load import load

                path = kernel.build(force)
                load()  # a library that can't be loaded counts as not built
        except UnsupportedError as error:
            if not if_possible:
                raise
            say(f"Done without: {error}. {error.hint}")
        else:
            print_path(str(path))


def app(
    port: Annotated[int, typer.Option(metavar="N", help="Port of 127.0.0.1; 0 takes a free one.")] = 7860,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Serve the explorer on this machine: logits, weights, gradients and ranges under any scale, and the claims.

    English and Simplified Chinese; nothing leaves the machine. Ctrl-C ends it. Needs the extra: pip install
    'sqrtdk[app]'.
    """
    with reported(show_traceback):
        from sqrtdk.app.serve import serve
        from sqrtdk.cli.output import tell

        def ready(address: str) -> None:
            tell(f"Explorer: {address} (Ctrl-C ends it)")
            if show:
                import webbrowser

                webbrowser.open(address)

        serve(port, ready)
