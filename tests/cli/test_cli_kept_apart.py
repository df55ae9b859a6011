"""Several models in one check, of which some crash, end the process or never answer: the others keep their reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.errors import check_error
from tests.support.program import Warm, called

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="one process checks all models without fork")
MODULES = {
    "deadly.py": """
import ctypes, os, signal, time
import torch
from torch import nn


def net():
    print("built", flush=True)
    return nn.MultiheadAttention(8, 2), (torch.ones(1, 3, 8),) * 3


def crashes(): ctypes.string_at(0)
def exits(): os._exit(0)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def interrupts(): os.kill(os.getpid(), signal.SIGINT)


def hangs():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        time.sleep(1)
"""
}
FAST = ("--laws", "none", "--json")


def named(*names: str) -> list[str]:
    return [f"deadly:{name}" for name in names]


def test_a_model_that_ends_the_process_costs_the_others_nothing(sqrtdk: Warm, nets: Path) -> None:
    deadly = named("crashes", "exits", "killed")
    done = sqrtdk("deadly:net", *deadly, "demo", *FAST, "--markdown", "a.md", cwd=nets, TMPDIR=str(nets))
    assert done.returncode == 2, done.stderr
    document = json.loads(done.stdout)
    assert [one["model"]["id"] for one in document["models"]] == ["deadly:net", "demo"]
    errors = {one["model"]: one["error"] for one in document["not_checked"]}
    assert list(errors) == deadly
    assert "SIGSEGV" in errors["deadly:crashes"]
    assert "exit code 0" in errors["deadly:exits"]
    assert "SIGKILL" in errors["deadly:killed"]
    assert "memory" in document["not_checked"][2]["hint"]
    assert done.stderr.count("Error: ") == 3
    assert done.stderr.count("built") == 1  # what is finished is not checked again
    assert (nets / "a.md").read_text().count("**not checked**") == 3
    assert list(nets.glob("sqrtdk-*")) == []


@pytest.mark.parametrize("how", ["interrupts", pytest.param("hangs", marks=pytest.mark.full)])
def test_an_interrupted_check_reports_what_is_finished(sqrtdk: Warm, nets: Path, how: str) -> None:
    done = sqrtdk("deadly:net", f"deadly:{how}", "demo", *FAST, cwd=nets, TMPDIR=str(nets))
    assert done.returncode == 130, done.stderr
    document = json.loads(done.stdout)
    assert [one["model"]["id"] for one in document["models"]] == ["deadly:net"]
    assert [one["error"] for one in document["not_checked"]] == ["Interrupted."] * 2
    assert document["exit_code"] == 130  # as the process
    assert "Exit code 130" in done.stderr
    assert list(nets.glob("sqrtdk-*")) == []


@pytest.mark.parametrize("verb", [["check"], ["diff", "demo"]])
def test_a_single_model_that_ends_the_process_does_not_look_fine(nets: Path, verb: list[str]) -> None:
    done = called(*verb, "deadly:exits", cwd=nets, PYTHONPATH=f"{nets}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    check_error(done, "the model's code ended the process, with exit code 0", "os._exit")


def test_a_first_baseline_of_several_says_what_it_accepts(nets: Path) -> None:
    done = called("check", "demo", "demo:unscaled", "--laws", "none", "--baseline", "b.json", "--update", cwd=nets)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("demo")]
    assert lines[0].startswith("demo  3 attentions: 3 exact.")
    assert lines[1].startswith("demo:unscaled  3 attentions: 3 unexplained. ")


def test_a_model_that_is_lost_stays_in_the_baseline_and_fails(nets: Path) -> None:
    """One model has a fault that the baseline knows, one has a new one, one can't be loaded."""
    three = ("demo", "demo:unscaled", "deadly:net")
    assert called("check", *three, "--laws", "none", "--baseline", "b.json", "--update", cwd=nets).returncode == 0
    (nets / "deadly.py").write_text("raise RuntimeError('broken')")
    again = called("check", *three, "--laws", "none", "--baseline", "b.json", "--json", cwd=nets)
    assert again.returncode == 2, again.stderr
    document = json.loads(again.stdout)
    assert [one["exit_code"] for one in document["models"]] == [0, 0]
    assert [one["model"] for one in document["not_checked"]] == ["deadly:net"]
    renewed = called("check", *three, "--laws", "none", "--baseline", "b.json", "--update", cwd=nets)
    assert renewed.returncode == 2
    assert "deadly:net" in (nets / "b.json").read_text()


@pytest.mark.parametrize("where", [["demo", "--baseline", "b.json"], ["http://127.0.0.1:9/v1"]])
def test_reasons_of_laws_are_refused_where_nothing_shows_them(tmp_path: Path, where: list[str]) -> None:
    check_error(called("check", *where, "--laws-reasons", cwd=tmp_path), "--laws-reasons")
