"""Forty checkpoints: the same rows from every engine, though workers and the whole program are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sqrtdk.monitor.checkpoints import measure_checkpoints
from tests.engines.processes import until
from tests.monitor.saved_runs import DAMAGES, OPTIONS, rows, save

pytestmark = pytest.mark.slow
STEPS = range(25, 1025, 25)
DAMAGED = dict(zip(range(100, 1000, 75), DAMAGES, strict=False))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("runs") / "a", STEPS, growth=1.1)
    for step, name in DAMAGED.items():
        DAMAGES[name][0](folder / f"checkpoint-{step}")
    return folder


@pytest.fixture(scope="module")
def local(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = measure_checkpoints([f"{saved}/checkpoint-*"], tmp_path_factory.mktemp("local") / "run", OPTIONS)
    assert done.computed == 40
    assert [one.step for one, _ in done.failed] == list(DAMAGED)
    return done.runs[0]


def workers() -> list[int]:
    """Processes of a pool."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def tasks() -> list[int]:
    """Processes of a Ray that compute."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [child.pid] if "ray::compute" in " ".join(child.cmdline()) else []
    return found


@pytest.mark.parametrize(("engine", "computing"), [("pool", workers), ("ray", tasks)])
def test_every_engine_gives_the_same_though_workers_are_killed(
    engine: str, computing: Callable[[], list[int]], saved: Path, local: Path, tmp_path: Path
) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done in (5, 20):
            killed.append(until(computing, 120.0)[0])
            os.kill(killed[-1], signal.SIGKILL)

    done = measure_checkpoints(
        [f"{saved}/checkpoint-*"], tmp_path / "run", OPTIONS, engine=engine, workers=2, progress=kill_one
    )
    assert len(killed) == 2
    assert not any(psutil.pid_exists(pid) for pid in killed)
    assert done.computed == 40
    assert rows(tmp_path / "run") == rows(local)


@pytest.mark.parametrize("engine", [("local",), ("pool", "--workers", "2")])
def test_a_program_that_is_killed_goes_on(engine: tuple[str, ...], saved: Path, local: Path, tmp_path: Path) -> None:
    """Killed as often as it takes, each time when some more results are there."""
    command = [sys.executable, "-m", "sqrtdk", "watch", "checkpoints", f"{saved}/checkpoint-*", "--seq-len", "12"]
    command += ["--output", str(tmp_path / "run"), "--engine", *engine]
    kept = tmp_path / "run" / "checkpoints"
    for more in (8, 16, 24):
        with psutil.Popen(command, stdout=-3, stderr=-3) as program:
            until(lambda more=more: len(list(kept.glob("*.json"))) >= more, 120.0)
            children = program.children(recursive=True)
            program.kill()
        assert psutil.wait_procs(children, timeout=120)[1] == []
    done = measure_checkpoints([f"{saved}/checkpoint-*"], tmp_path / "run", OPTIONS)
    assert 24 <= done.reused < 40 - len(DAMAGED)
    assert done.reused + done.computed == 40
    assert rows(tmp_path / "run") == rows(local)
