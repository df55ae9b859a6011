"""`sqrtdk bench`: what is printed and written, exit codes and errors."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from pathlib import Path

import pytest

from sqrtdk import cli
from sqrtdk.bench import ways
from sqrtdk.bench.choose import chosen
from sqrtdk.bench.peers import Call, sdpa
from sqrtdk.bench.ways import WAYS, Way
from sqrtdk.bench.workloads import DTYPES, WORKLOADS, Case, Workload
from sqrtdk.errors import UnsupportedError
from tests.support.optional import jsonschema
from tests.support.program import called

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text())
SMALL = ["--workload", "tiny", "--dtype", "float32", "--pass", "forward", "--way", "eager", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", Workload(2, 2, 2, 16, 16, 8))


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("bench", *arguments)


def test_a_table_on_stdout_and_nothing_else() -> None:
    done = bench(*SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    spread = r"\d+\.\d+ \[\d+\.\d+ \.\. \d+\.\d+\]"
    assert "tiny  2 x 2 x 16 x 8, float32, forward\n" in done.stdout
    assert re.search(rf"^  sdpa +{spread} ms +1$", done.stdout, re.MULTILINE)
    assert re.search(rf"^  eager +{spread} ms +x {spread}$", done.stdout, re.MULTILINE)
    assert "2 measured, 0 not" in done.stdout


def test_one_json_document_on_stdout() -> None:
    options = "--dtype fp32 --way eager,onnxruntime --json --seed 3 --threads 1 --pass training"
    done = bench(*SMALL, *options.split())
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["options"] == {
        "workloads": ["tiny"],
        "ways": ["sdpa", "eager", "onnxruntime"],
        "dtypes": ["float32"],
        "passes": ["training"],
        "repeats": 1,
        "threads": 1,
        "seed": 3,
    }
    assert [row["way"] for row in document["not_measured"]] == ["onnxruntime"]


def test_a_file_is_written_once_and_the_table_still_shown(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    done = bench(*SMALL, "--output", path)
    assert done.returncode == 0
    assert "2 measured" in done.stdout
    assert "b.json" in done.stderr
    before = path.read_text()
    assert json.loads(before)["schema_version"] == 1
    again = bench(*SMALL, "--output", path)
    assert (again.returncode, again.stdout, path.read_text()) == (2, "", before)
    assert "exists and is not overwritten" in again.stderr
    assert bench(*SMALL, "--output", path, "--force", "--seed", "1").returncode == 0
    assert json.loads(path.read_text())["options"]["seed"] == 1


def test_a_way_that_disagrees_ends_the_run_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Way("wrong", lambda case: lambda: 1.01 * sdpa(case)(), peer=True)
    monkeypatch.setitem(ways.WAYS, "eager", wrong)
    done = bench(*SMALL, "--output", tmp_path / "b.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: eager and sdpa differ by" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_everything() -> None:
    text = bench("--list").stdout
    for name, row in (WORKLOADS | WAYS).items():
        assert re.search(rf"^  {name} +{re.escape(row.text)}$", text, re.MULTILINE)
    document = json.loads(bench("--list", "--json").stdout)
    assert list(document["workloads"]) == list(WORKLOADS)
    assert list(document["ways"]) == list(WAYS)


def test_a_run_without_a_figure_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose only figures are those that all others were to be compared with."""

    def lacking(case: Case) -> Call:
        raise UnsupportedError("no such kernel")

    monkeypatch.setitem(ways.WAYS, "eager", Way("nothing", lacking))
    for options, words in (
        (["--pass", "training", "--workload", "decode"], "0 measured, 2 not"),
        ([], "1 measured, 1 not"),
    ):
        done = bench(*SMALL, *options)
        assert (done.returncode, words in done.stdout) == (1, True), done.stdout
        as_json = bench(*SMALL, *options, "--json")
        assert as_json.returncode == 1
        assert json.loads(as_json.stdout)["not_measured"]
    assert bench(*SMALL, "--way", "sdpa").returncode == 0
    assert bench(*SMALL, "--way", "eager,auto").returncode == 0


def test_the_defaults_exist() -> None:
    for option, table in (("workload", WORKLOADS), ("way", WAYS), ("dtype", DTYPES)):
        names = inspect.signature(cli.bench).parameters[option].default.split(",")
        assert len(names) > 1
        assert list(chosen(",".join(names), table, option)) == names  # in the table's order
