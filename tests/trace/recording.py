"""Every record of every trace and every audit that tests make, written down: proof that a change of the code's form
changed nothing that it says.

Before and after the change, on one machine, in one process and so in one order:

    python -m pytest -m "not slow and not gpu" -p tests.trace.recording --records before tests/trace tests/audit
    python -m pytest -m "not slow and not gpu" -p tests.trace.recording --records after tests/trace tests/audit
    python -m tests.trace.recording before after

The last line compares the two, byte by byte, test by test, and prints the counts. What differs between two runs of
the same code (a time, a file's name) is no fault of a change: compare those first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/tmp/[\w/.-]*|(?<=\.py):\d+")  # numbers of lines change with every edit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the directory to write to."""
    parser.addoption("--records", type=Path, help="directory for every record that a traced test makes")


class Writer:
    """Writes a file for each test file, with a line for each trace and each audit in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.test = "(set-up)"
        home.mkdir(parents=True)

    def write(self, kind: str, records: Any) -> None:
        """Append one line: the test, what made the records, and their whole JSON."""
        from sqrtdk._json import document

        text = _ADDRESS.sub("ADDRESS", json.dumps(json.loads(document(records))))
        name = self.test.partition("::")[0].replace("/", "-")
        with (self.home / f"{name}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps([self.test, kind])[:-1]}, {text}]\n")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note which test is running."""
        self.test = item.nodeid
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Listen to every trace and every audit, where a directory is named."""
    home = config.getoption("--records")
    if home is None:
        return
    from sqrtdk import _check as check
    from sqrtdk.report.json import to_document
    from sqrtdk.tracing import Trace

    writer = Writer(home)
    config.pluginmanager.register(writer)
    report, close = check.CheckReport, Trace.__exit__

    def reported(*args: Any, **kwargs: Any) -> Any:
        made = report(*args, **kwargs)
        writer.write("audit", to_document(made) | {"environment": None})
        return made

    def closed(self: Any, *error: Any) -> None:
        close(self, *error)
        writer.write("trace", {"calls": self.calls, "others": self.not_attention, "missed": self.not_measured})

    check.CheckReport = reported  # type: ignore[assignment, misc]
    Trace.__exit__ = closed  # type: ignore[method-assign]


def main(before: Path, after: Path) -> int:
    """Compare two directories of records; the exit code."""
    counts = {"trace": 0, "audit": 0}
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
    print(f"{counts['trace']} traces and {counts['audit']} audits, {calls} calls; {unlike} differ")
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
