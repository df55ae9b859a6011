"""The page for those who change the trace: its examples run, and what it names is there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import sqrtdk.tracing
from sqrtdk.tracing import steps

PAGE = Path(__file__).parents[2] / "docs" / "en" / "trace.md"
TEXT = PAGE.read_text(encoding="utf-8")
HOME = Path(sqrtdk.tracing.__file__).parent


def test_the_examples_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.failed == 0
    assert result.attempted > 20


def test_the_examples_leave_nothing_behind() -> None:
    from sqrtdk.tracing.readback import chain, kernels

    assert not {"hardtanh", "asinh"} & chain.READERS.keys()
    assert "docs::attend" not in kernels.KERNELS


@pytest.mark.parametrize("room", [path.name for path in HOME.iterdir() if path.is_dir() and path.name[0] != "_"])
def test_the_table_has_every_room(room: str) -> None:
    (row,) = re.findall(rf"^\| `{room}` .*$", TEXT, re.MULTILINE)
    files = {path.stem for path in (HOME / room).glob("*.py")}
    names = set(re.findall(r"`(\w+)`", row.split("|")[3]))
    assert names <= files | set(vars(steps)) | {"Node", "Reading"}, names


def test_every_step_is_named() -> None:
    kinds = [kind for kind in vars(steps).values() if isinstance(kind, type) and issubclass(kind, steps.Step)]
    assert all(f"`{kind.__name__}`" in TEXT for kind in kinds if kind is not steps.Step)
