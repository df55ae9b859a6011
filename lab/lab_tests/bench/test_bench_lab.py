"""The record of the lab's runs: verdicts of two sizes and five seeds, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import lab, lab_figures
from sqrtdk_lab.claims.onehot_64 import CLAIM
from sqrtdk_lab.record import Record, to_json
from sqrtdk_lab.runner import run_claim


@pytest.fixture(scope="module")
def record() -> Record:
    return run_claim(CLAIM, quick=True)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., object]:
    """Call a script on a register of one claim; returns the JSON that it writes and its exit code."""
    monkeypatch.setattr(lab, "CLAIMS", {CLAIM.id: CLAIM})
    monkeypatch.setattr(lab_figures, "CLAIMS", {CLAIM.id: CLAIM})

    def run(script: object, *arguments: object) -> tuple[dict[str, object], object]:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments), "--json", str(out)])
        try:
            script.main()  # type: ignore[attr-defined]
        except SystemExit as error:
            return json.loads(out.read_text()) if out.exists() else {}, error.code
        return json.loads(out.read_text()), 0

    return run


def put(folder: Path, record: Record) -> Path:
    """Write a record as a run does."""
    folder.mkdir(parents=True)
    (folder / f"{record.id}.json").write_text(to_json(record))
    return folder


def with_answer(record: Record, answer: str) -> Record:
    verdict = replace(record.outcome.verdict, answer=answer)  # type: ignore[arg-type]
    return replace(record, outcome=replace(record.outcome, verdict=verdict))


def test_verdicts_of_all_seeds_are_recorded_and_must_agree(
    record: Record, call: Callable[..., tuple[dict[str, list[dict[str, object]]], object]], tmp_path: Path
) -> None:
    full = replace(record, quick=False)
    runs = [put(tmp_path / "quick", record), put(tmp_path / "full", full)]
    seeds = [put(tmp_path / f"quick-{seed}", replace(record, seed=seed)) for seed in range(1, 5)]
    seeds.append(put(tmp_path / "full-1", replace(full, seed=1)))
    found, code = call(lab, *runs, "--seeds", *seeds)
    (row,) = found["claims"]
    assert code == 0
    assert row["seeds"] == {"quick": dict.fromkeys("01234", "holds"), "full": dict.fromkeys("01", "holds")}
    odd = put(tmp_path / "odd", with_answer(replace(full, seed=2), "partly"))
    found, code = call(lab, *runs, "--seeds", *seeds, odd)
    assert (code, found["claims"][0]["same"]) == (1, False)
    assert call(lab, *runs)[1] == 0


def test_missing_seeds_and_runs_of_the_other_size_are_refused(
    record: Record, call: Callable[..., tuple[object, object]], tmp_path: Path
) -> None:
    quick, full = put(tmp_path / "quick", record), put(tmp_path / "full", replace(record, quick=False))
    one = put(tmp_path / "one", replace(record, seed=1))
    assert call(lab, quick, full, "--seeds", one)[1] == "no record of " + ", ".join(
        f"onehot-64 (quick, seed {seed})" for seed in (2, 3, 4)
    )
    assert call(lab, quick, quick)[1] == "of the other size: onehot-64 in full"


def test_figures_are_of_full_runs(record: Record, call: Callable[..., tuple[object, object]], tmp_path: Path) -> None:
    quick, full = put(tmp_path / "quick", record), put(tmp_path / "full", replace(record, quick=False))
    assert call(lab_figures, quick)[1] == "no sound and decided record of a full run of onehot-64"
    assert call(lab_figures, full)[1] == 0
