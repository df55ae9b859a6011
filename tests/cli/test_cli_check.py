"""`sqrtdk check`: what is printed and written, exit codes, and what arrives of the options."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from sqrtdk._check import check as audit
from sqrtdk.errors import ModelError
from sqrtdk.models.options import LoadOptions
from tests.cli.errors import check_error
from tests.hf.families import FAMILIES
from tests.support.optional import jsonschema
from tests.support.program import Warm, called, terminal

SMALL = ("--seq-len", "8")
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "check.schema.json").read_text())
MODULES = {
    "apart.py": (
        "import torch\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "class Apart(torch.nn.MultiheadAttention):\n"
        "    def forward(self, x):\n"
        "        with ThreadPoolExecutor(1) as pool:\n"
        "            return pool.submit(super().forward, x, x, x).result()\n"
        "def make():\n    return Apart(8, 2), torch.ones(1, 3, 8)\n"
    ),
    "chatty.py": (
        "import torch\nprint('imported')\n"
        "def make():\n    print('made')\n"
        "    return torch.nn.MultiheadAttention(8, 2), (torch.ones(1, 3, 8),) * 3\n"
    ),
}


def check(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return called("check", *arguments, *SMALL, cwd=cwd)


def test_the_demo_is_healthy() -> None:
    done = check("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert "softmax(0.125 * rope(q).rope(k) + causal)" in done.stdout
    assert done.stdout.startswith("demo  ")


@pytest.mark.parametrize(("fail_on", "code"), [("note", 1), ("fail", 1), ("critical", 0), ("never", 0)])
def test_fail_on_sets_the_bar(fail_on: str, code: int) -> None:
    done = check("demo:unscaled", "--static", "--fail-on", fail_on)
    assert done.returncode == code
    assert "unexplained: missing" in done.stdout
    assert f"Exit code {code} (fail-on: {fail_on})" in done.stdout


def test_every_option_of_loading_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = LoadOptions(
        static=True, attn="both", text=Path("t"), input_file=Path("i"), batch=2, seq_len=3, device="meta", dtype="bf16",
        seed=5, revision="r", trust_remote_code=True, device_map="auto", offload_folder=Path("o"),
        base=Path("b"),
    )  # fmt: skip
    options = dataclasses.asdict(expected)
    assert all(options[field.name] != field.default for field in dataclasses.fields(LoadOptions))
    arrived = []

    def stop(model: str, inputs: None, options: LoadOptions, **others: str) -> None:
        arrived.append(options)
        raise ModelError("enough")

    for place in ("sqrtdk.kv.request", "sqrtdk._check"):  # of the command, which imports it, and of the function
        monkeypatch.setattr(f"{place}.check_with", stop)
    words: list[str] = []
    for name, value in options.items():
        flag = "--input" if name == "input_file" else "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    assert called("check", "demo", *words).returncode == 2
    with pytest.raises(ModelError, match="enough"):
        audit("demo", **options)
    assert arrived == [expected, expected]


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_json_is_one_document_and_all_else_goes_to_stderr(mode: str) -> None:
    """Formulas alone have no figures, and the same verdict."""
    done = check("demo:unscaled", "--json", "--seed", "3", *(["--static"] if mode == "static" else []))
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert (document["mode"], document["seed"], document["exit_code"], done.returncode) == (mode, 3, 1, 1)
    assert {call["mistake"] for call in document["calls"]} == {"missing"}
    assert {call["stats"] is None for call in document["calls"]} == {mode == "static"}
    assert "3 attention calls: 3 unexplained." in done.stderr


def test_files_are_written_once_and_the_text_still_shown(tmp_path: Path) -> None:
    arguments = ("demo", "--output", "r.json", "--html", "r.html")
    done = check(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert "3 attention calls: 3 exact." in done.stdout
    assert "JSON report: r.json" in done.stderr
    assert "HTML report: r.html" in done.stderr
    before = {name: (tmp_path / name).read_text(encoding="utf-8") for name in ("r.json", "r.html")}
    assert json.loads(before["r.json"])["model"]["id"] == "demo"
    assert before["r.html"].startswith("<!doctype html>")
    for option, name in (("--output", "r.json"), ("--html", "r.html")):  # before the model, an error of its own
        check_error(check("no/such:factory", option, name, cwd=tmp_path), "exists and is not overwritten")
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in before} == before
    assert check("demo:unscaled", *arguments[1:], "--force", cwd=tmp_path).returncode == 1
    assert "missing" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "r.json").read_text())["model"]["id"] == "demo:unscaled"
    assert sorted(os.listdir(tmp_path)) == ["r.html", "r.json"]


def test_a_model_that_computes_in_another_thread_is_told_of_threads(nets: Path) -> None:
    check_error(called("check", "apart:make", cwd=nets), "", "other threads are not seen")


def test_what_was_made_up_is_shown(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    text = called("check", tmp_path / "config.json", "--seq-len", "5000").stdout
    for wanted in ("weights: they are random", "seq_len 5000 was cut to 128", "the ids are random"):
        assert wanted in text


def test_the_traceback_is_there_on_request() -> None:
    assert "Traceback" in called("check", "demo:nope", "--traceback").stderr
    assert "Traceback" in called("check", "demo:nope", SQRTDK_TRACEBACK="1").stderr


def test_what_a_factory_prints_does_not_break_the_document(nets: Path) -> None:
    done = called("check", "chatty:make", "--json", cwd=nets)
    assert json.loads(done.stdout)["command"] == "sqrtdk check chatty:make --json"
    assert {"imported", "made"} <= set(done.stderr.splitlines())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("variables", "expected"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_only(sqrtdk: Warm, variables: dict[str, str], expected: bool) -> None:
    with terminal() as (name, shown):
        done = sqrtdk("demo", *SMALL, stdout=name, **{"TERM": "xterm"} | variables)
    assert done.returncode == 0
    assert ("\x1b[" in shown()) is expected
    assert "blocks.0-2.attention" in shown()
