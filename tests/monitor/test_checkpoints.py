"""Checkpoints measured after the fact: the numbers of a watch, the same wherever they come from, none lost or twice."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import sqrtdk
from sqrtdk.audit.rules import statistics
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.monitor.checkpoints import measure_checkpoints
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch.summary import summarise
from tests.monitor.saved_runs import DAMAGES, HEADS, LAYERS, OPTIONS, STEPS, llama, measure, model, rows, save


def test_a_row_for_each_checkpoint_and_head_with_the_numbers_of_a_watch(saved: Path, measured: Path) -> None:
    found = rows(measured)
    assert [row["step"] for row in found["steps"]] == list(STEPS)
    assert [(row["loss"], row["how"], row["calls"]) for row in found["steps"]] == [
        (100.0 / step, "as is", LAYERS) for step in STEPS
    ]
    heads = [(row["step"], row["site"], row["head"]) for row in found["heads"]]
    sites = [f"transformer.h.{layer}.attn" for layer in range(LAYERS)]
    assert heads == [(step, site, head) for step in STEPS for site in sites for head in range(HEADS)]
    for step in STEPS:
        loaded = resolve_model(str(saved / f"checkpoint-{step}"), OPTIONS)
        with sqrtdk.watch(loaded.module, every=1, on_alarm=lambda alarm: None) as watch, torch.no_grad():
            loaded.module(**loaded.inputs)
            watch.step()
        for call in watch.samples[0].calls:
            mine = [row for row in found["heads"] if row["step"] == step and row["site"] == call.site]
            assert [row["scale_ratio"] for row in mine] == [call.scale_ratio] * HEADS
            for name, column in call.columns.items():
                if name in mine[0]:
                    assert [row[name] for row in mine] == [None if math.isnan(value) else value for value in column]
    times = [max(f.stat().st_mtime for f in (saved / f"checkpoint-{step}").iterdir()) for step in STEPS]
    assert [row["time"] for row in found["steps"]] == pytest.approx(times, abs=1e-6)


@pytest.mark.full
def test_what_a_trainer_saves(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(tmp_path / "out"), max_steps=6, save_steps=2, logging_steps=1, **quiet)
    ids = torch.arange(12) % 7
    trainer = Trainer(model(), arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 48)
    trainer.train()
    done = measure(tmp_path / "out", tmp_path / "run")
    assert done.failed == ()
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    found = rows(tmp_path / "run")
    assert {row["step"]: row["loss"] for row in found["steps"]} == {step: losses[step] for step in (2, 4, 6)}
    assert len(found["heads"]) == 3 * LAYERS * HEADS
    assert not found["alarms"]


def test_the_readers_of_a_watch_read_it(measured: Path) -> None:
    summary = summarise(read_run(measured))
    assert summary.model == {"class": "GPT2LMHeadModel", "parameters": 7360}
    assert summary.settings["notes"] == ["the ids are random, with seed 0: there is no tokenizer"]
    assert summary.counts == {"critical": 0, "fail": 0, "warn": 0, "note": 0}
    assert summary.settings["seq_len"] == 12
    assert summary.missing == ()  # a forward pass has no gradients to miss


@pytest.mark.slow
def test_pool_gives_the_same_though_a_worker_is_killed(saved: Path, measured: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done == 1:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    done = measure(saved, tmp_path / "run", engine="pool", workers=1, progress=kill_one)
    assert killed
    assert (done.computed, done.failed) == (len(STEPS), ())
    assert rows(tmp_path / "run") == rows(measured)


@pytest.mark.full
def test_a_worker_that_always_ends_is_its_checkpoint_alone(
    saved: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqrtdk.engines import _engine
    from sqrtdk.errors import LabError
    from sqrtdk.monitor.checkpoints import _measure

    honest = _measure.measure_checkpoint

    def ends_at_ten(self: object, function: object, cell: Any) -> dict[str, Any]:
        if cell["step"] == 10:
            raise LabError("the worker process ended 4 times")
        return honest(cell)

    monkeypatch.setattr(_engine.Local, "_result", ends_at_ten)
    done = measure(saved, tmp_path / "run")
    assert [(one.step, reason) for one, reason in done.failed] == [(10, "the worker process ended 4 times")]
    found = rows(tmp_path / "run")
    assert [row["how"] for row in found["steps"] if row["step"] == 10] == [
        "not measured: the worker process ended 4 times"
    ]
    assert found["heads"] == [row for row in rows(measured)["heads"] if row["step"] != 10]


@pytest.mark.parametrize(
    "names",
    [("weights cut", "no config", "no attention"), pytest.param(tuple(DAMAGES), marks=pytest.mark.full)],
    ids=len,
)
def test_a_damaged_checkpoint_is_a_row_with_its_reason(names: tuple[str, ...], saved: Path, tmp_path: Path) -> None:
    """A whole checkpoint at both ends, and one of each damage between."""
    folder, steps = tmp_path / "damaged", {name: 2 + at for at, name in enumerate(names)}
    for name, step in (("", 1), *steps.items(), ("", 50)):
        shutil.copytree(saved / "checkpoint-5", folder / f"checkpoint-{step}")
        if name:
            DAMAGES[name][0](folder / f"checkpoint-{step}")
    done = measure(folder, tmp_path / "run")
    found = rows(tmp_path / "run")
    assert {row["step"] for row in found["heads"]} == {1, 50}
    how = {row["step"]: row["how"] for row in found["steps"]}
    told = {row["step"]: row for row in found["alarms"] if row["name"] == "checkpoint"}
    for name, step in steps.items():
        assert how[step].startswith("not measured: "), name
        assert DAMAGES[name][1] in how[step], name
        assert told[step]["severity"] == "fail"
        assert DAMAGES[name][1] in told[step]["text"]
    assert how[1] == how[50] == "as is"
    assert set(told) == set(steps.values())
    assert [one.step for one, _ in done.failed] == list(steps.values())
    assert not any(row["name"] == "lost" for row in found["alarms"])
    assert summarise(read_run(tmp_path / "run")).exit_code("fail") == 1


@pytest.mark.slow
def test_what_failed_is_tried_again_and_what_is_new_or_changed_is_measured(saved: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "a", tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "checkpoint-10" / "config.json").rename(tmp_path / "config.json")
    shutil.move(run / "checkpoint-100", tmp_path)
    assert measure(run, output).computed == 2
    assert rows(output)["steps"][1]["how"].startswith("not measured")
    shutil.move(tmp_path / "checkpoint-100", run)
    again = measure(run, output)
    assert (again.computed, again.reused) == (2, 1)  # the new one, and the one that failed
    (tmp_path / "config.json").rename(run / "checkpoint-10" / "config.json")
    whole = measure(run, output)
    assert (whole.computed, whole.reused, whole.failed) == (1, 2, ())
    fresh = rows(measure(run, tmp_path / "fresh").runs[0])
    assert rows(output) == fresh
    attempts = read_run(output).attempts
    assert measure(run, output).computed == 0
    assert read_run(output).attempts == attempts, "nothing was to be written"
    GPT2LMHeadModel.from_pretrained(run / "checkpoint-5").save_pretrained(run / "checkpoint-10")
    changed = measure(run, output)
    assert (changed.computed, changed.reused) == (1, 2)
    now = rows(output)["heads"]
    assert [row["max_logit"] for row in now if row["step"] == 10] == [
        row["max_logit"] for row in now if row["step"] == 5
    ]
    assert rows(measure(run, tmp_path / "anew", anew=True).runs[0]) == rows(output)


def test_what_is_named_no_longer_is_no_row_any_more(saved: Path, measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path / "run")
    some = [saved / f"checkpoint-{step}" for step in STEPS[:2]]
    assert measure_checkpoints(some, tmp_path / "run", OPTIONS).computed == 0
    assert [row["step"] for row in rows(tmp_path / "run")["steps"]] == [5, 10]
    measure(saved, tmp_path / "run")
    assert rows(tmp_path / "run") == rows(measured)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"seq_len": 8}, {"seed": 1}, {"dtype": "bf16"}, {"batch": 2}, {"attn": "eager"}])
def test_other_options_are_other_numbers(options: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    one = saved / "checkpoint-5"
    measure_checkpoints([one], tmp_path, OPTIONS)
    before = rows(tmp_path)
    assert measure_checkpoints([one], tmp_path, replace(OPTIONS, **options)).computed == 1
    assert (rows(tmp_path)["heads"] != before["heads"]) or options == {"attn": "eager"}


@pytest.mark.full
def test_rows_and_the_content_of_files_decide_too(saved: Path, tmp_path: Path) -> None:
    one, inputs = saved / "checkpoint-5", tmp_path / "ids.safetensors"
    output = tmp_path / "run"
    assert measure_checkpoints([one], output, OPTIONS).computed == 1
    assert measure_checkpoints([one], output, OPTIONS, rows=3).computed == 1
    assert [row["rows"] for row in rows(output)["heads"]] == [3] * LAYERS * HEADS
    from safetensors.torch import save_file

    for ids in ([1, 2, 3], [1, 2, 4]):
        save_file({"input_ids": torch.tensor([ids])}, inputs)
        options = LoadOptions(input_file=inputs)
        assert measure_checkpoints([one], output, options).computed == 1
        assert measure_checkpoints([one], output, options).computed == 0
        assert [row["keys"] for row in rows(output)["heads"]] == [2.0] * LAYERS * HEADS


@pytest.mark.full
def test_an_interrupted_call_goes_on(saved: Path, measured: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(saved, tmp_path / "run", progress=interrupt)
    told: list[tuple[int, int]] = []
    done = measure(saved, tmp_path / "run", progress=lambda *count: told.append(count))
    assert (done.computed, done.reused) == (1, 2)
    assert told == [(2, 3), (3, 3)]
    assert rows(tmp_path / "run") == rows(measured)


def test_records_that_were_half_written_or_damaged_are_made_whole(saved: Path, measured: Path, tmp_path: Path) -> None:
    from sqrtdk.monitor.checkpoints import _records

    shutil.copytree(measured, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_records, "_HEADS_A_PART", 1)
        assert measure(saved, tmp_path / "run").computed == 0
    parts = sorted((tmp_path / "run" / "parts").glob("*.parquet"))
    assert len(parts) == len(STEPS)
    parts[-1].unlink()
    parts[1].write_bytes(b"damaged")
    for kept in (tmp_path / "run" / "checkpoints").glob("step-10-*.json"):
        kept.write_text("{")
    assert measure(saved, tmp_path / "run").computed == 1
    assert rows(tmp_path / "run") == rows(measured)


@pytest.mark.slow
def test_several_runs_have_a_folder_each_and_one_becomes_one_of_them(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "b" / "out")
    shutil.copytree(saved / "checkpoint-5", tmp_path / "c" / "out" / "checkpoint-7")
    output = tmp_path / "run"
    assert measure_checkpoints([f"{tmp_path}/b/out/*"], output, OPTIONS).runs == (output,)
    both = measure_checkpoints([f"{tmp_path}/?/out/checkpoint-*"], output, OPTIONS)
    assert both.runs == (output / "b-out", output / "c-out")
    assert (both.computed, both.reused) == (1, 3)
    assert [row["step"] for row in rows(output / "c-out")["steps"]] == [7]
    assert not (output / "run.json").exists()
    alone = rows(measure(tmp_path / "b" / "out", tmp_path / "alone").runs[0])
    assert rows(output / "b-out") == alone


@pytest.mark.full
def test_alarms_look_back_over_the_series(tmp_path: Path) -> None:
    save(tmp_path / "a", range(10, 100, 10), growth=1.9)
    save(tmp_path / "a", [100], scale_attn_weights=False)
    measure(tmp_path / "a", tmp_path / "run")
    told = rows(tmp_path / "run")["alarms"]
    (ledger, other) = [row for row in told if row["name"] == "ledger"]
    assert (ledger["step"], ledger["severity"], other["site"]) == (100, "warn", "transformer.h.1.attn")
    assert ledger["value"] == pytest.approx(math.sqrt(8))
    growth = [row for row in told if row["name"] == "growth"]
    assert growth
    assert all(row["step"] > 10 for row in growth)


def test_findings_of_the_audit_are_alarms_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_trained", lambda model: True)  # of fresh weights the rule says nothing
    save(tmp_path / "a", (1, 2), growth=0.0, n_positions=48)
    measure(tmp_path / "a", tmp_path / "run", LoadOptions(seq_len=48))
    flat = [row for row in rows(tmp_path / "run")["alarms"] if row["name"] == "flat"]
    report = sqrtdk.check(str(tmp_path / "a" / "checkpoint-1"), seq_len=48)
    findings = [finding for finding in report.findings if finding.rule == "flat"]
    assert [row["site"] for row in flat] == [finding.site for finding in findings]
    assert sorted(row["site"] for row in flat) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    for row, finding in zip(flat, findings, strict=True):
        assert (row["step"], row["severity"], row["source"]) == (1, "note", finding.source)
        assert finding.message in row["text"]


@pytest.mark.slow
def test_another_model_and_other_inputs_are_told(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoint-5", tmp_path / "a" / "checkpoint-1")
    llama().save_pretrained(tmp_path / "a" / "checkpoint-2")
    measure(tmp_path / "a", tmp_path / "run")
    (told,) = [row for row in rows(tmp_path / "run")["alarms"] if row["name"] == "checkpoint"]
    assert told["severity"] == "warn"
    assert "checkpoint-2 of step 2 is LlamaForCausalLM of " in told["text"]
    for step, positions in ((1, 64), (2, 64), (3, 8)):
        llama(max_position_embeddings=positions).save_pretrained(tmp_path / "b" / f"checkpoint-{step}")
    measure(tmp_path / "b", tmp_path / "other")
    (told,) = [row for row in rows(tmp_path / "other")["alarms"] if row["name"] == "checkpoint"]
    assert (told["step"], told["severity"]) == (3, "warn")
    assert "checkpoint-3 of step 3 ran on other inputs than checkpoint-2" in told["text"]


def test_tensors_that_are_missing_are_told(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved / "checkpoint-5", tmp_path / "a" / "checkpoint-5")
    weights = tmp_path / "a" / "checkpoint-5" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["transformer.h.1.attn.c_attn.weight"]
    save_file(tensors, weights, {"format": "pt"})
    measure(tmp_path / "a", tmp_path / "run")
    (told,) = [row for row in rows(tmp_path / "run")["alarms"] if row["name"] == "checkpoint"]
    assert (told["severity"], "h.1.attn.c_attn.weight" in told["text"]) == ("warn", True)


def test_a_finding_is_told_once_until_it_is_worse_and_not_beside_a_rule_of_the_watch() -> None:
    """And a rule of the watch looks back: the scale of the last checkpoint is another one."""
    from sqrtdk.audit.records import Finding
    from sqrtdk.monitor.checkpoints._find import Checkpoint
    from sqrtdk.monitor.checkpoints._measure import Result
    from sqrtdk.monitor.checkpoints._records import Point, step_rows
    from sqrtdk.monitor.samples import CallSample, StepSample

    def finding(rule: str, severity: str, fix: str = "fix it") -> Finding:
        return Finding(rule, severity, "h.0", 2.0, "a text", "it is so", fix, "a source", None)

    found = [
        (finding("scale_ledger", "warn"), finding("scale_ledger", "warn", "another")),
        (finding("scale_ledger", "warn"), finding("max_logit", "warn")),
        (finding("scale_ledger", "fail"), finding("max_logit", "critical")),
        (finding("scale_ledger", "warn"),),
    ]
    points = []
    for step, some in enumerate(found, 1):
        ratio = 2.0 if step == len(found) else 1.0
        call = CallSample("h.0", 0, 1, {"max_logit": [120.0 if step > 1 else 1.0]}, ratio, "softmax(q.k)")
        result = Result([], "", None, StepSample(step, (call,)), some, {}, "", ())  # type: ignore[arg-type]
        points.append(Point(Checkpoint(Path(f"/a/checkpoint-{step}"), step), replace(result, loss=None), 0.0))
    told = [(row["step"], row["name"], row["severity"]) for one in step_rows(points) for row in one.alarms]
    assert [one for one in told if one[1] == "scale_ledger"] == [
        (1, "scale_ledger", "warn"),
        (1, "scale_ledger", "warn"),
        (3, "scale_ledger", "fail"),
    ]
    assert [one for one in told if one[1] == "ledger"] == [(4, "ledger", "warn")]
    assert [one for one in told if one[1] == "max_logit"] == [(2, "max_logit", "warn"), (3, "max_logit", "critical")]
