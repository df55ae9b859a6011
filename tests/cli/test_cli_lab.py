"""`sqrtdk lab list, show, run, report`: what is printed and written, exit codes and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sqrtdk import cli
from sqrtdk.lab.register import CLAIMS

CHEAP = ["onehot-64", "softmax-example", "var-linear"]


def _lab(*arguments: object) -> Result:
    return CliRunner().invoke(cli._app, ["lab", *map(str, arguments)], prog_name="sqrtdk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick records of a few claims."""
    folder = tmp_path_factory.mktemp("lab")
    done = _lab("run", *CHEAP, "--quick", "--output", folder)
    assert done.exit_code == 0, done.output
    return folder


def test_the_help_names_every_verb() -> None:
    text = _lab("--help").stdout
    for verb in ("list", "show", "run", "report", "sweep"):
        assert re.search(rf"^ +{verb} ", text, re.MULTILINE)


def test_the_help_does_not_import_torch() -> None:
    code = "import sys\nfrom sqrtdk.cli import _app\ntry:\n _app(['lab', 'run', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert "--quick" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_list_has_every_claim(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # one line for the sources
    text = _lab("list", "--language", language).stdout
    for claim in CLAIMS.values():
        assert re.search(rf"^ +{claim.id} ", text, re.MULTILINE)
        statement = getattr(claim.statement, language)
        assert "".join(statement.split()) in "".join(text.split())  # wrapped in its column


def test_the_list_as_json() -> None:
    claims = json.loads(_lab("list", "--json").stdout)["claims"]
    assert [claim["id"] for claim in claims] == list(CLAIMS)
    assert all(claim["statement"]["zh"] and claim["parts"][0]["bars"] for claim in claims)


def test_show_tells_how_a_claim_is_measured() -> None:
    text = " ".join(_lab("show", "var-linear").stdout.split())
    claim = CLAIMS["var-linear"]
    for wanted in (
        claim.statement.en,
        claim.method.en,
        claim.control.en,
        "0.95 <= variance_over_d_k <= 1.05",
        "--quick",
    ):
        assert wanted in text
    assert json.loads(_lab("show", "var-linear", "--json").stdout)["flipped"] == dict(claim.flipped)


def test_a_run_prints_verdicts_and_writes_records_and_plots(folder: Path) -> None:
    again = _lab("run", *CHEAP, "--quick", "--output", folder)
    lines = again.stdout.splitlines()
    assert lines[0].split()[:2] == ["onehot-64", "holds"]
    assert all("kept" in line for line in lines[: len(CHEAP)])
    assert str(folder) in lines[-1]
    for name in CHEAP:
        record = json.loads((folder / f"{name}.json").read_text())
        assert record["quick"] is True
        for plot in record["plots"]:
            assert (folder / f"{name}-{plot['name']}.svg").read_text().lstrip().startswith("<?xml")
            assert (folder / f"{name}-{plot['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("var-linear-*.svg"))


def test_plots_that_a_kill_prevented_are_drawn_by_the_next_run(folder: Path) -> None:
    path = next(folder.glob("var-linear-*.svg"))
    before = path.read_bytes()
    path.unlink()
    assert _lab("run", "var-linear", "--quick", "--output", folder).exit_code == 0
    assert path.read_bytes() == before


def test_one_json_document_on_stdout(folder: Path) -> None:
    done = _lab("run", *CHEAP, "--quick", "--output", folder, "--json")
    claims = json.loads(done.stdout)["claims"]
    assert [claim["id"] for claim in claims] == CHEAP
    assert all(claim["sound"] and claim["reused"] and Path(claim["record"]).is_file() for claim in claims)


def test_records_go_to_a_directory_of_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _lab("run", "onehot-64", "--quick", "--seed", "3").exit_code == 0
    assert (tmp_path / "sqrtdk-lab" / "quick-seed3" / "onehot-64.json").is_file()


def test_the_report_is_one_page_and_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert _lab("report", folder, "--output", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{name}"' in text for name in CHEAP)
    again = _lab("report", folder, "--output", page)
    assert again.exit_code == 2
    assert "exists and is not overwritten" in again.stderr
    assert _lab("report", folder, "--output", page, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("run", "entropy-tabel"), "there is no claim 'entropy-tabel'", "entropy-table"),
        (("show", "var-liner"), "there is no claim 'var-liner'", "var-linear"),
        (("show", "\x1b[31m"), r"there is no claim '\x1b[31m'", "lab list"),
        (("run", "normal", "--output", "/proc/nowhere"), "cannot write into /proc/nowhere", "--output"),
        (("report", "/proc"), "/proc holds no records", "sqrtdk lab run"),
        (("report", "nowhere"), "nowhere holds no records", "sqrtdk lab run"),
    ],
)
def test_errors_have_a_hint_and_no_traceback(arguments: tuple[str, ...], error: str, hint: str) -> None:
    done = _lab(*arguments)
    assert done.exit_code == 2
    assert not done.stdout
    first, second = done.stderr.strip().splitlines()
    assert first.startswith("Error: ")
    assert error in first
    assert second.startswith("Hint: ")
    assert hint in second


def test_another_schema_version_is_an_error(folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "onehot-64.json").read_text())
    (tmp_path / "onehot-64.json").write_text(json.dumps(record | {"schema_version": 0}))
    for arguments in (("report", tmp_path), ("run", "onehot-64", "--quick", "--output", tmp_path)):
        done = _lab(*arguments)
        assert done.exit_code == 2
        assert "schema version 0" in done.stderr


def test_a_control_that_agrees_ends_with_exit_code_1(folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "onehot-64.json").read_text())
    record["control"]["verdict"] = record["outcome"]["verdict"]
    (tmp_path / "onehot-64.json").write_text(json.dumps(record))
    done = _lab("run", "onehot-64", "--quick", "--output", tmp_path)
    assert done.exit_code == 1
    assert "unsound" in done.stdout
