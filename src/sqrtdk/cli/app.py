"""`sqrtdk app`: the explorer page."""

from __future__ import annotations

from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


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
