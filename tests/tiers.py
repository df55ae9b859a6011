"""Tiers of tests, samples of long matrices, and where the seconds of a run went.

`make test` runs what has no marker of a later tier: `full` (over a second, or one of many) or `slow` (hours). A matrix
marked `sampled(n)` gives it n of its cases, drawn by a seed; the others are `full`. Every test function of a file draws
the same cases, so that what they share is computed once:

    @pytest.mark.sampled(20)
    @pytest.mark.parametrize("name", CASES)
    def test_formula(name): ...

The seed stands at the end of a run; `--sample-seed` repeats its draw. A test that is named by its node id always runs.
`--share N` runs one in N of the tests marked `full`, drawn by the same seed: what CI has the time for.
"""

from __future__ import annotations

import gc
import os
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.older import mark_older

TIERS = {  # what `make test`, `make rest` and `make full` select
    "test": "not full and not slow and not gpu",
    "rest": "full and not slow and not gpu",
    "full": "not slow and not gpu",
}
SLOWEST = 20
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the seed of the samples, and the share of the tests marked full."""
    parser.addoption("--sample-seed", type=int, help="seed that draws the cases of tests marked sampled(n)")
    parser.addoption("--share", type=int, default=1, metavar="N", help="run one in N of the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed where none is named, or take that of the process that started this worker; register the report."""
    if hasattr(config, "workerinput"):
        config.option.sample_seed = config.workerinput["sample_seed"]
    elif config.option.sample_seed is None:
        config.option.sample_seed = random.SystemRandom().randrange(10**6)
    config.pluginmanager.register(Report(config), "tiers-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the samples leave out as `full`, before pytest selects by markers, and what can't run here."""
    mark_older(items)
    if any("::" in argument for argument in config.args):
        return
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and not any(item.iter_markers("slow")) and not any(item.iter_markers("full")):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        (count,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        for item in left_out(cases, count, config.option.sample_seed):
            item.add_marker(pytest.mark.full)
    if config.option.share > 1:
        costly = [item for item in items if item.get_closest_marker("full")]
        others = set(left_out(costly, -(-len(costly) // config.option.share), config.option.sample_seed))
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))


def left_out(cases: list[pytest.Item], count: int, seed: int) -> list[pytest.Item]:
    """Return the cases that a sample of `count` does not hold; functions of a file with the same cases agree."""

    def rank(item: pytest.Item) -> int:
        file, _, case = item.nodeid.partition("::")
        return zlib.crc32(f"{seed} {file} {case.partition('[')[2]}".encode())

    return sorted(cases, key=rank)[count:]


def cpu_seconds() -> float:
    """CPU seconds of this process and its children, those that still run included."""
    total = sum(os.times()[:4])
    children = (pid for thread in Path("/proc/self/task").glob("*/children") for pid in _text(thread).split())
    return total + sum(map(_running, children))


def _running(pid: str) -> float:
    """CPU seconds of a child that has not ended, and of those that it has waited for."""
    fields = _text(Path("/proc", pid, "stat")).rpartition(")")[2].split()  # what follows "PID (NAME)"
    return sum(map(int, fields[11:15])) / TICKS


def _text(path: Path) -> str:
    """Return what /proc says; nothing of a thread or a process that has ended since it was listed."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


class Report:
    """CPU seconds of every test, counted where it runs and told at the end: the slowest tests, and each folder."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.last = cpu_seconds()
        self.collecting: list[float] = []
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Note what a process spent until it had collected; a worker of xdist hands it on.

        What is there stays to the end. Garbage collection looked through it again and again: a sixth of the time.
        """
        gc.collect()
        gc.freeze()
        self.last = spent = cpu_seconds()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["collecting"] = spent
        else:
            self.collecting.append(spent)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand the seed to a worker of xdist: all draw the same cases."""
        node.workerinput["sample_seed"] = self.config.option.sample_seed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Read what a worker of xdist handed on."""
        self.collecting.append(getattr(node, "workeroutput", {}).get("collecting", 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Write the seconds of a test into its last report: it travels to the process that prints."""
        report = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the seconds of set-up, call and tear-down."""
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the slowest tests, the folders, and the seed of the samples."""
        if not self.seconds:
            return
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        for name, seconds in self.seconds.most_common(SLOWEST):
            write(f"{seconds:8.1f}  {name}")
        folders: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            folder = folder_of(name)
            folders[folder] += seconds
            counts[folder] += 1
        write("by folder:")
        for folder, seconds in folders.most_common():
            write(f"{seconds:8.1f}  {folder} ({counts[folder]} tests)")
        write(f"{sum(self.collecting):8.1f}  imports and collection, {len(self.collecting)} process(es)")
        write(f"{folders.total() + sum(self.collecting):8.1f}  in all, {len(self.seconds)} tests")
        write(f"samples drawn with --sample-seed {self.config.option.sample_seed}")


def folder_of(nodeid: str) -> str:
    """Return the folder of tests, or `src` for a docstring's examples.

    Example:
        >>> folder_of("tests/audit/test_gains.py::test_a[1]"), folder_of("tests/test_readme.py::test_b")
        ('tests/audit', 'tests')
        >>> folder_of("src/sqrtdk/theory/costs.py::sqrtdk.theory.costs.cost")
        'src'
    """
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[: 1 if parts[0] != "tests" or len(parts) < 3 else 2])
