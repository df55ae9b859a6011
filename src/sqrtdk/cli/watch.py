"""`sqrtdk watch` shows what `sqrtdk.watch` recorded of training runs. Reading the records needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sqrtdk._language import Language
from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register
from sqrtdk.cli.watch_runs import (
    DRAWN_STATISTICS,
    FailOnOption,
    Statistic,
    checkpoints,
    columns_of,
    read_watch_run,
    verified,
)
from sqrtdk.messages import Message

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="cli.watch.run")]

watch = group_of("watch")


def show_run(
    run: RunFolder,
    statistic: Statistic = DRAWN_STATISTICS,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="cli.watch.follow")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="cli.watch.verify")] = False,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    fail_on: FailOnOption = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Draw the trends of a run in the terminal, and end with the exit code of its alarms."""
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, print_text, say_written, width
        from sqrtdk.errors import InvalidValueError

        if follow and (json_ or output is not None or verify):
            raise InvalidValueError(Message("errors.watch.follow"), hint=Message("errors.watch.follow_alone"))
        _files.check_outputs((output,), force)
        columns = columns_of(statistic)
        from sqrtdk.messages import word
        from sqrtdk.report.watch_json import to_json
        from sqrtdk.report.watch_terminal import to_text

        if follow:
            _follow(run, columns, options.language_of_choice(lang))
            return
        summary = read_watch_run(run)
        if output is not None:
            _files.write_text(output, to_json(summary), force)
            say_written("JSON", output)
        if json_ and output is None:
            print_text(to_json(summary))
        else:
            print_text(
                to_text(summary, columns, width=width(), color=colors(), language=options.language_of_choice(lang))
            )
        if verify:
            count, unsigned = verified(run, summary)
            if not json_ or output is not None:
                words = word(
                    "watch.terminal.verified", options.language_of_choice(lang), count=count, unsigned=unsigned
                )
                print_text(words + "\n")
    raise typer.Exit(summary.exit_code(fail_on))


def report_run(
    run: RunFolder,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="cli.options.page", show_default="cli.defaults.report_in_run"),
    ] = None,
    force: options.Force = False,
    fail_on: FailOnOption = "never",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Make one HTML page of a run."""
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import say_written, working

        target = output or run / "report.html"
        with working(Message("progress.reading", run=str(run))):
            summary = read_watch_run(run)
            _files.check_writable(target, force)
            from sqrtdk.report.watch_html import to_html

            page = to_html([summary], language=lang)
        _files.write_text(target, page, force)
        say_written("HTML", target)
    raise typer.Exit(summary.exit_code(fail_on))


def compare_two_runs(
    a: Annotated[Path, typer.Argument(metavar="A", help="cli.watch.a")],
    b: Annotated[Path, typer.Argument(metavar="B", help="cli.watch.b")],
    html: options.Html = None,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    fail_on: FailOnOption = "never",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Compare two runs, statistic by statistic."""
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_outputs((html, output), force)
        from sqrtdk.cli.output import colors, print_text, say_written, width, working

        with working(Message("progress.reading_both", a=str(a), b=str(b))):
            from sqrtdk.report.watch_compare import compare_runs as compared
            from sqrtdk.report.watch_html import to_html
            from sqrtdk.report.watch_json import comparison_json
            from sqrtdk.report.watch_terminal import comparison_text

            one, other = read_watch_run(a), read_watch_run(b)
            both = compared(one, other)
            page = to_html([one, other], both, lang) if html is not None else ""
        document = comparison_json(one, other, both)
        if output is not None:
            _files.write_text(output, document, force)
            say_written("JSON", output)
        if html is not None:
            _files.write_text(html, page, force)
            say_written("HTML", html)
        if json_ and output is None:
            print_text(document)
        else:
            print_text(
                comparison_text(
                    one, other, both, width=width(), color=colors(), language=options.language_of_choice(lang)
                )
            )
    raise typer.Exit(max(run.exit_code(fail_on) for run in (one, other)))


register(watch, show_run, "show")
register(watch, report_run, "report")
register(watch, compare_two_runs, "compare")
register(watch, checkpoints)


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
