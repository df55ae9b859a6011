"""`sqrtdk watch` shows what `sqrtdk.watch` recorded of training runs. Reading the records needs no torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register_verb
from sqrtdk.cli.watch_runs import (
    DRAWN_STATISTICS,
    FailOnOption,
    Statistic,
    checkpoints,
    columns_of,
    read_watch_run,
    read_watch_runs,
    verified,
)
from sqrtdk.messages import Message

RunFolders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="cli.watch.run")]

watch = group_of("watch")


def show_run(
    runs: RunFolders,
    statistic: Statistic = DRAWN_STATISTICS,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="cli.watch.follow")] = False,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve", min=0, max=65535, metavar="PORT", help="cli.watch.serve", show_default="cli.defaults.not_served"
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="cli.watch.verify")] = False,
    html: options.Html = None,
    json_: options.Json = False,
    output: options.Output = None,
    force: options.Force = False,
    fail_on: FailOnOption = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Draw runs in the terminal or as a page, one also while it is written; end with the exit code of the alarms.

    Args:
        runs: Folders of the runs.
        statistic: Statistics to draw.
        follow: Whether to draw it in the terminal again and again while it is written.
        serve: Port on which to serve its page while it is written; None for no server.
        verify: Whether to check that all parts of the records are undamaged.
        html: File of the page; None for no page.
        json_: Whether to print JSON.
        output: File to write JSON to.
        force: Whether to replace existing files.
        fail_on: Least severity of an alarm that gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, print_text, say_written, tell_reader, width
        from sqrtdk.errors import InvalidValueError

        live = follow or serve is not None
        if live and (json_ or output is not None or html is not None or verify or (follow and serve is not None)):
            raise InvalidValueError(
                Message("errors.watch.live", option="--follow" if follow else "--serve"),
                hint=Message("errors.watch.live_alone"),
            )
        if live and len(runs) > 1:
            raise InvalidValueError(
                Message("errors.watch.live_one", option="--follow" if follow else "--serve", runs=len(runs)),
                hint=Message("errors.watch.live_each"),
            )
        _files.check_outputs((html, output), force)
        columns = columns_of(statistic)
        from sqrtdk.messages import word
        from sqrtdk.report.plain import plain
        from sqrtdk.report.watch.json import several_json, to_json
        from sqrtdk.report.watch.several import several_text
        from sqrtdk.report.watch.terminal import to_text

        language = options.language_of_choice(lang)
        if live:
            from sqrtdk.cli.watch_live import follow_run, serve_run

            if serve is not None:
                serve_run(
                    runs[0], serve, lang, lambda address: tell_reader(Message("progress.run_page", address=address))
                )
            summaries = [follow_run(runs[0], columns, language)]
        else:
            summaries = read_watch_runs(runs)
        one = summaries[0] if len(summaries) == 1 else None
        if html is not None:
            from sqrtdk.report.watch.html import to_html

            _files.write_text(html, to_html(summaries, language=lang), force)
            say_written("HTML", html)
        document = (to_json(one) if one else several_json(summaries)) if json_ or output is not None else ""
        if output is not None:
            _files.write_text(output, document, force)
            say_written("JSON", output)
        if json_ and output is None:
            print_text(document)
        elif not live:
            draw = partial(to_text, one) if one else partial(several_text, summaries)
            print_text(draw(columns, width=width(), color=colors(), language=language))
        if verify:
            for folder, summary in zip(runs, summaries, strict=True):
                count, unsigned = verified(folder, summary)
                if not json_ or output is not None:
                    whole = word("watch.terminal.verified", language, count=count, unsigned=unsigned)
                    name = "" if one else f"{plain(str(folder))}: "
                    print_text(f"{name}{whole}\n")
    raise typer.Exit(max(summary.exit_code(fail_on) for summary in summaries))


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
    """Compare two runs, statistic by statistic, and print or write the differences.

    Args:
        a: Folder of the first run.
        b: Folder of the second run.
        html: File of the page; None for no page.
        json_: Whether to print JSON.
        output: File to write JSON to.
        force: Whether to replace existing files.
        fail_on: What gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_outputs((html, output), force)
        from sqrtdk.cli.output import colors, print_text, say_written, width, working

        with working(Message("progress.reading_both", a=str(a), b=str(b))):
            from sqrtdk.report.watch.compare import compare_runs as compared
            from sqrtdk.report.watch.html import to_html
            from sqrtdk.report.watch.json import comparison_json
            from sqrtdk.report.watch.terminal import comparison_text

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


register_verb(watch, show_run, "show")
register_verb(watch, compare_two_runs, "compare")
register_verb(watch, checkpoints)
