"""Each script in `examples/` runs as it stands, and prints what it is there to show."""

from __future__ import annotations

import contextlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sqrtdk
from tests.integrations.sinks_read import needs

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def _printed(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
    with contextlib.suppress(SystemExit):  # the exit code is among what is printed
        runpy.run_path(sys.argv[0], run_name="__main__")
    return capsys.readouterr().out


def test_a_model_of_transformers_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = _printed("check_huggingface_model.py", capsys, monkeypatch)
    assert re.findall(r"ratio (\S+)  (\w+)$", printed, re.MULTILINE) == [("1.000", "exact")] * 2
    assert "exit code 0" in printed


def test_a_port_that_passes_over_the_declared_scale_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, ignored = _printed("port_declared_scale.py", capsys, monkeypatch).split("reads the config: False")
    assert "declared, exit code 0" in followed
    assert "ratio 1.000, unexplained, exit code 1" in ignored
    assert "config.attention_multiplier" in ignored


def test_the_cause_of_a_difference_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, right = _printed("compare_port.py", capsys, monkeypatch).split("scaled twice: False")
    assert planted.count("different; causes: scale;") == 2
    assert right.count("the same; causes: none;") == 2
    assert ("exit code 1" in planted, "exit code 0" in right) == (True, True)


@pytest.mark.full
def test_a_ring_of_processes_is_one_process() -> None:
    command = [sys.executable, str(EXAMPLES / "ring_attention.py"), "--length", "64"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("32 tokens") == 2
    assert printed.endswith("equal up to rounding: True\n")


@pytest.mark.full
def test_a_clip_keeps_the_logits_in_range(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _printed("train_with_watch.py", capsys, monkeypatch)
    alone, clipped = (float(text) for text in re.findall(r"largest logit (\S+)", printed))
    assert alone > 50 > 2 * 20 > clipped  # one step adds to what a clip at 20 has left
    assert "max_logit" in printed.splitlines()[0]
    assert "max_logit" not in printed.splitlines()[1]


def test_a_new_score_is_what_its_formula_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "equal to the formula written out: True" in _printed("new_score.py", capsys, monkeypatch)


@pytest.mark.full
@pytest.mark.usefixtures("accelerate_anew")
def test_a_trainer_is_watched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _printed("watch_trainer.py", capsys, monkeypatch)
    assert re.findall(r"^step (\d+): 2 attentions", printed, re.MULTILINE) == ["1", "2", "4", "6", "8"]


@pytest.mark.filterwarnings("default")  # Lightning warns of workers
def test_a_task_of_lightning_is_watched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needs("lightning.pytorch")
    printed = _printed("watch_lightning.py", capsys, monkeypatch)
    assert re.findall(r"^step (\d+): loss", printed, re.MULTILINE) == ["1", "2", "4", "6", "8"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "package", "cause"),
    [("paddle_record.py", "paddle", "scale"), ("mindspore_record.py", "mindspore", "mask_offset")],
)
def test_a_recording_of_another_framework_is_compared(
    name: str, package: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(package)
    file = str(tmp_path / "run.safetensors")
    for mistakes, named in (((), set()), (("mistake",), {cause})):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), file, *mistakes])
        module = runpy.run_path(sys.argv[0], run_name="__main__")
        model, inputs = module["make"]()
        report = sqrtdk.diff(model, file, inputs)
        assert {one.name for pair in report.pairs for one in pair.causes} == named
        assert (report.same is not False) == (not named)


def test_every_script_is_listed_and_has_a_test() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    assert len(SCRIPTS) >= 9
    for script in SCRIPTS:
        assert f"]({script.name})" in listed, script.name
        assert f'"{script.name}"' in tests, script.name
