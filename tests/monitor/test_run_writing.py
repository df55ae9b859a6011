"""What a watch writes, whatever its size and whatever fails: the training goes on, and each row is there once."""

from __future__ import annotations

import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.errors import InvalidValueError
from sqrtdk.monitor import alarms, folder, journal, sinks, tables
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.telling import AttentionAlarm
from sqrtdk.monitor.watch import Watch, watch
from tests.monitor.run_records import files_up_to, parts, rows, whole, writer
from tests.monitor.watched_models import Attend


class Heads(nn.Module):
    """Many small heads."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * self.gain, x, x)


def _trained(heads: int, steps: int, to: Path, **options: Any) -> Watch:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(1, heads, 3, 2)
    with watch(model, every=1, to=to, **{"on_alarm": lambda alarm: None, **options}) as health:
        for _ in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            health.step(loss)
            model.zero_grad()
    return health


def _same_rows(one: Path, other: Path) -> bool:
    left, right = read_run(one), read_run(other)
    assert left.damaged == right.damaged == ()
    same = left.heads.equals(right.heads) and left.alarms.equals(right.alarms)
    return same and left.steps.drop_columns(["time"]).equals(right.steps.drop_columns(["time"]))


@pytest.mark.parametrize("limit", [100, 50, 7])  # of a part: two samples, one, and a piece of one
def test_a_part_is_of_any_size(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(40, 5, tmp_path / "whole")
    monkeypatch.setattr(tables, "PART_ROWS", limit)
    health = _trained(40, 5, tmp_path / "pieces")
    assert not [alarm for alarm in health.alarms if alarm.name == "records"]
    assert len(parts(tmp_path / "pieces")) >= 5 * 41 / limit
    assert _same_rows(tmp_path / "pieces", tmp_path / "whole")
    assert read_run(tmp_path / "pieces", first_step=2, last_step=3).heads["step"].to_pylist() == [2] * 40 + [3] * 40


def test_bytes_of_a_part_are_limited_as_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(40, 5, tmp_path / "whole")
    monkeypatch.setattr(tables, "PART_BYTES", 5000)
    _trained(40, 5, tmp_path / "pieces")
    assert len(parts(tmp_path / "pieces")) > 10
    assert _same_rows(tmp_path / "pieces", tmp_path / "whole")


def test_pieces_of_a_step_are_merged_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_ROWS", 5)
    monkeypatch.setattr("sqrtdk.monitor.folder.SMALL_PARTS_BEFORE_MERGE", 2)
    with writer(tmp_path) as run:
        for step in range(0, 20, 2):
            run.write(*rows(range(step, step + 2)))
    assert whole(read_run(tmp_path), 19)


def test_a_step_of_which_the_end_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer was killed between two pieces of it: what is there is no step."""
    monkeypatch.setattr(tables, "PART_ROWS", 5)
    with writer(tmp_path) as run:
        run.write(*rows(range(2)))
        run.write(*rows([2]))
        assert parts(tmp_path)[-1].split(".")[2] == "steps-2-2"
        (tmp_path / "parts" / parts(tmp_path)[-1]).unlink()
    there = read_run(tmp_path)
    assert there.steps["step"].to_pylist() == [0, 1]
    assert set(there.heads["step"].to_pylist()) == {0}
    assert {damage.reason for damage in there.damaged} == {
        "it is not there",
        "the row of its step is not there, which is written last",
    }


@pytest.mark.slow
def test_8000_heads_at_every_step(tmp_path: Path) -> None:
    health = _trained(8000, 70, tmp_path / "run")
    assert not [alarm for alarm in health.alarms if alarm.name == "records"]
    run = read_run(tmp_path / "run")
    assert run.heads.num_rows == 70 * 8000
    assert run.steps["step"].to_pylist() == list(range(1, 71))
    assert run.damaged == ()


@pytest.mark.parametrize("rows", [2**17, 8], ids=["steps are smaller than a part", "steps are larger than a part"])
def test_what_waits_is_bounded_and_what_is_dropped_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(tables, "PART_ROWS", rows)
    monkeypatch.setattr(journal, "SAMPLES_A_PART", 2)
    monkeypatch.setattr(journal, "WAITING_BYTES", 40_000)  # six steps of 20 heads, or so
    kept: list[int] = []
    model, x, told = Heads(), torch.randn(1, 20, 3, 2), []
    with ExitStack() as full, Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in range(1, 41):
            if step == 6:
                full.enter_context(files_up_to(1000))
            if step == 36:
                full.close()
            model(x)
            health.step(float(step))
            assert health._journal is not None
            kept.append(sum(some.nbytes for some in health._journal._waiting))
    assert max(kept) <= 40_000
    failed, dropping, dropped = (alarm for alarm in told if alarm.name == "records")
    assert "File too large" in failed.text
    first = int(dropping.text.split("from step ")[1].split()[0])
    run = read_run(tmp_path / "run")
    there = run.steps["step"].to_pylist()
    lost = sorted(set(range(1, 41)) - set(there))
    assert len(there) == len(set(there))
    assert lost == list(range(first, lost[-1] + 1))
    assert f"steps {first} to {lost[-1]}, {len(lost)} of them sampled, are not recorded: at most" in dropped.text
    assert run.heads["step"].to_pylist() == [step for step in there for _ in range(20)]
    recorded = [row["text"] for row in run.alarms.to_pylist() if row["name"] == "records"]
    assert recorded[-1] == dropped.text  # those before may have been dropped themselves


def test_a_step_costs_the_same_however_long_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are packed for a write, by step."""
    monkeypatch.setattr(journal, "SAMPLES_A_PART", 2)
    packed, by_step = [0], []
    real = folder.encode_part

    def encode(some: Any) -> Any:
        packed[0] += len(some)
        return real(some)

    monkeypatch.setattr(folder, "encode_part", encode)
    model, x = Heads(), torch.randn(1, 20, 3, 2)
    with ExitStack() as full, Watch(model, every=1, to=tmp_path / "run", on_alarm=lambda alarm: None) as health:
        for step in range(1, 41):
            if step == 3:
                full.enter_context(files_up_to(1000))
            before = packed[0]
            model(x)
            health.step(float(step))
            by_step.append(packed[0] - before)
        full.close()
    assert max(by_step[3:]) <= 2 * 21 + 1  # the part that waits longest, whatever is behind it
    assert read_run(tmp_path / "run").steps["step"].to_pylist() == list(range(1, 41))


def test_a_folder_that_is_removed_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SAMPLES_A_PART", 2)
    model, told = Attend(), []
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in range(12):
            if step == 4:
                shutil.rmtree(tmp_path / "run")
            model(torch.randn(1, 3, 8))
            health.step(float(step))
    assert [alarm.name for alarm in told] == ["records", "records"]
    assert "is gone: the directory was moved or removed" in told[0].text
    assert told[1].text.startswith("steps ")
    assert "are not recorded: " in told[1].text


@pytest.mark.parametrize("error", [ValueError, InvalidValueError, KeyError, MemoryError])
def test_whatever_is_raised_as_records_are_written_is_an_alarm(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SAMPLES_A_PART", 2)
    real, calls = folder.encode_part, [0]

    def encode(some: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise error("out of order", **({"hint": ""} if error is InvalidValueError else {}))
        return real(some)

    monkeypatch.setattr(folder, "encode_part", encode)
    model, told = Attend(), []
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in range(10):
            model(torch.randn(1, 3, 8))
            health.step(float(step))
    (alarm,) = told
    assert (alarm.name, "out of order" in alarm.text or error.__name__ in alarm.text) == ("records", True)
    there = read_run(tmp_path / "run").steps["step"].to_pylist()
    kept = list(range(1, 11)) if error is MemoryError else [1, *range(4, 11)]  # it may pass; the others do not
    assert there == kept
    assert error is MemoryError or "steps 2 to 3, 2 of them sampled, are not recorded" in alarm.text


def _fails(*arguments: Any) -> Any:
    raise RuntimeError("out of order")


def test_whatever_is_raised_while_a_step_is_judged_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(alarms.ALARM_RULES, "growth", alarms.Rule(_fails, "attention"))
    monkeypatch.setattr(sinks, "metrics_of", _fails)
    told: list[Alarm] = []
    model = Attend()
    with Watch(model, every=1, on_alarm=told.append, sinks=[lambda step, metrics: None]) as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            health.step(1.0)
    assert [alarm.name for alarm in told] == ["growth", "sink"]
    assert all("out of order" in alarm.text for alarm in told)
    assert [len(sample.calls) for sample in health.samples] == [1, 1, 1]


class Scaler:
    """One that fails at the second sampled step."""

    asked = 0

    def get_scale(self) -> float:
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("out of order")
        return 1.0


def test_a_scaler_that_fails_and_a_loss_without_a_value_end_no_training(tmp_path: Path) -> None:
    told: list[Alarm] = []
    model = Attend()
    with Watch(model, every=1, on_alarm=told.append, scaler=Scaler(), to=tmp_path / "run") as health:
        for step in range(4):
            model(torch.randn(1, 3, 8))
            health.step(torch.empty((), device="meta") if step == 2 else float(step))
    assert [sample.step for sample in health.samples] == [1, 3, 4]
    names = [alarm.name for alarm in told]
    assert names.count("schedule") == 1
    assert "step 2 was not sampled, the loss scale could not be read: RuntimeError: out of order" in told[0].text
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4]
    assert {"schedule", "records"} <= {alarm.name for alarm in told}


def test_who_asks_for_errors_gets_them(tmp_path: Path) -> None:
    model = Attend()
    with Watch(model, every=1, to=tmp_path / "run", on_alarm="raise") as health:
        model(torch.randn(1, 3, 8))
        health.step(1.0)
        with files_up_to(100), pytest.raises(AttentionAlarm, match="File too large"):
            health.flush()


def test_a_flush_has_all_steps_that_have_ended(tmp_path: Path) -> None:
    model = Attend()
    with pytest.raises(InvalidValueError, match="inside the block"):
        Watch(model).flush()
    with Watch(model, every=2, to=tmp_path / "run") as health:
        assert health.flush()
        for step in range(1, 8):
            model(torch.randn(1, 3, 8))
            health.step(float(step))
            if step % 3 == 0:
                assert health.flush()
                assert health.flush()  # there is nothing new
                run = read_run(tmp_path / "run")
                assert run.steps["loss"].to_pylist() == [float(one) for one in range(1, step + 1)]
    assert read_run(tmp_path / "run").steps["step"].to_pylist() == list(range(1, 8))
    with Watch(Attend()) as health:
        assert health.flush()  # of a run that is not recorded


class Closing:
    """A sink that fails as it is closed."""

    def write(self, step: int, metrics: Any) -> None:
        pass

    def alarm(self, alarm: Alarm) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("out of order")


@pytest.mark.filterwarnings("ignore::sqrtdk.monitor.telling.AttentionWarning")
def test_an_alarm_after_a_flush_stands_at_its_step(tmp_path: Path) -> None:
    model = Attend()
    with Watch(model, every=2, to=tmp_path / "run", sinks=[Closing()]) as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            health.step()
        assert health.flush()
    run = read_run(tmp_path / "run")
    assert (run.damaged, run.steps["step"].to_pylist()) == ((), [1, 2, 3])
    assert list(zip(run.alarms["name"].to_pylist(), run.alarms["step"].to_pylist(), strict=True)) == [("sink", 3)]
    with Watch(model, to=tmp_path / "run"):
        pass
    assert read_run(tmp_path / "run").attempts[-1].first_step == 4


def test_samples_that_are_remembered_are_bounded_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.monitor import watch as module

    monkeypatch.setattr(module, "NUMBERS_IN_MEMORY", 3000)
    model, x = Heads(), torch.randn(1, 20, 3, 2)
    with Watch(model, every=1, on_alarm=lambda alarm: None) as health:
        for _ in range(12):
            model(x)
            health.step()
    assert 2 <= len(health.samples) <= 3000 / 20
    assert sum(sample.count for sample in health.samples) <= 3000
    assert health.samples[-1].step == 12


def test_the_first_sample_and_an_alarm_are_written_at_the_next_step(tmp_path: Path) -> None:
    """A run that is killed afterwards shows them."""
    model = Attend()
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=str) as health:
        for step in range(1, 7):
            model(torch.randn(1, 3, 8))
            health.step(math.nan if step == 4 else 1.0)
            run = read_run(tmp_path / "run")
            assert run.last_step == {1: None, 2: 1, 3: 1, 4: 1, 5: 4, 6: 4}[step]
        assert run.alarms["step"].to_pylist() == [4]
