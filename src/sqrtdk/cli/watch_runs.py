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


def verified(run: Path, summary: Summary) -> tuple[int, int]:
    """Hold a run that was read to its inventory.

    Returns:
        The number of its parts, and of those without a checksum, which older versions wrote.

    Raises:
        RunFolderError: a part is damaged or missing, which names the first of them.
    """
    from sqrtdk._stranger import shown
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
