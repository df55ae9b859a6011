"""Helpers that the verbs of `sqrtdk watch` share, and `sqrtdk watch checkpoints PATTERN...`.

That verb measures the checkpoints of a run and writes them as the records of a watched run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message, joined
from sqrtdk.models.options import LoadOptions

if TYPE_CHECKING:
    from sqrtdk.monitor.checkpoints import CheckpointSeries
    from sqrtdk.report.watch.summary import Summary

FailOnOption = Annotated[options.Severity, typer.Option("--fail-on", help="cli.options.fail_on_alarm")]
Statistic = Annotated[str, typer.Option("--statistic", metavar="LIST", help="cli.options.statistic")]
DRAWN_STATISTICS = "max_logit,entropy_fraction"
# loading options that checkpoints do not have: they are directories with weights
_NOT_OF_CHECKPOINTS = ("static", "revision", "device_map", "offload_folder")


def read_watch_run(run: Path) -> Summary:
    """Read a run.

    Raises:
        RunFolderError: the folder holds no run, a damaged one, or several in folders of its own, which are named.
    """
    from sqrtdk._records import quote
    from sqrtdk.errors import RunFolderError
    from sqrtdk.monitor.reading import read_run
    from sqrtdk.report.plain import plain
    from sqrtdk.report.watch.summary import summarise
    from sqrtdk.store.lock import writer_of
    from sqrtdk.store.manifest import RUN

    # `watch checkpoints` writes the records of several runs into folders of one
    if not (run / RUN).exists() and (runs := sorted(str(one.parent) for one in run.glob(f"*/{RUN}"))):
        named = joined([*map(plain, runs[:4]), *(["..."] if len(runs) > 4 else [])], "comma")
        raise RunFolderError(
            Message("errors.watch.runs_inside", folder=quote(run), runs=len(runs)),
            hint=Message("errors.watch.name_one", runs=named),
        )
    writer = writer_of(run)  # before the parts: what it wrote before it ended is then read
    return replace(summarise(read_run(run)), writer=writer)


def read_watch_runs(folders: Sequence[Path]) -> list[Summary]:
    """Read runs.

    Raises:
        RunFolderError: a folder holds no run.
        InvalidValueError: two of the folders are the same, or there are too many.
    """
    from sqrtdk._records import quote
    from sqrtdk.errors import InvalidValueError
    from sqrtdk.report.watch.several import check_letters

    check_letters(len(folders))
    seen: dict[Path, Path] = {}
    for folder in folders:
        other = seen.setdefault(folder.resolve(), folder)
        if other is not folder:
            raise InvalidValueError(
                Message("errors.watch.same_run", run=quote(folder), other=quote(other)),
                hint=Message("errors.watch.each_once"),
            )
    return [read_watch_run(folder) for folder in folders]


def verified(run: Path, summary: Summary) -> tuple[int, int]:
    """Check that all parts of a run are there and undamaged.

    Returns:
        The number of parts, and how many have no checksum (older versions wrote none).

    Raises:
        RunFolderError: parts are damaged or missing; the first three are named.
    """
    from sqrtdk._records import quote
    from sqrtdk.errors import RunFolderError
    from sqrtdk.monitor.names import list_parts

    damaged = [entry.message for entry in summary.missing if entry.kind == "damaged"]
    if damaged:
        more = [Message("errors.watch.more", count=len(damaged) - 3)] if len(damaged) > 3 else []
        raise RunFolderError(
            Message("errors.watch.damaged", folder=quote(run), parts=joined([*damaged[:3], *more])),
            hint=Message("errors.watch.copy_again"),
        )
    parts = list_parts(run).parts
    return len(parts), sum(not part.checksum for part in parts)


def columns_of(text: str) -> list[str]:
    """Return the columns that `--statistic` names.

    Raises:
        InvalidValueError: no column is named, or an unknown one.
    """
    from sqrtdk.errors import InvalidValueError
    from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN

    names = list(STATISTIC_BY_COLUMN) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    there_are = Message("errors.watch.statistics", names=joined(list(STATISTIC_BY_COLUMN), "comma"))
    if not names:
        raise InvalidValueError(Message("errors.watch.no_statistic"), hint=there_are)
    if unknown := [name for name in names if name not in STATISTIC_BY_COLUMN]:
        raise InvalidValueError(Message("errors.watch.unknown_statistic", name=repr(unknown[0])), hint=there_are)
    return names


def checkpoints(
    patterns: Annotated[list[str], typer.Argument(metavar="PATTERN...", help="cli.watch.patterns")],
    output: Annotated[Path, typer.Option(metavar="RUN", help="cli.watch.records")],
    rows: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="cli.watch.rows", show_default="cli.defaults.all")
    ] = None,
    engine: Annotated[Literal["local", "pool", "ray"], typer.Option(help="cli.watch.engine")] = "local",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    anew: Annotated[bool, typer.Option("--anew", help="cli.watch.anew")] = False,
    loading: Annotated[LoadOptions, options.LoadingFields(without=_NOT_OF_CHECKPOINTS)] = options.DEFAULT_LOADING,
    statistic: Statistic = DRAWN_STATISTICS,
    json_: options.Json = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="cli.watch.html")] = None,
    force: Annotated[bool, typer.Option("--force", help="cli.options.force_page")] = False,
    fail_on: FailOnOption = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Measure and audit checkpoints, write them as the records of a run, and draw the run.

    Args:
        patterns: Paths of checkpoints, in which wildcards may stand.
        output: Folder of the records.
        rows: Largest number of rows of a sequence that are measured; None for all.
        engine: Where checkpoints are measured: "local" one after another, "pool" in processes, or "ray".
        workers: Number of processes; None for the engine's default.
        ray_address: Address of the ray cluster; None for the default.
        anew: Whether to measure checkpoints again that have a result already.
        loading: How to load the checkpoints, and the inputs that they run on.
        statistic: Statistics to draw.
        json_: Whether to print JSON.
        html: File of the page; None for no page.
        force: Whether to replace an existing page.
        fail_on: Least severity of an alarm that gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, counting, print_text, say_written, tell_reader, width, working
        from sqrtdk.report.plain import plain

        _files.check_outputs((html,), force)
        with counting(Message("progress.checkpoints")) as progress:
            # Before anything is measured: a mistyped name is noticed now and not after hours.
            columns = columns_of(statistic)
            from sqrtdk.monitor.checkpoints import measure_checkpoints

            try:
                series = measure_checkpoints(
                    patterns,
                    output,
                    loading,
                    rows=rows,
                    engine=engine,
                    workers=workers,
                    ray_address=ray_address,
                    progress=progress,
                    anew=anew,
                )
            except KeyboardInterrupt:
                tell_reader(Message("progress.kept", path=plain(str(output))))
                raise
        with working(Message("progress.reading", run=str(output))):
            from sqrtdk.report.watch.html import to_html
            from sqrtdk.report.watch.terminal import to_text

            runs = [read_watch_run(run) for run in series.runs]
            page = to_html(runs, language=lang) if html is not None else ""
        for path in series.left_out:
            tell_reader(Message("progress.left_out", path=plain(str(path))))
        for note in series.notes:
            tell_reader(Message("progress.note", note=note))
        tell_reader(_counted(series))
        if html is not None:
            _files.write_text(html, page, force)
            say_written("HTML", html)
        if json_:
            print_text(_document(series, runs))
        else:
            print_text(
                "\n".join(
                    to_text(run, columns, width=width(), color=colors(), language=options.language_of_choice(lang))
                    for run in runs
                )
            )
        if html is None and not json_:
            for run in series.runs:
                tell_reader(Message("progress.page", command=f"sqrtdk watch show {plain(str(run))} --html FILE"))
    raise typer.Exit(max(run.exit_code(fail_on) for run in runs))


def _counted(series: CheckpointSeries) -> Message:
    total, measured, reused = series.computed + series.reused, series.computed, series.reused
    if series.failed:
        failed = len(series.failed)
        return Message("progress.measured_in_part", count=total, measured=measured, reused=reused, failed=failed)
    return Message("progress.measured", count=total, measured=measured, reused=reused)


def _document(series: CheckpointSeries, runs: list[Summary]) -> str:
    """Return one JSON document: what was done, and each run as `watch show --json` prints it."""
    from sqrtdk.report.watch.json import series_json

    failed = [{"checkpoint": str(one.path), "reason": reason} for one, reason in series.failed]
    done = {"computed": series.computed, "reused": series.reused, "failed": failed, "notes": series.notes}
    return series_json(done, runs)
