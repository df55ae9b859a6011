"""SIGKILL while a run is written: every finished part is there, none twice, none half, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.monitor.names import list_parts
from sqrtdk.monitor.reading import Run, read_run
from tests.monitor import killed_writer
from tests.monitor.killed_writer import PART, POINTS
from tests.monitor.run_records import rows, steps, whole, writer
from tests.support.paths import with_tests


def _killed(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, killed_writer.__file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_tests())


def _ends(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=3000)
    assert process.returncode == 0
    ends: list[dict[str, Any]] = json.loads(out)
    return ends


def _good(run: Run) -> bool:
    """Nothing is missing, twice or damaged, whatever attempt it is from."""
    last = -1 if run.last_step is None else run.last_step
    return whole(run, last) and not run.damaged and not run.gaps


def _begun(folder: Path) -> Run | None:
    """The run; None where the writer had not come so far as to say that there is one."""
    return read_run(folder) if (folder / "run.json").exists() else None


def _goes_on(end: dict[str, Any]) -> None:
    """What a killed writer had said is there, and the next one goes on."""
    folder, said = Path(end["folder"]), end["said"]
    least = said[-1] if len(said) > 1 else -1  # the first is where it begins
    run = _begun(folder)
    assert run or not said
    assert not run or _good(run)
    assert not run or least <= len(steps(run)) - 1 <= least + PART
    with writer(folder) as again:
        assert least < again.first_step <= least + PART + 1
        again.write(*rows(range(again.first_step, again.first_step + 2)))
        last = again.first_step + 1
    run = read_run(folder)
    assert _good(run)
    assert run.last_step == last
    assert list_parts(folder).merged == ()
    assert not [*folder.glob(".*"), *(folder / "parts").glob(".*")], "what the killed one left is tidied"


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_before_each_change_of_the_disk(stride: int, tmp_path: Path) -> None:
    *killed, unharmed = _ends(_killed("points", tmp_path, stride))
    assert unharmed["status"] == 0
    assert len(killed) > 5 * POINTS // stride, "each part is opened, flushed, renamed, and so on"
    for end in killed:
        assert end["status"] == signal.SIGKILL
        _goes_on(end)


def test_a_kill_within_a_write(tmp_path: Path) -> None:
    """Of run.json, of a part, of the part that others are merged into."""
    with writer(tmp_path / "one") as run:
        run.write(*rows(range(PART)))
    (part,) = (tmp_path / "one" / "parts").iterdir()
    sizes = [200, 2000, part.stat().st_size + 300]
    for size, end in zip(sizes, _ends(_killed("sizes", tmp_path, *sizes)), strict=True):
        assert os.WTERMSIG(end["status"]) == signal.SIGXFSZ
        cut = [path for path in Path(end["folder"]).rglob("*") if path.is_file() and path.stat().st_size == size]
        assert len(cut) == 1, "it died in the middle of a write"
        _goes_on(end)


@pytest.mark.parametrize("kills", [pytest.param(12, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments(kills: int, tmp_path: Path) -> None:
    process = _killed("random", tmp_path, kills, 0)
    looks, last = 0, -1
    while process.poll() is None:  # also while it is written: never less than before
        if run := _begun(tmp_path):
            assert _good(run)
            assert len(steps(run)) - 1 >= last
            looks, last = looks + 1, len(steps(run)) - 1
    ends = _ends(process)
    assert len(ends) == kills
    assert looks > 1
    recorded = -1
    for end in ends:
        assert end["status"] == signal.SIGKILL
        first, *written = end["said"] or [None]
        if first is not None:
            assert first > recorded, "the next one goes on after all that was written"
            assert first <= recorded + PART + 1
            recorded = written[-1] if written else first - 1
    run = read_run(tmp_path)
    assert _good(run)
    assert recorded <= len(steps(run)) - 1 <= recorded + PART
    assert sum(len(end["said"]) > 2 for end in ends) > kills // 2, "most were killed while they wrote"
