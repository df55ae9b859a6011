"""Sentences of the records are read back as they were said, in both languages; those of older versions in English."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from sqrtdk._json import json_document
from sqrtdk.messages import Message, joined, said, table_of
from sqrtdk.monitor.checkpoints._measure import _plain, read_result
from sqrtdk.monitor.columns import LATER
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.rows import MAX_VALUES_BYTES, alarm_of, alarm_row, how_of, how_row
from sqrtdk.monitor.samples import AS_IS, Alarm, CallSample, StepSample, not_measured, reason_unmeasured, with_place
from sqrtdk.monitor.watch import Watch
from sqrtdk.report.watch.summary import Summary, summarise
from tests.monitor.run_records import parts, unsigned

REASON = with_place("h.0", Message("alarms.unmeasured.row_sums", error="RuntimeError: {0} \ud800"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of a model without attention, whose steps can't be measured."""
    model = nn.Linear(4, 4)
    with Watch(model, every=1, to=tmp_path / "run", on_alarm=lambda alarm: None) as health:
        for _ in range(2):
            model(torch.randn(2, 4))
            health.step(0.5)
    return tmp_path / "run"


def in_chinese(summary: Summary) -> list[str]:
    return [said(text, "zh") for text in (*(a.text for a in summary.alarms), *(m.reason for m in summary.missing))]


def test_the_records_of_a_run_are_said_in_both_languages(folder: Path) -> None:
    told = summarise(read_run(folder))
    assert list(told.how) == ["not measured: no attention ran in the model"]
    assert [said(way, "zh") for way in told.how] == ["未测量：模型中没有注意力运行"]
    assert in_chinese(told) == ["第 1 步没有看到注意力（未测量：模型中没有注意力运行）", "模型中没有注意力运行"]
    assert said(told.alarms[0].source, "zh") == "没有测量的不能当作正常"


@pytest.mark.parametrize("lacks", range(1, len(LATER) + 1))
def test_records_of_an_older_version_are_read(folder: Path, lacks: int) -> None:
    part = folder / "parts" / parts(folder)[0]
    columns = [name for some in LATER[-lacks:] for name in some]
    pq.write_table(pq.read_table(part).drop_columns(columns), part, compression="snappy", store_schema=False)
    unsigned(part)
    run = read_run(folder)
    assert not run.damaged
    assert run.steps["relative_step"].null_count == run.steps.num_rows > 0


def test_records_without_ids_stay_in_english(folder: Path) -> None:
    """They lack the ids: the sentences, and where they are looked into, are as before."""
    new = summarise(read_run(folder))
    part = folder / "parts" / parts(folder)[0]
    table = pq.read_table(part, read_dictionary=[])
    pq.write_table(
        table.drop_columns([name for some in LATER for name in some]), part, compression="snappy", store_schema=False
    )
    unsigned(part)
    assert not read_run(folder).damaged
    old = summarise(read_run(folder))
    assert (old.how, old.alarms, old.missing) == (new.how, new.alarms, new.missing)
    assert in_chinese(old) == [*(alarm.text for alarm in old.alarms), *(entry.reason for entry in old.missing)]


ALARMS = {
    "nested": Alarm("unmeasured", "note", 3, joined([REASON, Message("joins.same")]), Message("alarms.source.watch")),
    "plain": Alarm("max_logit", "warn", 3, "a logit of 3", "a report", "h.0", 0, 2, 3.0, 1.0),
    "long": Alarm("lost", "warn", 3, with_place("h", "x" * 2500), "a report"),
    "long values": Alarm("lost", "warn", 3, with_place("h", "x" * MAX_VALUES_BYTES), "a report"),
}


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_comes_back_from_its_row(name: str) -> None:
    alarm = ALARMS[name]
    row = alarm_row(alarm)
    again = alarm_of({key: pa.array([value]).to_pylist()[0] for key, value in row.items()})
    chinese = said(alarm.text, "zh").encode("utf-8", "replace").decode()
    assert again.text == alarm.text[:2000].encode("utf-8", "replace").decode()
    assert said(again.text, "zh") == (again.text if name == "long values" else chinese)
    assert said(again.source, "zh") == said(alarm.source, "zh")


@pytest.mark.parametrize("values", ["{", "[1]", '{"reason": NaN}', '{"reason": {"message": 1}}', "[" * 4000, None])
def test_values_that_do_not_fit_leave_the_sentence(values: str | None) -> None:
    row = {"how": "not measured: x", "message_id": "alarms.how.not_measured", "values": values}
    assert how_of(row) == "not measured: x"
    assert reason_unmeasured(how_of(row) or AS_IS) == "x"


@pytest.mark.parametrize("how", [AS_IS, not_measured("no way"), not_measured(Message("joins.same"))])
def test_how_a_step_ran_comes_back_from_its_row(how: str) -> None:
    again = how_of(how_row(how)) or ""
    assert (again, reason_unmeasured(again), said(again, "zh")) == (how, reason_unmeasured(how), said(how, "zh"))


def test_the_result_of_a_checkpoint_keeps_its_sentences() -> None:
    call = CallSample("h", 0, 1, {"peak": [0.5]}, 1.0, "", reason=Message("joins.same"))
    told = {
        "loss": 0.5,
        "state": "",
        "notes": [REASON, "n"],
        "sample": asdict(StepSample(3, (call,), not_measured("x"))),
    }
    again = read_result(json.loads(json_document(_plain(told) | {"messages": table_of(told)})))
    assert again.sample is not None
    assert again.sample.calls == (call,)
    assert [said(text, "zh") for text in (again.sample.how, again.sample.calls[0].reason or "")] == [
        "未测量：x",
        "相同",
    ]
    assert said(again.notes[0], "zh") == said(REASON, "zh")
