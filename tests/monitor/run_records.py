"""Records of a run that never was, each number told by its step, so that a reader can judge what it gets."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import Run

MODEL: dict[str, Any] = {"class": "Decoder", "sites": ["layers.0.attn", "layers.1.attn"], "heads": 3}
SETTINGS: dict[str, Any] = {"every": 2}
_MEASURES = [column.name for column in HEAD_COLUMNS if column.type == "float64"]


def head(step: int, site: str, number: int) -> dict[str, Any]:
    """A row; the last measure is missing, as where there is no gradient."""
    counts = {"rows": 64 * step, "blind_rows": step % 3, "nan_rows": 0, "inf_rows": step % 2}
    measures = {name: step + number / 8 + at / 1024 for at, name in enumerate(_MEASURES[:-1])}
    return {"step": step, "site": site, "index": 0, "head": number, **counts, **measures}


def heads(step: int) -> list[dict[str, Any]]:
    """The rows of a sampled step."""
    return [head(step, site, number) for site in MODEL["sites"] for number in range(MODEL["heads"])]


def told(step: int, attempt: int = 1) -> dict[str, Any]:
    """The row of a step; its time says which attempt wrote it."""
    sampled = step % SETTINGS["every"] == 0
    how = {"how": "as is"} if sampled else {}
    return {
        "step": step,
        "sampled": sampled,
        "loss": 1 / (abs(step) + 1),
        "time": float(attempt),
        "calls": 2,
        "unmeasured": 0,
        **how,
    }


def alarm(step: int) -> dict[str, Any]:
    """An alarm about the whole model."""
    told = {"name": "max logit", "severity": "warn", "value": 120.0, "bar": 100.0, "source": "Kimi K2"}
    return {"step": step, "text": f"the largest logit of step {step} is 120", **told}


def rows(steps: Iterable[int], attempt: int = 1) -> tuple[list[dict[str, Any]], ...]:
    """Heads of every sampled step, the steps, an alarm every ten."""
    steps = list(steps)
    sampled = [step for step in steps if step % SETTINGS["every"] == 0]
    alarms = [alarm(step) for step in steps if step % 10 == 0]
    return [row for step in sampled for row in heads(step)], [told(step, attempt) for step in steps], alarms


def writer(folder: Path, first_step: int | None = None, **changes: Any) -> RunWriter:
    return RunWriter(folder, **{"model": MODEL, "settings": SETTINGS, "first_step": first_step, **changes})


def written(folder: Path, last: int, every: int = 5, first_step: int | None = None) -> None:
    """One attempt: steps up to `last`, so many a part."""
    with writer(folder, first_step) as run:
        for start in range(run.first_step, last + 1, every):
            run.write(*rows(range(start, min(start + every, last + 1)), run.attempt))


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "parts").iterdir())


def unsigned(part: Path) -> Path:
    """A part under the name that older versions gave it, which tells no checksum."""
    return part.rename(part.with_name(part.name[: part.name.index(".sum-")] + ".parquet"))


def steps(run: Run) -> list[int]:
    return list(run.steps["step"].to_pylist())


def whole(run: Run, last: int, first: int = 0) -> bool:
    """Whether a run holds all that `rows` has of the steps from `first` to `last`, each once, in order, and no more."""
    times = dict(zip(steps(run), run.steps["time"].to_pylist(), strict=True))
    wanted = rows(range(first, last + 1))
    for row in wanted[1]:
        row["time"] = times.get(row["step"])
    tables = (run.heads, run.steps, run.alarms)
    return all(_same(table.to_pylist(), some) for table, some in zip(tables, wanted, strict=True))


def _same(there: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    return [{key: value for key, value in row.items() if value is not None} for row in there] == wanted


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
