"""`sqrtdk check` on several ranks: one document, one exit code, and one error where a rank raises, ends or is late."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest

from tests.monitor.ranks_at_work import run
from tests.ranks import meetings

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def check(factory: str, *options: str, size: int = 2) -> list[Ended]:
    """What each rank printed, started as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sqrtdk", "check", f"tests.ranks.split_models:{factory}", "--laws", "none"]
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [*command, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        ended.append(Ended(process.returncode, out, err))
    return ended


def test_one_document_for_all_ranks(tmp_path: Path) -> None:
    first, second = check("factory", "--json", "--html", str(tmp_path / "report.html"))
    document = json.loads(first.out)
    jsonschema.validate(document, json.loads((ROOT / "docs/check.schema.json").read_text()))
    assert second.out == ""
    assert (first.code, second.code) == (0, 0)
    assert document["ranks"]["count"] == 2
    assert document["ranks"]["attentions"][0] == {
        "site": "layers.0", "index": 0, "ranks": [0, 1], "ways": ["rows"], "order": "plain",
    }  # fmt: skip
    assert [call["query_len"] for call in document["calls"]] == [16, 16]
    assert (tmp_path / "report.html").exists()


def test_a_finding_gives_every_rank_the_same_exit_code() -> None:
    first, second = check("faulty")
    assert (first.code, second.code) == (1, 1)
    assert "8 keys after their own" in first.out
    assert "fix: compare global places" in first.out  # is_causal=True is what such a ring passes
    assert second.out == ""


def test_an_error_of_one_rank_is_that_of_all() -> None:
    first, second = check("raising")
    assert (first.code, second.code) == (2, 2)
    for rank in (first, second):
        assert rank.out == ""
        assert "rank 1 of 2: calling 'tests.ranks.split_models:raising' raised ValueError: no such weights" in rank.err


def test_a_rank_that_ends_stops_the_others() -> None:
    first, second = check("leaving")
    assert (first.code, second.code) == (2, 2)
    assert "the model's code ended the process" in first.err + second.err
    assert "Traceback" not in first.err


def test_a_file_that_can_not_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("mine")
    ends = check("factory", "--output", str(tmp_path / "report.json"))
    assert [end.code for end in ends] == [2, 2]
    assert (tmp_path / "report.json").read_text() == "mine"


def test_ranks_meet_or_say_who_did_not(tmp_path: Path) -> None:
    run(meetings.work, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["gathered"] == second["gathered"] == [0, 10]
    assert first["said"] == second["said"] == "rank 0"
    assert first["raised"] == second["raised"] == "rank 1 of 2: ValueError: no such weights"
    assert first["stuck"] == second["stuck"] == "rank 1 of 2: ValueError: not in time"
    assert first["after"] == second["after"] == [1, 1]
    assert first["late"] == second["late"] == "rank 1 did not arrive within 2 s"
    assert first["unlike"] == second["unlike"] == "all ranks check the same seed; got 0 on rank 0, 1 on rank 1"
