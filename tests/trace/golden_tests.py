"""Golden cases out of tests: what is told while a test runs is its record, so that no test's model is written twice.

A case is a test function of a file with one row of its `parametrize`; it runs here as it does there, asserts and all.
Left out are tests marked `full` or `slow`, tests of another fixture than `monkeypatch` and `tmp_path`, and those in
which nothing is told.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sqrtdk.audit.records import CheckReport
from sqrtdk.graphs import GraphRun
from sqrtdk.tracing import Trace
from tests.trace.told import counted, judged, listening, notes, ran, told, without_empty

FIXTURES = ("monkeypatch", "tmp_path")


@dataclass(frozen=True)
class File:
    """A file of tests.

    Attributes:
        module: "tests.trace.test_trace_lost".
        only: names of tests; none: all of them.
        silent: names of tests in which nothing is told, or what differs from run to run.
        within: what holds while one of them runs, as its own fixtures see to it.
    """

    module: str
    only: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Case:
    """A test with its arguments."""

    file: File
    test: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> dict[str, Any]:
        """Run it; the audits that were made, or else the traces, and the graphs that ran."""
        heard: dict[str, list[Any]] = {"audit": [], "trace": [], "graph": []}
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            fixtures = {"monkeypatch": lambda: patch, "tmp_path": lambda: _folder(stack)}
            wanted = [name for name in inspect.signature(self.test).parameters if name in FIXTURES]
            stack.enter_context(self.file.within())
            stack.enter_context(listening(lambda kind, result: heard.setdefault(kind, []).append(_form(result))))
            self.test(**self.arguments, **{name: fixtures[name]() for name in wanted})
        kinds = ("audit" if heard["audit"] else "trace", "graph")
        return {f"{kind}s": counted(heard[kind]) for kind in kinds if heard[kind]}


def _folder(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


def _form(result: Any) -> Any:
    """What it says, without what is empty."""
    if isinstance(result, CheckReport):
        return without_empty(judged(result) | {"notes": notes(result)})
    if isinstance(result, Trace):
        return without_empty(told(result))
    return without_empty(ran(result)) if isinstance(result, GraphRun) else None


def cases(*files: File) -> dict[str, Case]:
    """Every case of some files, by the name of its test; none of a file that needs what is not installed."""
    found: dict[str, Case] = {}
    for file in files:
        with contextlib.suppress(pytest.skip.Exception):
            module = importlib.import_module(file.module)
            short = file.module.rpartition(".test_")[2].removeprefix("trace_")
            names = file.only or [name for name in vars(module) if name.startswith("test_") and name not in file.silent]
            for name in names:
                test = getattr(module, name)
                if test.__module__ == module.__name__:
                    title = f"{short}: {name.removeprefix('test_').replace('_', ' ')}"
                    found |= {f"{title}{row}": Case(file, test, given) for row, given in _rows(test)}
    return found


def _rows(test: Callable[..., None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of its parametrize marks, each with its name; none of a test that is left out."""
    marks = getattr(test, "pytestmark", [])
    if {mark.name for mark in marks} & {"full", "slow", "usefixtures"}:
        return
    tables = [_table(mark) for mark in marks if mark.name == "parametrize"]
    for rows in itertools.product(*tables):
        given = {name: value for _, values in rows for name, value in values.items()}
        if inspect.signature(test).parameters.keys() <= {*given, *FIXTURES}:
            yield "".join(f" [{name}]" for name, _ in rows), given


def _table(mark: pytest.Mark) -> list[tuple[str, dict[str, Any]]]:
    names, rows = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    listed = []
    for number, row in enumerate(rows):
        costly = isinstance(row, type(pytest.param())) and {m.name for m in row.marks} & {"full", "slow"}
        values = row.values if isinstance(row, type(pytest.param())) else row if len(names) > 1 else (row,)
        words = [str(value) for value in values if value is None or isinstance(value, (str, int, float, tuple))]
        if not costly:
            listed.append((" ".join(words) or str(number), dict(zip(names, values, strict=True))))
    return listed
