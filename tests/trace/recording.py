"""Every record of every trace, audit, comparison and run of a graph that tests make, written down: proof that a change
of the code's form changed nothing that it says. Of tensors that are kept or compared, names and shapes are written.

Before and after the change, on one machine, in one process and so in one order:

    python -m pytest -m "not slow and not gpu" -p tests.trace.recording --records before tests/trace tests/audit \\
        tests/graphs tests/compare tests/laws
    python -m pytest -m "not slow and not gpu" -p tests.trace.recording --records after tests/trace tests/audit \\
        tests/graphs tests/compare tests/laws
    python -m tests.trace.recording before after

The last line compares the two, byte by byte, test by test, and prints the counts. What differs between two runs of
the same code (a time, a file's name) is no fault of a change: compare those first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/[\w/.-]*|(?<=\.py):\d+")  # numbers of lines change with every edit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the directory to write to."""
    parser.addoption("--records", type=Path, help="directory for every record that a traced test makes")


class Writer:
    """Writes a file for each test file, with a line for each thing that was told in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.test = "(set-up)"
        home.mkdir(parents=True)

    def write(self, kind: str, records: Any) -> None:
        """Append one line: the test, what made the records, and their whole JSON."""
        from sqrtdk._json import json_document

        text = _ADDRESS.sub("ADDRESS", json.dumps(json.loads(json_document(records))))
        name = self.test.partition("::")[0].replace("/", "-")
        with (self.home / f"{name}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps([self.test, kind])[:-1]}, {text}]\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Seed what a file draws while it is imported: X = torch.randn(2, 5, 8) at its top."""
        import torch

        torch.manual_seed(0)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note which test is running."""
        self.test = item.nodeid
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Listen to everything that is told, where a directory is named."""
    home = config.getoption("--records")
    if home is None:
        return
    from tests.trace.told import listening

    writer = Writer(home)
    config.pluginmanager.register(writer)
    heard = listening(lambda kind, result: writer.write(kind, FORMS[kind](result)))
    heard.__enter__()
    config.add_cleanup(lambda: heard.__exit__(None, None, None))


def _trace(run: Any) -> Any:
    from tests.trace.told import described

    kept = [described(call) for call in run.tensors]
    return {"calls": run.calls, "others": run.not_attention, "missed": run.not_measured, "kept": kept}


def _audit(report: Any) -> Any:
    from sqrtdk.report.check.json import to_document

    return to_document(report) | {"environment": {"notes": report.environment.get("notes", [])}}


def _comparison(report: Any) -> Any:
    from sqrtdk.report.diff.json import to_json

    said = json.loads(to_json(report))
    return said | {"calls": said["pairs"], "pairs": None, "environment": {"notes": report.environment.get("notes", [])}}


def _graph(run: Any) -> Any:
    from tests.trace.told import described

    return {"calls": [described(call) for call in run.calls], "missing": run.missing, "outputs": list(run.outputs)}


def _program(program: Any) -> Any:
    from tests.trace.told import outlined

    return {"calls": [], "program": outlined(program)}


# What is written of each kind; "calls" are counted.
FORMS: dict[str, Callable[[Any], Any]] = {
    "trace": _trace,
    "audit": _audit,
    "comparison": _comparison,
    "program": _program,
    "graph": _graph,
}


def main(before: Path, after: Path) -> int:
    """Compare two directories of records; the exit code."""
    counts = dict.fromkeys(FORMS, 0)
    calls, unlike = 0, 0
    for name in sorted({path.name for home in (before, after) for path in home.glob("*.jsonl")}):
        old, new = (_lines(home / name) for home in (before, after))
        if len(old) != len(new):
            print(f"{name}: {len(old)} lines before, {len(new)} after")
            unlike += abs(len(old) - len(new))
        for one, other in zip(old, new, strict=False):
            test, kind, records = json.loads(one)
            counts[kind] += 1
            calls += len(records["calls"])
            if one != other:
                unlike += 1
                print(f"{test}: {kind}")
                print("\n".join(f"    {line}" for line in _differences(records, json.loads(other)[2], "")))
    print(f"{', '.join(f'{count} of kind {kind}' for kind, count in counts.items())}, {calls} calls; {unlike} differ")
    return int(unlike > 0 or not calls)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _differences(one: Any, other: Any, place: str) -> Iterator[str]:
    """Where two JSON values differ, and by what."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, f"{place}[{i}]")
    elif one != other:
        yield f"{place}: {json.dumps(one)[:300]}  ->  {json.dumps(other)[:300]}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
