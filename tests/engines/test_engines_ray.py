"""The engine `ray`, on a real Ray of this machine with two workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sqrtdk.engines import Engine, _ray, open_engine
from sqrtdk.errors import LabError
from sqrtdk_lab.sweep import Grid, sweep
from tests.engines.cells_of_engines import fails_at_three, leaves, not_importable, not_picklable, slow_square, square
from tests.engines.processes import running, until
from tests.support.paths import with_tests

ray = pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A Ray that the engine starts and ends."""
    with open_engine("ray", workers=2) as engine:
        assert engine.workers == 2
        nodes = [child for child in psutil.Process().children() if "raylet" in child.name()]
        yield engine
    assert not ray.is_initialized()
    assert nodes
    assert psutil.wait_procs(nodes, timeout=300)[1] == []


def test_every_cell_once_though_a_worker_is_killed(engine: Engine, tmp_path: Path) -> None:
    killed: list[int] = []
    seen: list[int] = []
    cells = [{"x": x, "folder": str(tmp_path)} for x in range(12)]
    for index, result in engine.results(slow_square, cells):
        assert result["x"] == index
        assert result["threads"] == 1
        seen.append(index)
        if len(seen) == 3:
            killed.append(until(lambda: running(tmp_path))[0])
            os.kill(killed[0], signal.SIGKILL)
    assert sorted(seen) == list(range(12))
    begun = {path.stem: path.read_text().split() for path in tmp_path.glob("*.log")}
    hit = [lines for lines in begun.values() if lines.count("ended") < len(lines) - 1]
    assert len(hit) == 1, "one cell was hit in the middle and begun again"
    assert hit[0][0] == str(killed[0]) != hit[0][1]
    assert not psutil.pid_exists(killed[0])


@pytest.mark.full
def test_a_sweep_though_a_worker_is_killed(engine: Engine, tmp_path: Path) -> None:
    grid = Grid(d_k=[64, 128], keys=[64, 256], scale=["sqrt_dk", "none"], seeds=range(4), rows=256)
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done == 3:
            killed.append(until(computing)[0])
            os.kill(killed[0], signal.SIGKILL)

    def computing() -> list[int]:
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                found += [child.pid] if "ray::compute" in " ".join(child.cmdline()) else []
        return found

    done = sweep(grid, tmp_path / "ray", engine="ray", progress=kill_one)
    assert killed
    assert not psutil.pid_exists(killed[0])
    assert ray.is_initialized(), "a Ray that was there is left alone"
    alone = sweep(grid, tmp_path / "local", engine="local")
    assert (done.computed, alone.computed) == (32, 32)
    assert done.results.read_bytes() == alone.results.read_bytes()


def test_a_cell_that_fails_is_named(engine: Engine) -> None:
    with pytest.raises(LabError, match=r"the cell \(x=3\) failed: ValueError: three is not"):
        list(engine.results(fails_at_three, [{"x": x} for x in range(5)]))
    with pytest.raises(LabError, match=r"the cell \(x=0\) failed: .*pickle"):
        list(engine.results(not_picklable, [{"x": 0}]))
    with pytest.raises(LabError, match=r"\(x=0\) failed: SystemExit: 0"):
        list(engine.results(leaves, [{"x": 0}]))
    assert [result["square"] for _, result in engine.results(square, [{"x": 5}])] == [25]


def test_an_address_where_a_ray_is_there_already(engine: Engine) -> None:
    with pytest.raises(LabError, match="connected to a Ray already; got the address auto"):
        open_engine("ray", address="auto").__enter__()


@pytest.mark.parametrize("name", ["torch", "sqrtdk", "python", "code"])
def test_workers_of_other_versions_are_refused_before_the_first_cell(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _ray._worker_versions()
    monkeypatch.setattr(_ray, "numbers_from", lambda *packages: theirs | {name: "0.0.1"})
    with pytest.raises(
        LabError, match=rf"(?m)would give other numbers: {name} [^;]* there and 0\.0\.1 here$"
    ) as raised:
        open_engine("ray").__enter__()
    assert f"{name} {theirs[name]} there" in str(raised.value)
    assert "same versions" in raised.value.hint
    assert ray.is_initialized()


def test_the_code_of_another_package_is_held_against_that_of_the_workers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine("ray", packages=("json",)):  # the workers have this package as it is here
        pass
    here = _ray._worker_versions()  # as if no file of it counted
    monkeypatch.setattr(_ray, "numbers_from", lambda *packages: here)
    with pytest.raises(LabError, match="would give other numbers: code "):
        open_engine("ray", packages=("json",)).__enter__()


def test_workers_that_cannot_import_this_package_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray, "_worker_versions", not_importable)
    with pytest.raises(LabError, match=r"at .* can't run sqrtdk: .*no module of that name"):
        open_engine("ray").__enter__()


VISITOR = """
import sys
import ray
from tests.engines.cells_of_engines import slow_square
from tests.engines.processes import running
from pathlib import Path
from sqrtdk.engines import open_engine
cells = [{"x": x, "folder": sys.argv[2], "seconds": 0.1} for x in range(6)]
squares = []
with open_engine("ray", workers=1, address=sys.argv[1]) as engine:
    for _, result in engine.results(slow_square, cells):
        squares.append(result["square"])
        assert not running(Path(sys.argv[2])), "more at once than one"
    print(engine.workers, squares)
print(ray.is_initialized())
"""


@pytest.mark.full
def test_an_address_of_a_cluster_which_goes_on_afterwards(engine: Engine, tmp_path: Path) -> None:
    """It has two CPUs, of which one worker takes one."""
    done = subprocess.run(
        [sys.executable, "-c", VISITOR, ray.get_runtime_context().gcs_address, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=with_tests(),
    )
    assert done.stdout.splitlines() == ["1 [0, 1, 4, 9, 16, 25]", "False"], done.stderr
    assert len(list(engine.results(square, [{"x": 1}]))) == 1


UNREACHABLE = """
import sys
from sqrtdk.errors import LabError
from sqrtdk.engines import _ray, open_engine
_ray._CONNECT_S = 10.0
try:
    open_engine("ray", address=sys.argv[1]).__enter__()
except LabError as error:
    print(error, "|", error.hint)
"""


def unreachable(address: str) -> tuple[str, float]:
    """In a process that no Ray runs in."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, address], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    return done.stdout, time.monotonic() - begin


@pytest.mark.sampled(1)
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1", "nowhere.invalid:6379"])
def test_an_address_where_nobody_answers(address: str) -> None:
    text, seconds = unreachable(address)
    assert f"no Ray cluster answers at {address}" in text
    assert address != "nonsense" or "nonsense: " in text
    assert "ray start --head" in text
    assert seconds < 30


@pytest.mark.full
def test_an_address_of_something_else() -> None:
    """It takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_take_and_hold, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text, seconds = unreachable(address)
    assert f"no Ray cluster answers at {address} within 10 s" in text
    assert seconds < 60


def _take_and_hold(server: socket.socket) -> None:
    held = []
    try:
        while True:
            held.append(server.accept())
    except OSError:
        for connection, _ in held:
            connection.close()


@pytest.mark.full
def test_the_settings_leave_no_trace() -> None:
    assert not set(_ray._ENVIRONMENT) & set(os.environ)
