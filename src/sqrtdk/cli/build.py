"""`sqrtdk build`: compile the attention kernel for this CPU."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


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
                load()  # what can't be loaded is not built
        except UnsupportedError as error:
            if not if_possible:
                raise
            say(f"Done without: {error}. {error.hint}")
        else:
            print_path(str(path))
