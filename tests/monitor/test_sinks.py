"""What a watch reports to is read back by each logger's own reader."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, OutputError
from sqrtdk.monitor import journal
from sqrtdk.monitor.metrics import metrics_of
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.sinks import SINKS, sink_of
from sqrtdk.monitor.sinks.jsonl import JsonLines
from sqrtdk.monitor.telling import AttentionWarning
from sqrtdk.monitor.watch import Watch, watch
from tests.integrations.sinks_read import READERS, lines_of, needs

ALARM = Alarm("max_logit", "warn", 3, "a logit of 120", "a paper", "block", 0, 1, math.inf, 100.0)


def _model(gain: float = 1.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    with torch.no_grad():
        layer.self_attn.in_proj_weight.mul_(gain)
    return layer


def _train(model: nn.Module, steps: int, **options: Any) -> Watch:
    with watch(model, every=2, **options) as health:
        for _ in range(steps):
            model(torch.randn(2, 5, 16)).square().mean().backward()
            health.step()
    return health


def _expected(*parts: Watch) -> dict[int, dict[str, float]]:
    return {sample.step: metrics_of(sample) for part in parts for sample in part.samples}


def _same(read: Mapping[int, Mapping[str, float]], expected: Mapping[int, Mapping[str, float]], single: bool) -> None:
    """To the last digit, or to that of float32 where the logger keeps no more."""
    assert list(read) == list(expected)
    for step, metrics in expected.items():
        kept = {name: torch.tensor(value).item() if single else value for name, value in metrics.items()}
        assert dict(read[step]) == kept


LIGHT = ("jsonl", "tensorboard")
HEAVY = (pytest.mark.slow, pytest.mark.filterwarnings("default"))  # they warn of their own dependencies
MARKS = dict.fromkeys(LIGHT, ()) | {"wandb": pytest.mark.full}
ALL = [pytest.param(name, marks=MARKS.get(name, HEAVY)) for name in SINKS]


@pytest.mark.parametrize("name", ALL)
def test_a_run_is_read_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in the same folder: the second goes on, and no step is there twice."""
    reader = READERS[name]
    needs(reader.module)
    reader.prepare(tmp_path, monkeypatch)
    told: list[Alarm] = []
    options = {"to": tmp_path / "exp1", "sinks": [reader.sink(tmp_path)], "on_alarm": told.append}
    first = _train(_model(gain=20.0), 4, **options)
    second = _train(_model(gain=20.0), 3, **options)
    assert "max_logit" in {alarm.name for alarm in told}
    assert "sink" not in {alarm.name for alarm in told}, told
    expected = _expected(first, second)
    assert list(expected) == [1, 2, 4, 6]
    assert len(expected[6]) > 20
    _same(reader.metrics(tmp_path), expected, reader.single)
    assert set(reader.alarms(tmp_path)) == {alarm.text for alarm in told if name != "wandb" or alarm.severity != "note"}


def test_going_back_to_a_checkpoint_replaces_steps(tmp_path: Path) -> None:
    needs("tensorboard")
    sinks = [READERS[name].sink(tmp_path) for name in ("jsonl", "tensorboard")]
    first = _train(_model(), 6, sinks=sinks)
    second = _train(_model(), 4, sinks=sinks, first_step=3)
    kept = {step: metrics for step, metrics in _expected(first).items() if step < 4}
    for name in ("jsonl", "tensorboard"):
        _same(READERS[name].metrics(tmp_path), kept | _expected(second), READERS[name].single)


def test_a_function_is_a_sink() -> None:
    written: dict[int, dict[str, float]] = {}
    health = _train(_model(), 4, sinks=[lambda step, metrics: written.update({step: metrics})])
    _same(written, _expected(health), single=False)


class Broken:
    """Takes nothing."""

    calls = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no way\nout")

    def alarm(self, alarm: Alarm) -> None: ...

    def close(self) -> None:
        raise ConnectionError("nor back")


class _Quiet(Broken):
    def close(self) -> None: ...


def test_a_sink_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    broken, closing, steps = Broken(), Broken(), []
    closing.write = lambda step, metrics: None  # type: ignore[method-assign]
    with pytest.warns(AttentionWarning, match="Broken failed at step 6: ConnectionError: nor back"):
        health = _train(
            _model(),
            6,
            sinks=[broken, closing, lambda step, metrics: steps.append(step)],
            on_alarm=lambda alarm: None,
        )
    assert steps == [1, 2, 4, 6]
    assert broken.calls == 4
    alarms = [alarm for alarm in health.alarms if alarm.name == "sink"]
    assert [(alarm.severity, alarm.step) for alarm in alarms] == [("warn", 1), ("warn", 6)]
    assert alarms[0].text == "the sink Broken failed at step 1: ConnectionError: no way out"


def test_what_failed_is_in_the_records_and_the_records_in_the_loggers(tmp_path: Path) -> None:
    """A sink that failed is an alarm of the folder; a folder that can't be written, one of the sinks."""
    _train(_model(), 2, sinks=[_Quiet()], to=tmp_path / "run", on_alarm=lambda alarm: None)
    assert "sink" in read_run(tmp_path / "run").alarms["name"].to_pylist()

    layer = _model()
    with watch(layer, every=1, sinks=[f"jsonl:{tmp_path / 'a.jsonl'}"], to=tmp_path / "gone", on_alarm=str) as health:
        for step in range(journal.SAMPLES_A_PART + 2):  # a part is written as the next step is noted
            layer(torch.randn(1, 3, 16))
            if step == journal.SAMPLES_A_PART + 1:
                shutil.rmtree(tmp_path / "gone" / "parts")
            health.step()
        (tmp_path / "gone" / "parts").mkdir()
    assert "records" in [alarm.name for alarm in health.alarms]
    assert [line["alarm"]["name"] for line in lines_of(tmp_path) if "alarm" in line] == ["records"]


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("samples", [1, 100])
def test_a_sink_that_fails_as_it_is_closed_is_in_the_records(
    samples: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SAMPLES_A_PART", samples)
    closing = Broken()
    closing.write = lambda step, metrics: None  # type: ignore[method-assign]
    closing.alarm = lambda alarm: None  # type: ignore[method-assign]
    with pytest.warns(AttentionWarning, match="Broken failed"):
        _train(_model(), steps, sinks=[closing], to=tmp_path / "run", on_alarm=lambda alarm: None)
    run = read_run(tmp_path / "run")
    told = [row for row in run.alarms.to_pylist() if row["name"] == "sink"]
    assert [(row["step"], "nor back" in row["text"]) for row in told] == [(max(steps, 1), True)]
    assert run.steps["step"].to_pylist() == [*range(1, max(steps, 1) + 1)]


def test_losses_are_those_of_a_run_without_sinks(tmp_path: Path) -> None:
    def losses(**options: Any) -> list[float]:
        torch.manual_seed(1)
        model, found = _model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, every=2, **options) as health:
            for _ in range(6):
                loss = model(torch.randn(2, 5, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                health.step(loss)
                found.append(loss.item())
        return found

    assert losses() == losses(sinks=[f"jsonl:{tmp_path / 'a.jsonl'}", Broken()], on_alarm=lambda alarm: None)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def test_lines_are_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "deep" / "a.jsonl")
    sink.write(3, {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 0.1})
    sink.alarm(ALARM)
    sink.close()
    lines = (tmp_path / "deep" / "a.jsonl").read_text().splitlines()
    metrics, alarm = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert metrics == {"step": 3, "metrics": {"a": "Infinity", "b": "-Infinity", "c": None, "d": 0.1}}
    assert alarm["step"] == 3
    assert (alarm["alarm"]["value"], alarm["alarm"]["bar"], alarm["alarm"]["site"]) == ("Infinity", 100.0, "block")


@pytest.mark.parametrize("torn", range(1, 27, 5))
def test_a_line_that_was_cut_goes(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "a.jsonl"
    whole = [f'{{"step": {step}, "metrics": {{}}}}\n' for step in (1, 2, 3)]
    path.write_text(whole[0] + whole[1][:torn])
    sink = JsonLines(path)
    sink.write(3, {})
    sink.close()
    assert path.read_text() == whole[0] + whole[2]


@pytest.mark.parametrize("content", ["my notes\n", '{"step": 1, "metrics": {}}\nmine', '{"epoch": 1}\n'])
def test_a_file_of_something_else_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(OutputError, match="something else"):
        JsonLines(path).write(1, {})
    assert path.read_text() == content


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "tensorboard:", "tensorbord:runs", "", ":x"])
def test_a_name_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="is no sink") as caught:
        sink_of(name)
    assert all(f"{known}:" in caught.value.hint for known in SINKS)


@pytest.mark.parametrize("sinks", ["tensorboard:x", None, [3], [None]])
def test_what_is_no_sink_is_refused(sinks: Any) -> None:
    with pytest.raises(InvalidTypeError):
        watch(_model(), sinks=sinks)


@pytest.mark.parametrize("name", [name for name in SINKS if name != "jsonl"])
def test_a_logger_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    argument = "sqlite:///a.db" if name == "mlflow" else "a"
    with pytest.raises(MissingExtraError, match=f"{name} can't be imported") as caught:
        sink_of(f"{name}:{argument}")
    assert f"sqrtdk[{name}]" in caught.value.hint


@pytest.mark.parametrize("uri", ["runs", "./runs/mlruns", "file:///runs", "file:runs"])
def test_mlflow_writes_to_no_plain_files(uri: str) -> None:
    with pytest.raises(InvalidValueError, match="a database") as caught:
        sink_of(f"mlflow:{uri}")
    assert "sqlite:///" in caught.value.hint


def _kept(name: str) -> Callable[[], object]:
    def tensorboard(path: Path) -> object:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(path))

    def wandb(path: Path) -> object:
        return __import__("wandb").init(mode="offline", reinit="create_new")

    return {"tensorboard": tensorboard, "wandb": wandb}[name]  # type: ignore[return-value]


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_of_the_loop_stays_open(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop logs to it too, before and after, with steps of its own."""
    needs(name)
    READERS[name].prepare(tmp_path, monkeypatch)
    own = _kept(name)(tmp_path)  # type: ignore[call-arg]
    if name == "wandb":
        own.log({"loss": 1.0}, step=50)  # type: ignore[attr-defined]
        kind = "WeightsAndBiases"
    else:
        own.add_scalar("loss", 1.0, 50)  # type: ignore[attr-defined]
        kind = "TensorBoard"
    sink = getattr(__import__(f"sqrtdk.monitor.sinks.{name}", fromlist=[kind]), kind)(own)
    health = _train(_model(), 2, sinks=[sink])
    if name == "wandb":
        own.log({"loss": 0.5}, step=60)  # type: ignore[attr-defined]
        own.finish()  # type: ignore[attr-defined]
    else:
        own.add_scalar("loss", 0.5, 60)  # type: ignore[attr-defined]
        own.close()  # type: ignore[attr-defined]
    _same(READERS[name].metrics(tmp_path), _expected(health), READERS[name].single)
