"""What users of the lab as a library rely on: its names and types, and records that save themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sqrtdk_lab as lab
from sqrtdk.errors import InvalidValueError
from sqrtdk_lab.record import Record

TYPED = """
from typing import assert_type
import sqrtdk_lab
from sqrtdk_lab.runner import Done

assert_type(sqrtdk_lab.run("grad-norm", quick=True), Done)
assert_type(next(sqrtdk_lab.run(["grad-norm"])), Done)
"""


@pytest.mark.full
def test_types_are_known(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "typed.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_dir_lists_what_is_public() -> None:
    assert dir(lab) == ["CLAIMS", "records", "run"]
    with pytest.raises(AttributeError, match="did you mean 'CLAIMS'"):
        _ = lab.CLAIM


def test_one_id_runs() -> None:
    done = lab.run("params-single", quick=True)
    assert isinstance(done.record, Record)
    assert repr(done).startswith("Done(Record('params-single', fails; quick, seed 0; ")
    (same,) = lab.run(["params-single"], quick=True)
    assert same.record.outcome.verdict == done.record.outcome.verdict
    with pytest.raises(InvalidValueError, match="there is no claim 'grad-nrm'") as error:
        lab.run("grad-nrm")
    assert "grad-norm" in (error.value.hint or "")
    with pytest.raises(InvalidValueError, match="one id is one claim; got 'all'"):
        lab.run("all")


def test_a_record_and_a_claim_that_was_run_save_the_same(tmp_path: Path) -> None:
    done = lab.run("params-single", quick=True)
    done.save(tmp_path / "params-single.json")
    (again,) = lab.records(tmp_path)
    assert again.to_json() == done.record.to_json() == done.to_json()
    done.record.save(tmp_path / "record.html")
    done.save(tmp_path / "done.html")
    page = (tmp_path / "done.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "record.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    with pytest.raises(InvalidValueError, match=r"\.md"):
        done.save(tmp_path / "done.md")
