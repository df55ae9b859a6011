"""`make portable`: that a setting takes effect, that a run which fails is told and the next one has its turn."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "portable.py"
TESTS = """
import os
import pytest

def test_that_fails_without_vectors():
    assert os.environ["ATEN_CPU_CAPABILITY"] != "default"

def test_of_threads():
    assert os.environ["OMP_NUM_THREADS"] == "2"

@pytest.mark.skip
def test_that_is_skipped():
    pass
"""


@pytest.fixture
def portable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("portable", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for path in (*module.LEFT_OUT, *(test.partition("::")[0] for test in module.DESELECTED)):
        assert (module.ROOT / path).exists()
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow:\n    browser:\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "LEFT_OUT", {})
    monkeypatch.setattr(module, "DESELECTED", {})
    monkeypatch.setattr(module, "THREADS", (2,))
    monkeypatch.setenv("JOBS", "0")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return module


@pytest.mark.full
def test_a_run_that_fails_is_told_and_one_that_changes_nothing_is_not_run(
    portable: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ATEN_CPU_CAPABILITY"
    monkeypatch.setattr(portable, "SETTINGS", ((name, "default"), (name, "none such")))
    monkeypatch.setattr(sys, "argv", ["portable.py"])
    assert portable.main() == 1
    second, first, failed, ended, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAILED  {name}=default, 2 threads: 1 passed, 1 failed, 1 skipped, ")
    assert "test_small.py::test_that_fails_without_vectors" in failed
    assert ended.endswith(f"pytest ended with 1; all it said: logs/{name}=default-2-threads.txt")
    assert second == f"left out {name}=none such: it changes nothing on this CPU"
    assert last == "0 of 1 runs passed"

    monkeypatch.setattr(sys, "argv", ["portable.py", "none", "such"])
    assert portable.main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"ok      {name}=none such, 2 threads: 2 passed, 0 failed, 1 skipped, ")
    assert last == "1 of 1 runs passed"


def test_the_runs_have_every_value_and_every_number_of_threads_and_no_more(portable: ModuleType) -> None:
    portable.THREADS = (1, 2)
    assert portable.together([("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("b", "5")]) == [
        ({"a": "1", "b": "4"}, 1),
        ({"a": "2", "b": "5"}, 2),
        ({"a": "3", "b": "4"}, 1),
    ]
    assert portable.together([("a", "1")]) == [({"a": "1"}, 1), ({"a": "1"}, 2)]
    assert portable.together([]) == []


def test_words_that_no_run_has_are_told(
    portable: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["portable.py", "avx1024"])
    assert portable.main() == 2
    assert "no setting has all of ['avx1024'] in its name" in capsys.readouterr().err
