"""`make versions`: what is pinned where, that a failure and a missing environment are told, and the pages' table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import versions
import versions_page
from tests.support import needs, older

BY_NAME = {environment.name: environment for environment in versions.ENVIRONMENTS}
TESTS = """
import pytest

def test_that_passes():
    pass

def test_that_fails():
    raise ValueError

@pytest.fixture
def broken():
    raise OSError

def test_with_an_error(broken):
    pass

@pytest.mark.skip
def test_that_is_skipped():
    pass
"""
HERE = {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.24.0", "numpy": "2.4.0"}


def test_each_environment_moves_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "newest", lambda package, python: "99.0.0")  # the package index says so
    pins = versions._pins()
    assert {"torch", "transformers", "triton"} <= pins.keys()
    lines = {name: set(versions.constraints(each, sys.executable).split()) for name, each in BY_NAME.items()}
    whole = lines["pinned"]
    assert whole == lines["newest-python"] == {f"{name}=={version}" for name, version in pins.items()}
    assert whole ^ lines["newest-transformers"] == {f"transformers=={pins['transformers']}", "transformers==99.0.0"}
    triton = f"triton=={pins['triton']}"  # each torch has its own
    assert whole ^ lines["newest-torch"] == {f"torch=={pins['torch']}", "torch==99.0.0", triton}
    moved = ("torch", "transformers", "numpy")
    without = {f"{name}=={pins[name]}" for name in moved[:2]} | {triton}
    assert whole - lines["middle"] == whole - lines["oldest"] == without
    assert lines["middle"] - whole == {f"{name}=={versions.MIDDLE[name]}" for name in moved}
    assert lines["oldest"] - whole == {f"{name}=={versions._oldest(name)}" for name in moved}
    assert lines["newest-jax"] - whole == {"jax==99.0.0", "jaxlib==99.0.0"}
    assert lines["oldest-jax"] - whole == {f"{name}=={versions._oldest('jax')}" for name in ("jax", "jaxlib")}


def test_what_is_installed_and_run_is_there() -> None:
    assert all((versions.ROOT / folder).is_dir() for folder in versions.FOLDERS + versions.JAX_FOLDERS)
    assert len(versions._requirements()) == len(versions.NEEDED)


@pytest.mark.full
def test_failures_are_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--sample-seed', type=int)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setenv("JOBS", "0")
    found = versions.run_tests(Path(sys.executable), "test_small.py", tmp_path)
    assert (found["outcome"], found["passed"], found["failed"], found["skipped"]) == ("failed", 1, 2, 1)
    assert sorted(found["failures"]) == ["test_small.test_that_fails", "test_small.test_with_an_error"]
    assert "1 passed" in (tmp_path / "pytest.txt").read_text()

    one, none = "test_small.py::test_that_passes", "no_such.py"
    assert versions.run_tests(Path(sys.executable), one, tmp_path)["outcome"] == "ok"
    assert versions.run_tests(Path(sys.executable), none, tmp_path)["outcome"] == "failed"


def test_a_folder_is_run_again_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of other versions, nor where all are run."""
    counts = {"outcome": "ok", "passed": 2, "failed": 0, "failures": [], "skipped": 1, "minutes": 0.5}
    monkeypatch.setattr(versions, "run_tests", lambda python, tests, folder: counts | {"folder": tests})
    monkeypatch.setattr(versions, "make", lambda environment, folder: Path(sys.executable))
    monkeypatch.setattr(versions, "ASK", f"import json; print(json.dumps({HERE}))")
    first, second, third = versions.FOLDERS[:3]
    (one,) = versions.try_out(BY_NAME["pinned"], tmp_path, [second])
    assert (one["folders"], one["passed"], one["skipped"]) == ([second], 2, 1)
    failed = counts | {"outcome": "failed", "passed": 0, "failed": 1, "failures": ["it"]}
    kept = one | {"runs": {second: one["runs"][second], third: failed}}
    (two,) = versions.try_out(BY_NAME["pinned"], tmp_path, [first], kept)
    assert two["folders"] == [first, second, third]
    assert (two["outcome"], two["passed"], two["failed"], two["failures"]) == ("failed", 4, 1, ["it"])
    (three,) = versions.try_out(BY_NAME["pinned"], tmp_path, [third], two)
    assert (three["outcome"], three["passed"], three["minutes"]) == ("ok", 6, 1.5)
    (other,) = versions.try_out(BY_NAME["pinned"], tmp_path, [first], three | {"torch": "1.0"})
    assert other["folders"] == [first]
    *_, last = versions.try_out(BY_NAME["pinned"], tmp_path, (), three)
    assert last["folders"] == list(versions.FOLDERS)
    assert last["passed"] == 2 * len(versions.FOLDERS)


def test_what_can_not_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (entry,) = versions.try_out(BY_NAME["newest-python"], tmp_path)
    assert entry["outcome"] == "not available"
    assert entry["reason"] == "none of python3.14, python3.13, python3.12 is here, with venv"


def test_the_same_versions_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "newest", lambda package, python: versions._pins()[package])
    (entry,) = versions.try_out(BY_NAME["newest-transformers"], tmp_path)
    assert (entry["outcome"], entry["reason"]) == ("same", "pinned")


def test_what_is_too_old_says_so_and_its_tests_are_there() -> None:
    assert needs.missing("this", torch="2.6") is None
    assert needs.missing("this", torch="99.0", pytest="8", no_such_package="1") == (
        "needs torch 99.0 and no_such_package 1: this"
    )
    assert older.names("f.py::test_a[x]", "f.py::test_a")
    assert not older.names("f.py::test_ab", "f.py::test_a")
    for lack in older.LACKS:
        for file, _, function in (test.partition("::") for test in lack.tests):
            assert f"def {function.partition('[')[0]}(" in (versions.ROOT / file).read_text(encoding="utf-8"), function


def _table(language: str, *entries: dict[str, Any]) -> str:
    return versions_page.versions(language, {"cpu": "A CPU", "date": "2026-01-01", "environments": entries})


def test_the_table_says_what_ran_and_why_the_rest_did_not() -> None:
    ran = HERE | {"name": "pinned", "outcome": "ok", "passed": 9, "failed": 0, "skipped": 2, "minutes": 1.5}
    ran["folders"] = list(versions.FOLDERS)
    same = HERE | {"name": "newest-transformers", "outcome": "same", "reason": "pinned"}
    missing = {"name": "newest-python", "outcome": "not available", "reason": "no such"}
    text = _table("en", ran, same, missing)
    assert "| pinned | 3.11.7 | 2.13.0 | 5.24.0 | 2.4.0 | 9 | 0 | 2 | 1.5 |" in text
    assert "The newest transformers is the one of the environment pinned." in text
    assert "Not run, newest Python: `no such`." in text
    assert text.count("\n| ") == 1
    assert "`no such`" in _table("zh", ran, same, missing)
    assert "not run: `" not in text
    assert "In the row pinned these are not run: `tests/stats`, `tests/scores`." in _table(
        "en", ran | {"folders": list(versions.FOLDERS[:-2])}
    )


@pytest.mark.parametrize("language", versions_page.LANGUAGES)
def test_the_pages_are_what_the_record_says(language: str) -> None:
    """Write them again after the record changed: python scripts/versions_page.py."""
    found = versions_page.record("versions")
    assert {entry["name"] for entry in found["environments"]} == BY_NAME.keys() == versions_page.NAMES.keys()
    assert versions_page.written(language, found) == versions_page.page(language).read_text(encoding="utf-8")
