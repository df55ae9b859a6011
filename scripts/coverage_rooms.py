"""Statements of each room that `make test` runs, against those that `make full` runs.

Runs the tests of `make test` and then the rest with coverage, in processes that tests start as well, and prints a table
by room (folder or file of src/sqrtdk). Ends with 1 if the tests fail, or if a room loses more than MOST points.
Run: make coverage, which takes about twice the time of make full; with Python 3.12 and newer hardly more, as
sys.monitoring counts there: make coverage PYTHON=python3.13.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import coverage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tiers import TIERS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "sqrtdk"
FOLDER = ROOT / "out" / "coverage"
MOST = 3.0  # points that a room may lose
MEASURED = ("test", "rest")  # together they are full
# What a process writes while it exits is lost under coverage.
ENDS = "tests/cli/test_cli_streams.py::test_a_call_a_fork_and_a_fresh_start_say_the_same"
CONFIG = """
[run]
data_file = {data}
source = {package}
parallel = true
patch =
    subprocess
    _exit
"""


@dataclass
class Room:
    """Numbers of statements: all, run by `make test`, run by `make full`."""

    statements: int = 0
    test: int = 0
    full: int = 0

    @property
    def loss(self) -> float:
        """Points of coverage that `make test` has less than `make full`."""
        return 100 * (self.full - self.test) / max(self.statements, 1)


def run(tier: str, jobs: int, seed: int) -> bool:
    """Run a tier with coverage, and combine the data of its processes; whether its tests passed."""
    for old in FOLDER.glob(f"{tier}*"):
        old.unlink()
    data, config = FOLDER / tier, FOLDER / f"settings-{tier}.cfg"
    config.write_text(CONFIG.format(data=data, package=PACKAGE), encoding="utf-8")
    coverage_of = [sys.executable, "-m", "coverage"]
    command = [*coverage_of, "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", TIERS[tier]]
    command += ["--numprocesses", str(jobs), "--dist", "worksteal", "--sample-seed", str(seed), "--deselect", ENDS]
    core = {"COVERAGE_CORE": "sysmon"} if sys.version_info >= (3, 12) else {}
    passed = subprocess.run(command, cwd=ROOT, check=False, env=os.environ | core).returncode == 0
    subprocess.run([*coverage_of, "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)
    return passed


def covered() -> dict[str, Room]:
    """Count the statements of each room in the data of both tiers."""
    lines: dict[str, dict[str, set[int]]] = {}
    for tier in MEASURED:
        data = coverage.CoverageData(str(FOLDER / tier))
        data.read()
        lines[tier] = {path: set(data.lines(path) or ()) for path in data.measured_files()}
    analyst = coverage.Coverage(data_file=str(FOLDER / "test"))
    analyst.load()
    rooms: dict[str, Room] = defaultdict(Room)
    for path in sorted(PACKAGE.rglob("*.py")):
        statements = set(analyst.analysis2(str(path))[1])
        test, rest = (statements & lines[tier].get(str(path), set()) for tier in MEASURED)
        room = rooms[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
        room.statements += len(statements)
        room.test += len(test)
        room.full += len(test | rest)
    return {name: room for name, room in rooms.items() if room.statements}


def main() -> int:
    """Run both tiers and print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample-seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="of the data that are there; run nothing")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    tiers = () if arguments.report else MEASURED
    failed = [tier for tier in tiers if not run(tier, arguments.jobs, arguments.sample_seed)]
    rooms = covered()
    whole = Room(*(sum(getattr(room, name) for room in rooms.values()) for name in ("statements", "test", "full")))
    print(f"{'room':18}{'statements':>12}{'test %':>9}{'full %':>9}{'loss':>7}")
    for name, room in [*rooms.items(), ("all", whole)]:
        shares = (100 * count / room.statements for count in (room.test, room.full))
        print(f"{name:18}{room.statements:12}{next(shares):9.1f}{next(shares):9.1f}{room.loss:7.1f}")
    lost = [name for name, room in rooms.items() if room.loss > MOST]
    if lost:
        print(f"more than {MOST:g} points less: {', '.join(lost)}")
    if failed:
        print(f"tests failed: {', '.join(failed)}")
    return int(bool(failed or lost))


if __name__ == "__main__":
    sys.exit(main())
