"""`sqrtdk check` on the embedded model: streams, files, exit codes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from sqrtdk import cli
from sqrtdk.audit.check import check as audit
from sqrtdk.audit.records import FAIL_ON
from sqrtdk.cli.check import FailOn
from sqrtdk.errors import ModelError
from sqrtdk.models.options import LoadOptions
from tests.hf.families import FAMILIES
from tests.support.program import Warm, environment

SMALL = ["--seq-len", "16"]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())


def check(*arguments: str):  # type: ignore[no-untyped-def]
    """Run the verb in this process, streams apart."""
    return CliRunner().invoke(cli._app, ["check", *arguments])


def test_the_default_model_is_the_healthy_demo() -> None:
    done = check(*SMALL)
    assert done.exit_code == 0
    assert "softmax(0.125 * rope(q).rope(k) + causal)" in done.stdout
    assert done.stdout.startswith("demo  ")
    assert done.stderr == ""


def test_a_finding_gives_exit_code_1() -> None:
    done = check("demo:unscaled", *SMALL)
    assert done.exit_code == 1
    assert "unexplained: missing" in done.stdout


@pytest.mark.parametrize(("fail_on", "code"), [("note", 1), ("fail", 1), ("critical", 0), ("never", 0)])
def test_fail_on_sets_the_bar(fail_on: str, code: int) -> None:
    done = check("demo:unscaled", *SMALL, "--fail-on", fail_on, "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["exit_code"] == code


def test_the_bars_are_those_of_the_audit() -> None:
    assert typing.get_args(FailOn) == FAIL_ON


def test_every_option_of_loading_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LoadOptions(
        static=True, attn="both", text=Path("t"), input_file=Path("i"), batch=2, seq_len=3, device="meta", dtype="bf16",
        seed=5, revision="r", trust_remote_code=True, device_map="auto", offload_folder=Path("o"),
    )  # fmt: skip
    options = dataclasses.asdict(expected)
    assert all(options[field.name] != field.default for field in dataclasses.fields(LoadOptions))
    arrived = []

    def stop(model: str, inputs: None, options: LoadOptions, **others: str) -> None:
        arrived.append(options)
        raise ModelError("enough")

    for place in ("sqrtdk.audit.check", "sqrtdk.kv.request"):  # of the function, and of the command
        monkeypatch.setattr(f"{place}.check_with", stop)
    words: list[str] = []
    for name, value in options.items():
        flag = "--input" if name == "input_file" else "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    assert check("demo", *words).exit_code == 2
    with pytest.raises(ModelError, match="enough"):
        audit("demo", **options)
    assert arrived == [expected, expected]


def test_json_is_one_document_and_all_else_goes_to_stderr() -> None:
    done = check("demo:unscaled", *SMALL, "--json", "--seed", "3")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert document["seed"] == 3
    assert {call["mistake"] for call in document["calls"]} == {"missing"}
    assert "3 attention calls: 3 unexplained." in done.stderr


def test_static_has_no_figures_and_the_same_verdict() -> None:
    done = check("demo:unscaled", "--static", *SMALL, "--json")
    document = json.loads(done.stdout)
    assert document["mode"] == "static"
    assert [call["stats"] for call in document["calls"]] == [None, None, None]
    assert done.exit_code == 1


def test_files_are_written_and_the_text_still_shown(tmp_path: Path) -> None:
    output, html = tmp_path / "r.json", tmp_path / "r.html"
    done = check("demo", *SMALL, "--output", str(output), "--html", str(html))
    assert done.exit_code == 0
    assert "3 attention calls: 3 exact." in done.stdout
    assert "r.json" in done.stderr
    assert "r.html" in done.stderr
    assert json.loads(output.read_text())["model"]["id"] == "demo"
    assert html.read_text().startswith("<!doctype html>")
    assert sorted(os.listdir(tmp_path)) == ["r.html", "r.json"]


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_nothing_runs_when_a_report_cannot_be_written(tmp_path: Path, option: str) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    done = check("no/such:factory", option, str(path))  # the model would be an error of its own
    assert done.exit_code == 2
    assert "exists and is not overwritten" in done.stderr
    assert "Hint: " in done.stderr
    assert path.read_text() == "mine"


def test_force_replaces_a_report(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    assert check("demo", *SMALL, "--html", str(path), "--force").exit_code == 0
    assert path.read_text() != "old"


def test_one_file_cannot_hold_two_reports(tmp_path: Path) -> None:
    done = check("--output", str(tmp_path / "x"), "--html", str(tmp_path / "x"))
    assert done.exit_code == 2
    assert "two reports" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["demo:nope"], ["demo", "--text", "/no/such/file"], ["no_such_module_x:factory"], ["/no/such/directory"]],
)
def test_known_errors_have_a_hint_and_no_traceback(arguments: list[str]) -> None:
    done = check(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert "\nHint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_computes_in_another_thread_is_told_of_threads(sqrtdk: Warm, tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(
        "import torch\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "class Apart(torch.nn.MultiheadAttention):\n"
        "    def forward(self, x):\n"
        "        with ThreadPoolExecutor(1) as pool:\n"
        "            return pool.submit(super().forward, x, x, x).result()\n"
        "def make():\n    return Apart(8, 2), torch.ones(1, 3, 8)\n"
    )
    done = sqrtdk("apart:make", cwd=tmp_path)
    assert done.returncode == 2
    assert "other threads are not seen" in done.stderr


def test_what_was_made_up_is_shown(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    text = check(str(tmp_path / "config.json"), "--seq-len", "5000").stdout
    for wanted in ("weights: they are random", "seq_len 5000 was cut to 128", "the ids are random"):
        assert wanted in text


def test_the_traceback_is_there_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in check("demo:nope", "--traceback").stderr
    monkeypatch.setenv("SQRTDK_TRACEBACK", "1")
    assert "Traceback" in check("demo:nope").stderr


def test_what_a_factory_prints_does_not_break_the_document(sqrtdk: Warm, tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import torch\nprint('imported')\n"
        "def make():\n    print('made')\n"
        "    return torch.nn.MultiheadAttention(8, 2), (torch.ones(1, 3, 8),) * 3\n"
    )
    done = sqrtdk("chatty:make", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["command"] == "sqrtdk check chatty:make --json"
    assert "imported" in done.stderr
    assert "made" in done.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sqrtdk", "check", "demo:unscaled", *SMALL, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(120) == 1
    assert "Error" not in complaint
    assert "Broken" not in complaint


def test_ctrl_c_exits_130(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen('started', 'w').close()\ndef make():\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "sqrtdk", "check", "slow:make"]

    def take_interrupts() -> None:  # a job in the background of a shell ignores them
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=take_interrupts
    ) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        complaint = process.stderr.read()
        assert process.wait(60) == 130
    assert complaint == "Interrupted.\n"


def test_an_output_that_takes_ascii_only_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "accent.py").write_text(
        "import torch\nclass Modèle(torch.nn.MultiheadAttention):\n    pass\n"
        "def make():\n    return Modèle(8, 2), (torch.ones(1, 3, 8),) * 3\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "sqrtdk", "check", "accent:make"]
    ascii_only = environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=ascii_only
    )
    assert "Error" not in done.stderr
    assert "Mod\\xe8le" in done.stdout


@pytest.mark.parametrize(("variables", "expected"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_only(sqrtdk: Warm, variables: dict[str, str], expected: bool) -> None:
    pty = pytest.importorskip("pty")
    primary, secondary = pty.openpty()
    try:
        done = sqrtdk(*SMALL, stdout=os.ttyname(secondary), **{"TERM": "xterm"} | variables)
        text = os.read(primary, 65536).decode()
    finally:
        os.close(primary)
        os.close(secondary)
    assert done.returncode == 0
    assert ("\x1b[" in text) is expected
    assert "blocks.0-2.attention" in text
