"""`sqrtdk diff`: arguments, streams, files, exit codes. What is compared is the business of `sqrtdk.compare`."""

import dataclasses
import json
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from sqrtdk.compare.records import DiffReport
from sqrtdk.errors import ModelError
from sqrtdk.models.options import LoadOptions
from tests.report.sample_diff import same, softcap, undecided
from tests.support.optional import jsonschema
from tests.support.program import called

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "diff.schema.json").read_text())


def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("diff", *arguments)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[typing.Any]:
    """The comparison stands aside: it gives the report that is put first in the list, and notes what it was told."""
    told: list[typing.Any] = []

    def diff_with(a: str, b: str, inputs: None, *options: LoadOptions, **others: typing.Any) -> DiffReport:
        one = told.pop(0)
        told.extend([a, b, inputs, *options, others])
        if isinstance(one, Exception):
            raise one
        assert isinstance(one, DiffReport)
        return dataclasses.replace(one, fail_on=others["fail_on"], command=others["command"])

    stand_in = types.ModuleType("sqrtdk.compare.diff")
    stand_in.diff_with = diff_with  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sqrtdk.compare.diff", stand_in)
    return told


@pytest.mark.parametrize(
    ("make", "fail_on", "code"),
    [
        (same, "different", 0),
        (softcap, "different", 1),
        (softcap, "never", 0),
        (undecided, "different", 0),
        (undecided, "unmeasured", 1),
    ],
)
def test_exit_codes(make: Callable[[], DiffReport], fail_on: str, code: int, compared: list[typing.Any]) -> None:
    compared.append(make())
    done = diff("demo", "demo", "--fail-on", fail_on)
    assert done.returncode == code
    assert " ".join(done.stdout.split()).endswith(f"Exit code {code} (fail-on: {fail_on}).")
    assert done.stderr == ""


def test_an_option_of_both_reaches_both_and_one_of_a_side_that_side(compared: list[typing.Any]) -> None:
    compared.append(ModelError("enough"))
    words = (
        "--attn eager --b attn=sdpa --a dtype=bf16 --device cpu --b device=meta --revision r --a revision=s --text t"
    )
    words += " --input i --batch 2 --seq-len 3 --seed 5 --trust-remote-code --map m.json --fail-on never"
    done = diff("demo", "demo:twice", *words.split())
    assert (done.returncode, "Error: enough" in done.stderr) == (2, True)
    shared = LoadOptions(
        text=Path("t"), input_file=Path("i"), batch=2, seq_len=3, seed=5, trust_remote_code=True, device="cpu",
        revision="r", attn="eager",
    )  # fmt: skip
    a, b, inputs, options_a, options_b, others = compared
    assert (a, b, inputs) == ("demo", "demo:twice", None)
    assert options_a == dataclasses.replace(shared, dtype="bf16", revision="s")
    assert options_b == dataclasses.replace(shared, attn="sdpa", device="meta", text=None, input_file=None)
    assert others["mapping"] == Path("m.json")
    assert others["fail_on"] == "never"
    assert others["command"].split()[0] == "sqrtdk"


def test_json_is_one_document_and_all_else_goes_to_stderr(compared: list[typing.Any]) -> None:
    compared.append(softcap())
    done = diff("demo", "demo", "--json")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert (document["same"], document["exit_code"], done.returncode) == (False, 1, 1)
    assert "12 pairs of attentions: 12 differ. Different." in done.stderr


def test_files_are_written_and_the_text_still_shown(tmp_path: Path, compared: list[typing.Any]) -> None:
    compared.append(softcap())
    output, html = tmp_path / "r.json", tmp_path / "r.html"
    done = diff("demo", "demo", "--json", "--output", str(output), "--html", str(html))
    assert "B leaves out the softcap (50)" in done.stdout
    assert "r.json" in done.stderr
    assert json.loads(output.read_text())["schema_version"] == 1
    assert html.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_nothing_runs_when_a_report_cannot_be_written(tmp_path: Path, option: str) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    done = diff("no/such:factory", "demo", option, str(path))  # the model would be an error of its own
    assert done.returncode == 2
    assert "exists and is not overwritten" in done.stderr
    assert path.read_text() == "mine"


def test_a_side_that_is_not_there_is_said_before_anything_runs(compared: list[typing.Any]) -> None:
    for sides in (("demo", "./no-such-dir"), ("./no-such-dir", "demo")):
        done = diff(*sides)
        assert done.returncode == 2
        assert "there is no directory './no-such-dir'" in done.stderr
    assert compared == []


# -- with the comparison itself ----------------------------------------------------------------------------------------


def test_one_model_against_itself_and_against_its_trace_file(tmp_path: Path) -> None:
    same_twice = diff("demo", "demo", "--seq-len", "16")
    assert same_twice.returncode == 0
    assert "3 same. Same. Exit code 0" in same_twice.stdout
    trace = tmp_path / "demo.safetensors"
    called("record", "demo", "--seq-len", "16", "--output", trace)
    for sides in (("demo", str(trace)), (str(trace), "demo"), (str(trace), str(trace))):
        done = diff(*sides)  # on the inputs that the file holds
        assert done.returncode == 0, done.stderr
        assert "3 pairs of attentions: 3 same." in done.stdout


@pytest.mark.full
def test_another_training_is_told_in_few_lines(tmp_path: Path) -> None:
    output, html = tmp_path / "r.json", tmp_path / "r.html"
    done = diff("demo", "demo:unscaled", "--seq-len", "16", "--output", str(output), "--html", str(html))
    assert done.returncode == 1
    assert "has other weights for q, k and v (off by " in done.stdout
    assert "leaves the scale out (1 in place of 0.125)" in " ".join(done.stdout.split())
    assert len(done.stdout.splitlines()) <= 33
    document = json.loads(output.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert {cause["name"] for cause in document["pairs"][0]["causes"]} == {"input", "weights", "scale"}
    assert document["forwards"] == [5, 2]
    assert "demo:unscaled" in html.read_text()


def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.compare import diff as comparing

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "judge_pair", interrupt)
    monkeypatch.chdir(tmp_path)
    done = diff("demo", "demo", "--seq-len", "8", "--output", "r.json")
    assert done.returncode == 130
    assert list(tmp_path.iterdir()) == []
