"""What fails while a model is watched, or is asked wrongly: one clear error or alarm, and the training goes on."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, OutputError
from sqrtdk.monitor import forwards, journal, sums
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.monitor.sums import HeadSums
from sqrtdk.monitor.telling import AttentionAlarm, AttentionWarning
from sqrtdk.monitor.watch import Watch, watch
from sqrtdk.tracing.trace import Trace
from tests.monitor.run_records import files_up_to
from tests.monitor.watched_models import (
    Attend,
    alarming,
    called,
    module_state,
    one_step,
)


class Boom(RuntimeError):
    pass


class Failing(Attend):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.fails:
            raise Boom
        return result


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_nothing_is_left_when_the_loop_raises(error: type[BaseException]) -> None:
    model = Attend()
    state = module_state(model)

    def work() -> None:
        model(torch.randn(1, 3, 8))
        raise error

    with pytest.raises(error):
        one_step(Watch(model), work)
    assert module_state(model) == state
    with Watch(model):  # it is not watched any more
        pass


def test_a_forward_that_raises_is_followed_by_others() -> None:
    model = Failing()
    with Watch(model, every=1) as health:
        model.fails = True
        with pytest.raises(Boom):
            model(torch.randn(1, 3, 8))
        model.fails = False
        model(torch.randn(1, 5, 8))
        health.step()
    (call,) = health.samples[0].calls
    assert call.columns["rows"] == [8.0, 8.0]  # what ran before the error counts


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_a_trace_that_fails_ends_no_training(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Trace.__exit__

    def fail(self: Trace, *args: Any) -> None:
        if method == "__exit__":
            ended(self, None, None, None)
        raise Boom("out of order")

    monkeypatch.setattr(Trace, method, fail)
    model = Attend()
    with pytest.warns(AttentionWarning, match=r"at step 1 \(not measured: the trace did not .*out of order"):
        health = called(model, 2, every=1)  # the second step is not warned of again
    assert [sample.how.startswith("not measured: the trace did not") for sample in health.samples] == [True, True]
    assert [alarm.name for alarm in health.alarms] == ["lost", "unmeasured"]


def test_sums_that_fail_end_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sums: list[HeadSums]) -> None:
        raise Boom("no memory")

    monkeypatch.setattr(sums, "head_statistics", fail)
    model = Attend()
    with pytest.warns(AttentionWarning, match="no memory"):
        health = called(model)
    assert health.samples[0].calls == ()


def test_a_gradient_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise Boom("no memory")

    monkeypatch.setattr(forwards.Gradients, "_measure", fail)
    model = Attend()
    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8)).sum().backward()
        health.step()
    assert "a gradient of q or k: Boom: no memory" in health.samples[0].not_measured
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rows": 1}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"rows": True}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"rows": 8.0}, InvalidValueError, "rows is a whole number from 2 on"),
        ({"every": 0}, InvalidValueError, "whole number from 1 on"),
        ({"every": "often"}, InvalidTypeError, "a number of steps, a schedule, or a function"),
        ({"on_alarm": "shout"}, InvalidValueError, 'on_alarm is "warn", "raise" or a function'),
        ({"on_alarm": None}, InvalidValueError, 'on_alarm is "warn", "raise" or a function'),
        ({"first_step": 0}, InvalidValueError, "first_step is a whole number from 1 on"),
        ({"first_step": False}, InvalidValueError, "first_step is a whole number from 1 on"),
        ({"scaler": 1024.0}, InvalidTypeError, "scaler is a torch.amp.GradScaler"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        watch(Attend(), **options)


def test_what_is_no_model() -> None:
    with pytest.raises(InvalidTypeError, match=r"takes an nn\.Module, got function"):
        watch(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "error"), [(torch.zeros(2), InvalidValueError), ("1.5e", InvalidTypeError), ([1.0], InvalidTypeError)]
)
def test_a_loss_that_is_no_number(loss: Any, error: type[Exception]) -> None:
    with Watch(model := Attend()) as health:
        model(torch.randn(1, 3, 8))
        with pytest.raises(error, match="a loss is"):
            health.step(loss)
        health.step(torch.ones(1, 1))
    assert [(sample.step, sample.loss) for sample in health.samples] == [(1, 1.0)]


def test_a_loss_that_is_overwritten_later_is_the_one_of_its_step(tmp_path: Path) -> None:
    model, loss = Attend(), torch.tensor(2.0)
    with Watch(model, to=tmp_path / "run") as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            health.step(loss)
            loss += 1.0
    assert read_run(tmp_path / "run").steps["loss"].to_pylist() == [2.0, 3.0, 4.0]


def test_a_schedule_that_raises_is_told_once_and_ends_no_training() -> None:
    def every(step: int) -> bool:
        if step in (3, 5):
            raise Boom("no such step")
        return True

    model = Attend()
    with pytest.warns(AttentionWarning, match="step 3 was not sampled, the schedule failed: Boom") as told:
        health = called(model, 6, every=every)
    assert len(told) == 1
    assert [sample.step for sample in health.samples] == [1, 2, 4, 6]


def test_an_alarm_that_raises_leaves_the_watch_whole() -> None:
    model = alarming()
    with Watch(model, every=1, on_alarm="raise") as health:
        for _ in range(3):
            model(torch.randn(1, 3, 8))
            with nullcontext() if health.samples else pytest.raises(AttentionAlarm, match="logit"):
                health.step()
    assert [sample.step for sample in health.samples] == [1, 2, 3]


def test_alarms_go_to_a_function() -> None:
    told: list[Alarm] = []
    model = alarming()
    with Watch(model, on_alarm=told.append) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert told == health.alarms
    assert told[0].name == "max_logit"


def test_a_warning_points_at_the_loop() -> None:
    model = alarming()
    with warnings.catch_warnings(record=True) as told, Watch(model) as health:
        warnings.simplefilter("always")
        model(torch.randn(1, 3, 8))
        health.step()
    assert {warning.filename for warning in told} == {__file__}


@pytest.mark.parametrize("samples", [1, 100])
def test_a_full_disk_is_told_once_and_what_was_not_written_is_written_later(
    samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SAMPLES_A_PART", samples)
    write, full = journal.RunWriter.write, [True]

    def fill(self: Any, *args: Any) -> None:
        if full[0]:
            raise OutputError("no space left", hint="Make room.")
        write(self, *args)

    monkeypatch.setattr(journal.RunWriter, "write", fill)
    model, told = Attend(), []
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in range(6):
            full[0] = step < 4
            model(torch.randn(1, 3, 8))
            health.step(float(step))
    assert [alarm.name for alarm in told] == ["records"]  # the first sample is written at once
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert run.heads["step"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert run.alarms["name"].to_pylist() == [alarm.name for alarm in told]


@pytest.mark.parametrize("stays", [False, True])
def test_no_file_may_grow_any_more(stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own limit, from the third step on: the training goes on, and what was written before is there."""
    monkeypatch.setattr(journal, "SAMPLES_A_PART", 1)
    model, told, steps = Attend(), [], range(1, 7)
    with ExitStack() as limit, Watch(model, every=1, to=tmp_path / "run", on_alarm=told.append) as health:
        for step in steps:
            if step == 3:
                limit.enter_context(files_up_to(4096))
            if step == 5 and not stays:
                limit.close()
            model(torch.randn(1, 3, 8))
            health.step(float(step))
    assert len(health.samples) == 6
    assert [(alarm.name, alarm.step) for alarm in told] == [("records", 3), *([("records", 6)] if stays else [])]
    assert all("File too large" in alarm.text for alarm in told)
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == ([1] if stays else list(steps))  # a part is written in the step after
    assert run.damaged == ()
    assert run.alarms["name"].to_pylist() == ([] if stays else ["records"])
    with Watch(model, to=tmp_path / "run") as health:
        health.step()
    assert read_run(tmp_path / "run").last_step == (2 if stays else 7)


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Any, *args: Any) -> None:
        raise OutputError("no space left", hint="Make room.")

    model = Attend()
    monkeypatch.setattr(journal.RunWriter, "write", fill)
    with pytest.warns(AttentionWarning, match="no space left"):
        called(model, to=tmp_path / "run")
    with Watch(model), pytest.raises(InvalidValueError, match="one watch"), Watch(model):
        pass


def test_the_folder_of_another_run(tmp_path: Path) -> None:
    with Watch(model := Attend(), to=tmp_path / "run") as health:
        model(torch.randn(1, 3, 8))
        health.step()
    other = nn.Sequential(Attend())
    with pytest.raises(Exception, match="model") as told, Watch(other, to=tmp_path / "run"):
        pass
    assert type(told.value).__module__ == "sqrtdk.errors"
    with Watch(other):
        pass


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with Watch(model := Attend(), every=2, to=tmp_path / "run") as health:
            for _ in range(3):
                model(torch.randn(1, 3, 8))
                health.step(1.0)
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert run.steps["sampled"].to_pylist() == [True, True, False, True, False, True]


def test_a_sample_of_a_step_that_goes_on_from_a_checkpoint() -> None:
    with Watch(model := Attend(), every=10, first_step=498) as health:
        for _ in range(5):
            model(torch.randn(1, 3, 8))
            health.step()
    assert [sample.step for sample in health.samples] == [500]
    assert isinstance(health.samples[0], StepSample)
