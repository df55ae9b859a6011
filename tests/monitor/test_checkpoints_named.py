"""Which checkpoints are meant, what a Trainer notes beside them, and where the records may lie."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import sqrtdk
from sqrtdk.errors import InvalidValueError, ModelError, OutputError
from sqrtdk.models.options import LoadOptions
from sqrtdk.monitor.checkpoints import measure_checkpoints
from sqrtdk.monitor.checkpoints._find import loss_at
from sqrtdk.monitor.reading import read_run
from tests.monitor.saved_runs import HEADS, LAYERS, measure, rows


def _state(path: Path, text: str) -> None:
    path.mkdir(exist_ok=True)
    (path / "trainer_state.json").write_text(text)


@pytest.mark.parametrize(
    ("history", "loss"),
    [
        ('[{"step": 5, "loss": 2.5}, {"step": 9, "loss": 1.0}, {"step": 7, "loss": 2}]', 2.0),
        ('[{"step": 5, "loss": NaN}]', math.nan),
        ('[{"step": 5, "loss": -Infinity}]', -math.inf),
        ('[{"step": "5", "loss": 1.0}, {"step": true, "loss": 1}, {"loss": 1.0}, 3, {"step": 2, "loss": "1"}]', None),
        ('[{"step": 1, "loss": true}, {"step": 1, "loss": 1' + "0" * 4000 + "}]", None),
        ("[]", None),
    ],
)
def test_the_loss_is_the_last_that_was_logged(history: str, loss: float | None, tmp_path: Path) -> None:
    _state(tmp_path, f'{{"log_history": {history}}}')
    found, wrong = loss_at(tmp_path, 8)
    assert wrong == ""
    assert (found == loss) or (found is not None and loss is not None and math.isnan(found) and math.isnan(loss))


@pytest.mark.parametrize("text", ["{", "[]", '{"log_history": {}}', "[" * 10**5, '{"a": ' + "1" * 5000 + "}"])
def test_a_state_that_is_none_costs_the_loss_alone(text: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoint-5", tmp_path / "checkpoint-5")
    _state(tmp_path / "checkpoint-5", text)
    loss, wrong = loss_at(tmp_path / "checkpoint-5", 5)
    assert loss is None
    assert "trainer_state.json" in wrong
    if text == "{":
        measure(tmp_path, tmp_path / "run")
        found = rows(tmp_path / "run")
        assert [row["severity"] for row in found["alarms"] if row["name"] == "checkpoint"] == ["note"]
        assert len(found["heads"]) == LAYERS * HEADS


def test_a_loss_that_is_nan_stays_nan_and_is_written_once(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoint-5", tmp_path / "checkpoint-5")
    _state(tmp_path / "checkpoint-5", '{"log_history": [{"step": 5, "loss": NaN}]}')
    for _ in range(2):
        measure(tmp_path, tmp_path / "run")
        assert math.isnan(rows(tmp_path / "run")["steps"][0]["loss"])
    assert len(read_run(tmp_path / "run").attempts) == 1


def test_the_order_is_that_of_numbers_and_a_link_is_no_second_checkpoint(tmp_path: Path) -> None:
    from sqrtdk.monitor.checkpoints._find import find_checkpoints

    for name in ("checkpoint-1000", "checkpoint-200", "checkpoint-3"):
        (tmp_path / name).mkdir()
    _state(tmp_path / "final", '{"global_step": 1200}')
    (tmp_path / "best").symlink_to("checkpoint-200")
    (tmp_path / "notes.txt").write_text("")
    found, left_out = find_checkpoints([tmp_path / "*", f"{tmp_path}/checkpoint-3"])
    assert [one.step for one in found] == [3, 200, 1000, 1200]
    assert found[1].path.name == "checkpoint-200"
    assert left_out == (tmp_path / "notes.txt",)


def _twice(path: Path) -> str:
    for name in ("checkpoint-7", "saved-007"):
        (path / name).mkdir()
    return "*"


def _no_step(path: Path) -> str:
    (path / "checkpoint-best").mkdir()
    return "*"


def _a_file(path: Path) -> str:
    (path / "checkpoint-7").write_text("")
    return "checkpoint-*"


def _a_run(path: Path) -> str:
    (path / "exp1" / "checkpoint-7").mkdir(parents=True)
    (path / "exp1" / "checkpoint-7" / "config.json").write_text("{}")
    return "exp1"


def test_records_beside_the_checkpoints_are_none_of_them(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "exp"
    shutil.copytree(saved / "checkpoint-5", directory / "checkpoint-5")
    for reused in (0, 1):
        done = measure_checkpoints([f"{directory}/*"], directory / "run")
        assert (done.reused, done.failed) == (reused, ())
    with pytest.raises(InvalidValueError, match="no checkpoint matches"):
        measure_checkpoints([directory / "run"], directory / "run")


@pytest.mark.parametrize(
    ("prepare", "error", "hint"),
    [
        (lambda path: "checkpoint-*", "no checkpoint matches .*, and nothing is there", "checkpoint-*"),
        (_a_file, "which is no directory", "checkpoint-*"),
        (_twice, "two checkpoints of step 7 in .*: 'checkpoint-7' and 'saved-007'", "Leave one"),
        (_no_step, "'.*checkpoint-best' has no step", "NAME-STEP"),
        (_a_run, "'.*exp1' is no checkpoint, and holds checkpoints", "exp1/checkpoint-"),
    ],
)
def test_what_is_named_wrongly(prepare: Callable[[Path], str], error: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    pattern = tmp_path / "there" / prepare(tmp_path / "there")
    with pytest.raises(InvalidValueError, match=error) as raised:
        measure_checkpoints([pattern], tmp_path / "run")
    assert hint in raised.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "more", "kind", "error"),
    [
        (LoadOptions(), {"rows": 1}, InvalidValueError, "rows is a whole number from 2 on"),
        (LoadOptions(), {"engine": "rai"}, InvalidValueError, "an engine is one of"),
        (LoadOptions(seq_len=0), {}, InvalidValueError, "at least 1"),
        (LoadOptions(attn="both"), {}, InvalidValueError, "attn is 'both'"),
        (LoadOptions(static=True), {}, InvalidValueError, "static is not for checkpoints"),
        (LoadOptions(dtype="int8"), {}, ModelError, "no dtype 'int8'"),
        (LoadOptions(text="nowhere"), {}, ModelError, "can't read"),
    ],
)
def test_wrong_options_are_told_at_once(
    options: LoadOptions, more: dict[str, Any], kind: type[Exception], error: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=error):
        measure(saved, tmp_path / "run", options, **more)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_refused_before_anything_is_measured(saved: Path, tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    with sqrtdk.watch(layer, every=1, to=tmp_path / "watched", on_alarm=lambda alarm: None) as watch:
        layer(torch.randn(1, 3, 8))
        watch.step()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    before = rows(tmp_path / "watched")
    for output, error in (
        ("watched", "a run that was watched while it trained"),
        ("other", "is not empty: 'mine.txt'"),
    ):
        with pytest.raises(OutputError, match=error):
            measure(saved, tmp_path / output, anew=True)
        assert not (tmp_path / output / "checkpoints").exists()
    assert rows(tmp_path / "watched") == before


def test_no_model_is_left_in_memory(saved: Path, tmp_path: Path) -> None:
    def alive() -> int:
        return sum(type(thing) is GPT2LMHeadModel for thing in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        measure_checkpoints(
            [saved / f"checkpoint-{step}" for step in (5, 10)], tmp_path / "run", LoadOptions(seq_len=8)
        )
        assert alive() == before
    finally:
        gc.enable()


def test_another_process_that_writes_there_is_refused(saved: Path, tmp_path: Path) -> None:
    from sqrtdk.store.lock import locked

    with locked(tmp_path / "run" / "checkpoints"), pytest.raises(OutputError, match="another writer has"):
        measure(saved, tmp_path / "run")
