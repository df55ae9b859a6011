"""Engines: every cell once, whatever happens to the processes, and none of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from sqrtdk.engines import ENGINES, Engine, _pool, open_engine
from sqrtdk.errors import InvalidValueError, LabError, MissingExtraError
from tests.engines.cells_of_engines import (
    dies,
    fails_at_three,
    leaves,
    not_picklable,
    product,
    refuses,
    slow_square,
    square,
)
from tests.engines.processes import python, running, until
from tests.support.paths import with_tests

HERE = ("local", "pool")


def cells(count: int, **more: object) -> list[dict[str, object]]:
    return [{"x": x, **more} for x in range(count)]


def started(folder: Path) -> dict[int, list[int]]:
    """The processes that began each cell."""
    lines = {int(path.stem): path.read_text().split() for path in folder.glob("*.log")}
    return {x: [int(line) for line in found if line != "ended"] for x, found in lines.items()}


def children() -> list[psutil.Process]:
    """Processes of this one that compute; Python's resource tracker stays."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if not any("resource_tracker" in word for word in child.cmdline())]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Both, the pool with two workers that are ended afterwards."""
    before = set(children())  # other tests' processes
    with open_engine("local") as local, open_engine("pool", workers=2) as pool:
        yield {"local": local, "pool": pool}
    assert set(children()) <= before


@pytest.mark.parametrize("name", HERE)
def test_every_cell_once(name: str, engines: dict[str, Engine]) -> None:
    results = list(engines[name].results(square, cells(9)))
    assert sorted((index, result["square"]) for index, result in results) == [(x, x * x) for x in range(9)]
    assert {result["threads"] for _, result in results} == {1}
    pids = {result["pid"] for _, result in results}
    assert pids == {os.getpid()} if name == "local" else os.getpid() not in pids
    assert list(engines[name].results(square, [])) == []


def test_the_same_bits_and_this_process_keeps_its_threads(engines: dict[str, Engine]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        found = [dict(engines[name].results(product, cells(4))) for name in HERE]
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
    assert len({result["sum"] for result in found[0].values()}) == 4


@pytest.mark.full
def test_millions_of_cells_are_not_read_at_once(engines: dict[str, Engine]) -> None:
    read = []

    def endless():  # type: ignore[no-untyped-def]
        x = 0
        while True:
            read.append(x)
            yield {"x": x}
            x += 1

    for _ in zip(range(5), engines["pool"].results(square, endless()), strict=False):
        pass
    assert len(read) < 15


@pytest.mark.full
@pytest.mark.parametrize("name", HERE)
def test_a_cell_that_fails_is_named(name: str, engines: dict[str, Engine]) -> None:
    with pytest.raises(LabError, match=r"the cell \(x=3, scale=none\) failed: ValueError: three is not") as raised:
        list(engines[name].results(fails_at_three, cells(9, scale="none")))
    shown = repr(raised.value.__cause__) + "".join(getattr(raised.value, "__notes__", []))
    assert "three is not to be had" in shown
    assert len(list(engines[name].results(square, cells(2)))) == 2, "the engine can go on"


@pytest.mark.parametrize("name", HERE)
def test_a_hint_of_ours_is_kept_and_an_exit_is_a_failure(name: str, engines: dict[str, Engine]) -> None:
    with pytest.raises(LabError, match="x is odd; got 0") as raised:
        list(engines[name].results(refuses, cells(1)))
    assert raised.value.hint == "Take another."
    with pytest.raises(LabError, match=r"\(x=0\) failed: SystemExit: 0"):
        list(engines[name].results(leaves, cells(1)))


def test_a_result_that_cannot_be_pickled_names_its_cell(engines: dict[str, Engine]) -> None:
    with pytest.raises(LabError, match=r"\(x=0\) failed: .*pickle"):
        list(engines["pool"].results(not_picklable, cells(1)))


def test_pool_a_worker_that_is_killed_loses_nothing(engines: dict[str, Engine], tmp_path: Path) -> None:
    seen: list[int] = []
    for index, result in engines["pool"].results(slow_square, cells(8, folder=str(tmp_path))):
        assert result["x"] == index
        seen.append(index)
        if len(seen) == 2:
            os.kill(until(lambda: running(tmp_path))[0], signal.SIGKILL)
    assert sorted(seen) == list(range(8))
    assert max(map(len, started(tmp_path).values())) == 2, "no cell was hit in the middle"


@pytest.mark.full
def test_pool_an_idle_worker_that_is_killed_loses_nothing(engines: dict[str, Engine]) -> None:
    (_, result), *_ = list(engines["pool"].results(square, cells(2)))
    os.kill(result["pid"], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(result["pid"]) or psutil.Process(result["pid"]).status() == "zombie")
    assert len(list(engines["pool"].results(square, cells(4)))) == 4


def test_pool_a_cell_that_always_kills_its_process_is_given_up(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "RETRIES", 0)
    seen = []
    results = engines["pool"].results(dies, cells(6))
    with pytest.raises(LabError, match=r"ended 1 times while the cell \(x=[0-9]\) was handed out"):
        seen.extend(index for index, _ in results)
    assert len(seen) == len(set(seen))
    assert 3 not in seen


@pytest.mark.full
def test_pool_leaving_early_ends_the_workers_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        _leave_early(tmp_path)
    assert time.monotonic() - begin < 50
    assert running(tmp_path)
    assert not any(psutil.pid_exists(pid) for pid in running(tmp_path))


def _leave_early(folder: Path) -> None:
    slow = cells(4, folder=str(folder), seconds=60)
    with open_engine("pool", workers=2) as engine:
        results = engine.results(slow_square, [{"x": 9, "folder": str(folder), "seconds": 0}, *slow])
        next(results)
        until(lambda: running(folder))
        _ = 1 / 0


PROGRAM = """
import sys
from tests.engines.cells_of_engines import slow_square
from sqrtdk.engines import open_engine

if __name__ == "__main__":
    with open_engine("pool", workers=2) as engine:
        for _ in engine.results(slow_square, [{"x": x, "folder": sys.argv[1], "seconds": 120} for x in range(4)]):
            pass
"""

# loky's thread hands no further cell over before the file "go" is there
LATE = """
import time
from pathlib import Path
from joblib.externals.loky import process_executor

pool, manager = process_executor.ProcessPoolExecutor, process_executor._ExecutorManagerThread
submit, wait = pool.submit, manager.wait_result_broken_or_wakeup

def late(*arguments):
    time.sleep(0.5)
    future = submit(*arguments)
    with open(sys.argv[1] + "/submitted", "a") as file:
        file.write(".")
    return future

def waits(thread):
    answer = wait(thread)
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    return answer

pool.submit, manager.wait_result_broken_or_wakeup = late, waits
"""


@pytest.mark.full
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_pool_no_worker_outlives_its_parent(kill: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with python(str(script), str(tmp_path), env=with_tests(), stderr=subprocess.PIPE) as process:
        until(lambda: len(running(tmp_path)) == 2)  # for two minutes
        workers = [psutil.Process(pid) for pid in running(tmp_path)]
        begin = time.monotonic()
        if kill == signal.SIGINT:
            os.killpg(process.pid, kill)  # as a terminal does: every process of the group gets it
        else:
            process.kill()
        _, said = process.communicate(timeout=120)
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
        assert len(gone) == 2
        assert time.monotonic() - begin < 100  # their cells take two minutes
        if kill == signal.SIGINT:
            assert said.count("Traceback") == 1, said  # the program's own; the workers say nothing


@pytest.mark.full
def test_pool_an_interrupt_while_workers_start_is_their_parents_alone(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with python(str(script), str(tmp_path), env=with_tests(), stderr=subprocess.PIPE) as process:
        parent = psutil.Process(process.pid)
        until(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in parent.children()))
        workers = parent.children()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert said.count("Traceback") == 1, said
        assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.full
def test_pool_an_interrupt_before_the_cells_are_handed_over(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("\nif __name__", f"{LATE}\nif __name__"))
    with python(str(script), str(tmp_path), env=with_tests(), stderr=subprocess.PIPE) as process:
        until(lambda: (submitted := tmp_path / "submitted").exists() and len(submitted.read_text()) == 4)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=120)
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("pol",), "an engine is one of local, pool, ray; got 'pol'", "Did you mean 'pool'?"),
        (("pool", 0), "workers are at least 1; got 0", "one a CPU"),
        (("local", 2), "'local' is this process alone; got 2 workers", "Take the engine 'pool'"),
        (("pool", None, "auto"), "an address is for the engine 'ray'; got 'auto' for 'pool'", "take 'ray'"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str, hint: str) -> None:
    """Before anything is opened: the caller may have other work to do first."""
    with pytest.raises(InvalidValueError, match=message) as raised:
        open_engine(*arguments)  # type: ignore[arg-type]
    assert hint in raised.value.hint


def test_ray_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="ray can't be imported") as raised:
        open_engine("ray")
    assert "pip install 'sqrtdk[ray]'" in raised.value.hint


def test_the_table_is_whole() -> None:
    assert list(ENGINES) == ["local", "pool", "ray"]
