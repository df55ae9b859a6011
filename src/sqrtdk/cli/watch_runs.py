"""Helpers that the verbs of `sqrtdk watch` share, and `sqrtdk watch checkpoints PATTERN...`.

That verb measures the checkpoints of a run and writes them as the records of a watched run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported

if TYPE_CHECKING:
    from sqrtdk.monitor.checkpoints import Series
    from sqrtdk.report.watch_summary import Summary

FailOn = Literal["note", "warn", "unmeasured", "fail", "critical", "never"]
FailOnOption = Annotated[FailOn, typer.Option("--fail-on", help="Least severity of an alarm that gives exit code 1.")]


def read(run: Path) -> Summary:
    """Read a run.

    Raises:
        RunFolderError: the folder holds no run, a damaged one, or several in folders of its own, which are named.
    """
    from sqrtdk._records import shown
    from sqrtdk.errors import RunFolderError
    from sqrtdk.monitor.reading import read_run
    from sqrtdk.report.plain import plain
    from sqrtdk.report.watch_summary import summarise
    from sqrtdk.store.manifest import RUN

    # `watch checkpoints` writes the records of several runs into folders of one
    if not (run / RUN).exists() and (runs := sorted(str(one.parent) for one in run.glob(f"*/{RUN}"))):
        named = ", ".join(map(plain, runs[:4])) + (", ..." if len(runs) > 4 else "")
        raise RunFolderError(
            f"{shown(run)} holds no run itself, but {len(runs)} in folders of its own",
            hint=f"Name one of them: {named}.",
        )
    return summarise(read_run(run))


def verified(run: Path, summary: Summary) -> tuple[int, int]:
    """Check that all parts of a run are there and undamaged.

    Returns:
        The number of parts, and how many have no checksum (older versions wrote none).

    Raises:
        RunFolderError: parts are damaged or missing; the first three are named.
    """
    from sqrtdk._records import shown
    from sqrtdk.errors import RunFolderError
    from sqrtdk.monitor.names import list_parts
    from sqrtdk.report.watch_words import missing_text

    damaged = [missing_text(entry).en for entry in summary.missing if entry.kind == "damaged"]
    if damaged:
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise RunFolderError(
            f"{shown(run)} is not whole: {'; '.join(damaged[:3])}{more}",
            hint="Copy it again, or go on without these steps: without --verify the others are shown.",
        )
    parts = list_parts(run).parts
    return len(parts), sum(not part.checksum for part in parts)


def columns_of(text: str) -> list[str]:
    """Return the columns that `--statistic` names.

    Raises:
        InvalidValueError: no column is named, or an unknown one.
    """
    from sqrtdk.errors import InvalidValueError
    from sqrtdk.report.watch_statistics import STATISTICS

    names = list(STATISTICS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidValueError("no statistic is named", hint=f"There are {', '.join(STATISTICS)}, and all.")
    if unknown := [name for name in names if name not in STATISTICS]:
        raise InvalidValueError(
            f"there is no statistic {unknown[0]!r}", hint=f"There are {', '.join(STATISTICS)}, and all."
        )
    return names


def checkpoints(
    patterns: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN...", help="Directories of checkpoints, or patterns: 'runs/*/checkpoint-*'."),
    ],
    output: Annotated[
        Path, typer.Option(metavar="RUN", help="Folder of the records; one that holds a part of them is gone on with.")
    ],
    rows: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Rows of a sequence that are measured.", show_default="all"),
    ] = None,
    engine: Annotated[
        Literal["local", "pool", "ray"],
        typer.Option(help="Where: this process, several, or a Ray cluster."),
    ] = "local",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    anew: Annotated[bool, typer.Option("--anew", help="Measure all again, whatever RUN holds.")] = False,
    attn: options.Attn = None,
    text: options.TextFile = None,
    input_file: options.InputFile = None,
    batch: options.Batch = None,
    seq_len: options.SeqLen = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
    statistic: Annotated[
        str, typer.Option(metavar="LIST", help="Columns to draw, with commas between them, or all.")
    ] = "max_logit,entropy_fraction",
    json_: options.Json = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page over all runs.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page if it exists.")] = False,
    fail_on: FailOnOption = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Measure and audit checkpoints, as the records of a run.

    All are measured on the same inputs, and give the records that a watched run gives.
    Checkpoints in one directory are of one run, in order of the number at the end of their names, or of the step in
    their trainer_state.json. RUN is read by watch show, report and compare; of several runs each has a folder in it.
    The same command goes on where an interrupted one stopped, measures only what is new or changed or could not be
    measured, and gives the same records with every engine.

    Exit code 0: no alarm at --fail-on or above; 1: there is one, as for a checkpoint that could not be measured; 2:
    usage, configuration or input/output error; 130: interrupted.
    """
    with reported(show_traceback):
        from sqrtdk import _files
        from sqrtdk.cli.output import colors, counting, print_text, tell, width, working, written
        from sqrtdk.report.plain import plain

        _files.check_outputs((html,), force)
        with counting("Checkpoints") as progress:
            from sqrtdk.models.options import LoadOptions

            columns = columns_of(statistic)
            loading = LoadOptions(
                attn=attn, text=text, input_file=input_file, batch=batch, seq_len=seq_len, device=device, dtype=dtype,
                seed=seed, trust_remote_code=trust_remote_code,
            )  # fmt: skip
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
                tell(f"What ended is kept in {plain(str(output))}; the same command goes on with the rest.")
                raise
        with working(f"Reading {output}"):
            from sqrtdk.report.watch_html import to_html
            from sqrtdk.report.watch_terminal import to_text

            runs = [read(run) for run in series.runs]
            page = to_html(runs, language=lang) if html is not None else ""
        for path in series.left_out:
            tell(f"Left out, as it is no directory: {plain(str(path))}")
        for note in series.notes:
            tell(f"Note: {plain(note)}")
        tell(_counted(series))
        if html is not None:
            _files.write_text(html, page, force)
            written("HTML", html)
        if json_:
            print_text(_document(series, runs))
        else:
            print_text(
                "\n".join(
                    to_text(run, columns, width=width(), color=colors(), language=options.language(lang))
                    for run in runs
                )
            )
        if html is None and not json_:
            tell("\n".join(f"The page: sqrtdk watch report {plain(str(run))}" for run in series.runs))
    raise typer.Exit(max(run.exit_code(fail_on) for run in runs))


def _counted(series: Series) -> str:
    from sqrtdk.report.figures import count

    total = count(series.computed + series.reused, "checkpoint")
    failed = f", {len(series.failed)} could not be measured" if series.failed else ""
    return f"{total}: {series.computed} measured, {series.reused} reused{failed}"


def _document(series: Series, runs: list[Summary]) -> str:
    """Return one JSON document: what was done, and each run as `watch show --json` prints it."""
    from sqrtdk.report.watch_json import series_json

    failed = [{"checkpoint": str(one.path), "reason": reason} for one, reason in series.failed]
    done = {"computed": series.computed, "reused": series.reused, "failed": failed, "notes": series.notes}
    return series_json(done, runs)
