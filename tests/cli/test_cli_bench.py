"""`sqrtdk bench`: what is printed and written, exit codes and errors."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from sqrtdk import cli
from sqrtdk.bench import ways
from sqrtdk.bench.choose import chosen
from sqrtdk.bench.peers import Call, sdpa
from sqrtdk.bench.ways import WAYS, Way
from sqrtdk.bench.workloads import DTYPES, WORKLOADS, Case
from sqrtdk.errors import UnsupportedError
from tests.cli.errors import check_error

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text())
SMALL = ["--workload", "training", "--dtype", "float32", "--pass", "forward", "--way", "eager", "--repeats", "1"]


def bench(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli._app, ["bench", *map(str, arguments)], prog_name="sqrtdk")


def test_a_table_on_stdout_and_nothing_else() -> None:
    done = bench(*SMALL)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    spread = r"\d+\.\d+ \[\d+\.\d+ \.\. \d+\.\d+\]"
    assert "training  4 x 12 x 512 x 64, float32, forward\n" in done.stdout
    assert re.search(rf"^  sdpa +{spread} ms +1$", done.stdout, re.MULTILINE)
    assert re.search(rf"^  eager +{spread} ms +x {spread}$", done.stdout, re.MULTILINE)
    assert "2 measured, 0 not" in done.stdout


def test_one_json_document_on_stdout() -> None:
    done = bench(
        *SMALL,
        "--dtype",
        "fp32",
        "--way",
        "eager,onnxruntime",
        "--json",
        "--seed",
        "3",
        "--threads",
        "1",
        "--pass",
        "training",
    )
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["options"] == {
        "workloads": ["training"],
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
    assert done.exit_code == 0
    assert "2 measured" in done.stdout
    assert "b.json" in done.stderr
    before = path.read_text()
    assert json.loads(before)["schema_version"] == 1
    again = bench(*SMALL, "--output", path)
    assert (again.exit_code, again.stdout, path.read_text()) == (2, "", before)
    assert "exists and is not overwritten" in again.stderr
    assert bench(*SMALL, "--output", path, "--force", "--seed", "1").exit_code == 0
    assert json.loads(path.read_text())["options"]["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--workload", "trainin"], "there is no workload 'trainin'", "training"),
        (["--workload", ""], "there is no workload ''", "training, long-64"),
        (["--way", "flx,cpu"], "there is no way 'flx'", "flex"),
        (["--way", "\x1b[31m"], r"there is no way '\x1b[31m'", "sdpa"),
        (["--dtype", "float64"], "there is no dtype 'float64'", "float"),
        (["--repeats", "0"], "repeats is 1 or more; got 0", "5"),
        (["--threads", "100000"], "the CPUs here; got 100000", "Leave it out"),
        (["--seed", str(2**64)], "seed 18446744073709551616", "smaller"),
        (["--output", "/no/such/directory/b.json"], "there is no directory", "Create"),
    ],
)
def test_errors_have_a_hint_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_error(bench("--output", "b.json", *arguments), error, hint)
    assert list(tmp_path.iterdir()) == []


def test_a_way_that_disagrees_ends_the_run_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Way("wrong", lambda case: lambda: 1.01 * sdpa(case)(), peer=True)
    monkeypatch.setitem(ways.WAYS, "eager", wrong)
    done = bench(*SMALL, "--output", tmp_path / "b.json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Error: eager and sdpa differ by" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [["--pass", "backward"], ["--seed", "x"], ["--no-such"], ["cpu"]])
def test_usage_errors(wrong: list[str]) -> None:
    done = bench(*wrong)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_the_list_names_everything() -> None:
    text = bench("--list").stdout
    for name, row in (WORKLOADS | WAYS).items():
        assert re.search(rf"^  {name} +{re.escape(row.text)}$", text, re.MULTILINE)
    document = json.loads(bench("--list", "--json").stdout)
    assert list(document["workloads"]) == list(WORKLOADS)
    assert list(document["ways"]) == list(WAYS)


def test_the_help_needs_no_torch_and_its_defaults_exist() -> None:
    code = (
        "import sys\nsys.argv = ['sqrtdk', 'bench', '--help']\nfrom sqrtdk.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('torch', 'rich', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "[]"
    assert "--workload" in done.stdout
    for option, table in (("workload", WORKLOADS), ("way", WAYS), ("dtype", DTYPES)):
        names = inspect.signature(cli.bench).parameters[option].default.split(",")
        assert len(names) > 1
        assert list(chosen(",".join(names), table, option)) == names  # in the table's order


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "sqrtdk", "bench", *SMALL, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(120) == 0
    assert "Error" not in complaint
    assert "Broken" not in complaint


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
        assert (done.exit_code, words in done.stdout) == (1, True), done.stdout
        as_json = bench(*SMALL, *options, "--json")
        assert as_json.exit_code == 1
        assert json.loads(as_json.stdout)["not_measured"]
    assert bench(*SMALL, "--way", "sdpa").exit_code == 0
    assert bench(*SMALL, "--way", "eager,auto").exit_code == 0
