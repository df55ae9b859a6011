"""`sqrtdk watch` shows what `sqrtdk.watch` recorded of training runs. Reading the records needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sqrtdk._language import Language
from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register
from sqrtdk.cli.watch_runs import FailOnOption, checkpoints, columns_of, read, verified

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A folder of records, by sqrtdk.watch(to=RUN) or watch checkpoints.")
]

watch = group_of(
    "watch", "The records of training runs: in the terminal, as a page, two runs compared, and made of checkpoints."
)


def show(
    run: RunFolder,
    statistic: Annotated[
        str, typer.Option(metavar="LIST", help="Columns to draw, with commas between them, or all.")
    ] = "max_logit,entropy_fraction",
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Draw anew with each new part, until Ctrl-C."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Exit code 2 where a part is damaged or missing, which is named.")
    ] = False,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    fail_on: FailOnOption = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Draw the trends of a run in the terminal.

    A line for each attention, the newest values, the alarms, and what was not measured.

    Exit code 0: no alarm at --fail-on or above; 1: there is one; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, print_text, width, written
        from sqrtdk.errors import InvalidValueError

        if follow and (json_ or output is not None or verify):
            raise InvalidValueError(
                "--follow draws in the terminal, and makes no document",
                hint="Leave out --json, --output and --verify.",
            )
        _files.check_outputs((output,), force)
        columns = columns_of(statistic)
        from sqrtdk.messages import word
        from sqrtdk.report.watch_json import to_json
        from sqrtdk.report.watch_terminal import to_text

        if follow:
            _follow(run, columns, options.language(lang))
            return
        summary = read(run)
        if output is not None:
            _files.write_text(output, to_json(summary), force)
            written("JSON", output)
        if json_ and output is None:
            print_text(to_json(summary))
        else:
            print_text(to_text(summary, columns, width=width(), color=colors(), language=options.language(lang)))
        if verify:
            count, unsigned = verified(run, summary)
            if not json_ or output is not None:
                words = word("watch.terminal.verified", options.language(lang), count=count, unsigned=unsigned)
                print_text(words + "\n")
    raise typer.Exit(summary.exit_code(fail_on))


def report(
    run: RunFolder,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page.", show_default="report.html in RUN")
    ] = None,
    force: options.Force = False,
    fail_on: FailOnOption = "never",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Make one HTML page of a run.

    Heat maps of layers and steps, trends of heads, loss, alarms. In English and Simplified Chinese; it opens without
    a network.

    Exit code 0: no alarm at --fail-on or above; 1: there is one; 2: usage, configuration or input/output error.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import working, written

        target = output or run / "report.html"
        with working(f"Reading {run}"):
            summary = read(run)
            _files.check_writable(target, force)
            from sqrtdk.report.watch_html import to_html

            page = to_html([summary], language=lang)
        _files.write_text(target, page, force)
        written("HTML", target)
    raise typer.Exit(summary.exit_code(fail_on))


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The folder of another one.")],
    html: options.Html = None,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    fail_on: FailOnOption = "never",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Compare two runs, statistic by statistic.

    --html draws both on one page, with the same scales.

    Exit code 0: no alarm of A or B at --fail-on or above; 1: there is one; 2: usage, configuration or input/output
    error.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_outputs((html, output), force)
        from sqrtdk.cli.output import colors, print_text, width, working, written

        with working(f"Reading {a} and {b}"):
            from sqrtdk.report.watch_compare import compare as compared
            from sqrtdk.report.watch_html import to_html
            from sqrtdk.report.watch_json import comparison_json
            from sqrtdk.report.watch_terminal import comparison_text

            one, other = read(a), read(b)
            both = compared(one, other)
            page = to_html([one, other], both, lang) if html is not None else ""
        document = comparison_json(one, other, both)
        if output is not None:
            _files.write_text(output, document, force)
            written("JSON", output)
        if html is not None:
            _files.write_text(html, page, force)
            written("HTML", html)
        if json_ and output is None:
            print_text(document)
        else:
            print_text(
                comparison_text(one, other, both, width=width(), color=colors(), language=options.language(lang))
            )
    raise typer.Exit(max(run.exit_code(fail_on) for run in (one, other)))


for _verb in (show, report, compare, checkpoints):
    register(watch, _verb)


def _follow(run: Path, columns: list[str], language: Language) -> None:
    """Draw a run whenever it has grown, until Ctrl-C or until stdout is closed. A terminal shows what fits."""
    from sqrtdk.cli.output import colors, print_text, screen, width
    from sqrtdk.monitor.reading import growing
    from sqrtdk.report.watch_summary import summarise
    from sqrtdk.report.watch_terminal import live_text, to_text

    for grown in growing(run):
        summary, lines = summarise(grown), screen()
        if lines is None:
            text = to_text(summary, columns, width=width(), color=colors(), language=language)
        else:
            text = live_text(summary, columns, lines, width=width(), color=colors(), language=language)
        if not print_text(text):
            return
