"""What the verbs of `sqrtdk watch` share: reading a run, and options that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from sqrtdk.report.watch_summary import Summary

FailOn = Literal["note", "warn", "unmeasured", "fail", "critical", "never"]
FailOnOption = Annotated[FailOn, typer.Option("--fail-on", help="Least severity of an alarm that gives exit code 1.")]


def read(run: Path) -> Summary:
    """Read a run.

    Raises:
        RunFolderError: there is none, or it is damaged; a folder of several names them.
    """
    from sqrtdk._stranger import shown
    from sqrtdk.errors import RunFolderError
    from sqrtdk.monitor.manifest import RUN
    from sqrtdk.monitor.reading import read_run
    from sqrtdk.report.plain import plain
    from sqrtdk.report.watch_summary import summarise

    if not (run / RUN).exists() and (runs := sorted(str(one.parent) for one in run.glob(f"*/{RUN}"))):
        named = ", ".join(map(plain, runs[:4])) + (", ..." if len(runs) > 4 else "")
        raise RunFolderError(
            f"{shown(run)} holds no run itself, but {len(runs)} in folders of its own",
            hint=f"Name one of them: {named}.",
        )
    return summarise(read_run(run))


def columns_of(text: str) -> list[str]:
    """The columns that `--statistic` names.

    Raises:
        InvalidValueError: there is no such one.
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
