"""`sqrtdk lab report DIR`: the records of a directory as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `sqrtdk lab run` wrote.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in DIR")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page if it exists.")] = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Make one self-contained page of the records: the register with its verdicts, then each claim.

    English and Simplified Chinese; it opens without a network.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import listed, tell, working, written

        target = output or folder / "report.html"
        from sqrtdk.lab.runner import not_run, records

        with working(f"Reading {folder}"):
            recorded = records(folder)
            missing = not_run(recorded)
            _files.check_writable(target, force)
            from sqrtdk.report.lab_page import to_html

            page = to_html(recorded, missing, lang)
        _files.write_text(target, page, force)
        if missing:
            tell(f"Not run, {len(missing)} of {len(missing) + len(recorded)} claims: {listed(missing)}")
        written("HTML", target)
