"""A Trainer that is watched: its losses, its steps, its evaluations, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from sqrtdk.integrations.trainer import AttentionWatch
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.telling import AttentionAlarm, AttentionWarning
from sqrtdk.report.watch.headline import run_headline
from sqrtdk.report.watch.summary import summarise

LENGTH, BATCH, HEADS = 12, 3, 2
STEPS = 12  # two epochs and more


def _model(gain: float = 1.0) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=HEADS))
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight.mul_(gain)
    return model


def _rows(count: int) -> list[dict[str, Any]]:
    tokens = torch.randint(32, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trainer(folder: Path, *callbacks: TrainerCallback, gain: float = 1.0, **options: Any) -> Trainer:
    plain = {"max_steps": 6, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=11,
        **(plain | options),
    )
    rows = {"train_dataset": _rows(15), "eval_dataset": _rows(4)}
    return Trainer(_model(gain), arguments, callbacks=list(callbacks), **rows)


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class _Breaks(TrainerCallback):
    """Writes a NaN into a weight after the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = torch.nan


@pytest.mark.full
def test_a_nan_that_the_trainer_logs_as_zero_is_an_alarm(tmp_path: Path) -> None:
    watch = AttentionWatch(every=100, to=tmp_path / "run")
    trainer = _trainer(tmp_path, _Breaks(), watch)
    with pytest.warns(AttentionWarning, match="the loss is nan at step 4; this step was not sampled"):
        trainer.train()
    assert _losses(trainer)[3:] == [0.0, 0.0, 0.0]  # `logging_nan_inf_filter`, of which a Trainer tells nobody
    (alarm,) = watch.watch.alarms
    assert (alarm.name, alarm.severity, alarm.step) == ("nonfinite", "fail", 4)
    assert read_run(tmp_path / "run").alarms.column("step").to_pylist() == [4]


@pytest.mark.full
def test_the_module_is_named_where_only_gradients_tell(tmp_path: Path) -> None:
    """The last module breaks, no attention sees it, and the loss is not logged at the sampled step."""
    watch = AttentionWatch(every=1)
    trainer = _trainer(tmp_path, watch, max_steps=1, logging_steps=5)
    trainer.model.transformer.h[-1].mlp.c_fc.weight.data[0, 0] = torch.inf
    with pytest.warns(AttentionWarning, match=r"mlp\.c_fc \(Conv1D\); its parameter weight holds NaN or infinity"):
        trainer.train()


def test_the_learning_rate_is_recorded_and_one_that_is_far_too_high_is_named(tmp_path: Path) -> None:
    alarms: list[Alarm] = []
    watch = AttentionWatch(every=1, to=tmp_path / "run", on_alarm=alarms.append)
    _trainer(tmp_path, watch, max_steps=2, learning_rate=10.0).train()
    assert alarms[0].text.startswith("step 1, with a learning rate of 10, moved the weights that give q and k by ")
    assert read_run(tmp_path / "run").steps["learning_rate"].to_pylist() == [10.0, 5.0]
    run = summarise(read_run(tmp_path / "run"))
    head = run_headline(run)
    assert head.text.en.startswith("Step 1, with a learning rate of 10, moved")
    assert head.fix.startswith("lower the learning rate first, from 10 to about 0.000")
    assert run.updates["relative_step"][1][0] > 100


@pytest.mark.full
def test_losses_and_weights_are_those_of_a_run_without(tmp_path: Path) -> None:
    """Bit by bit, dropout included, so no random number was drawn either."""
    watched = _trainer(tmp_path, AttentionWatch(every=2), max_steps=STEPS)
    keys = list(watched.model.state_dict())
    watched.train()
    plain = _trainer(tmp_path, max_steps=STEPS)
    plain.train()
    assert len(_losses(plain)) == STEPS
    assert _losses(watched) == _losses(plain)
    assert list(watched.model.state_dict()) == keys
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, watched.model.state_dict()[name]), name


@pytest.mark.full
@pytest.mark.parametrize("evaluated", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_step_is_one_of_the_optimizer(tmp_path: Path, evaluated: bool) -> None:
    """15 rows are 5 batches of 3: steps of 2, 2 and 1 batches, and no row of an evaluation among them."""
    callback = AttentionWatch(every=1)
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True} if evaluated else {}
    trainer = _trainer(tmp_path, callback, **options)
    trainer.train()
    watch = callback.watch
    assert watch is not None
    assert [sample.step for sample in watch.samples] == [1, 2, 3, 4, 5, 6]
    assert trainer.state.global_step == 6
    batches = [2, 2, 1, 2, 2, 1]
    for sample, count in zip(watch.samples, batches, strict=True):
        assert [call.site for call in sample.calls] == ["transformer.h.0.attn", "transformer.h.1.attn"]
        for call in sample.calls:
            assert list(call.columns["rows"]) == [count * BATCH * LENGTH] * HEADS
    assert [sample.loss for sample in watch.samples] == _losses(trainer)
    assert evaluated is any("eval_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.full
def test_the_loss_is_the_mean_that_is_logged(tmp_path: Path) -> None:
    callback = AttentionWatch(every=1)
    trainer = _trainer(tmp_path, callback, logging_steps=3)
    trainer.train()
    third, sixth = _losses(trainer)
    assert [sample.loss for sample in callback.watch.samples] == [None, None, third, None, None, sixth]


@pytest.mark.full
def test_a_run_that_is_resumed_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    """It was killed at step 6, two after its checkpoint: these two are there once."""
    options = {"every": 2, "to": tmp_path / "run", "sinks": [f"jsonl:{tmp_path / 'a.jsonl'}"]}
    _trainer(tmp_path, AttentionWatch(**options), save_strategy="steps", save_steps=4).train()
    again = _trainer(tmp_path, AttentionWatch(**options), max_steps=9)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == list(range(1, 10))
    assert run.steps["loss"].to_pylist() == _losses(again)
    assert [attempt.first_step for attempt in run.attempts] == [1, 5]
    assert sorted(set(run.heads["step"].to_pylist())) == [1, 2, 4, 6, 8]
    steps = [line.split(",")[0] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert steps == [f'{{"step": {step}' for step in (1, 2, 4, 6, 8)]


@pytest.mark.full
def test_a_training_that_raised_is_closed_by_the_next(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_substep_end(self, *arguments: Any, **kwargs: Any) -> None:
            raise RuntimeError("out of memory")

    callback, failing = AttentionWatch(every=1, to=tmp_path / "run"), Failing()
    trainer = _trainer(tmp_path, callback, failing, max_steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    callback.close()
    assert callback.watch.alarms == []
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.remove_callback(failing)
    trainer.train()
    assert read_run(tmp_path / "run").steps["step"].to_pylist() == [1, 2]
    callback.close()


@pytest.mark.full
def test_an_alarm_may_stop_the_training(tmp_path: Path) -> None:
    callback = AttentionWatch(every=2, on_alarm="raise")
    trainer = _trainer(tmp_path, callback, gain=2e3)
    with pytest.raises(AttentionAlarm) as caught:
        trainer.train()
    callback.close()
    assert caught.value.alarm.step == trainer.state.global_step == 1
    assert caught.value.alarm.site == "transformer.h.1.attn"
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the compiler, about its own parts
def test_a_compiled_model(tmp_path: Path) -> None:
    """With a backend that runs the same kernels, so that losses are the same."""
    callback, options = AttentionWatch(every=2), {"torch_compile_backend": "aot_eager", "max_steps": 4}
    trainer = _trainer(tmp_path, callback, **options)
    trainer.train()
    plain = _trainer(tmp_path, **options)
    plain.train()
    assert _losses(trainer) == _losses(plain)
    assert [(sample.step, sample.how) for sample in callback.watch.samples] == [
        (1, "eager"),
        (2, "eager"),
        (4, "eager"),
    ]
    for sample in callback.watch.samples:
        assert sample.how == "eager"
        assert [call.site for call in sample.calls] == ["transformer.h.0.attn", "transformer.h.1.attn"]


@pytest.mark.full
def test_the_records_up_to_a_checkpoint_are_written_when_it_is_saved(tmp_path: Path) -> None:
    """Seen by a callback that comes after the watch; its step has the loss that the Trainer logs."""
    there: list[tuple[int, list[int], list[float]]] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run = read_run(tmp_path / "run")
            there.append((state.global_step, run.steps["step"].to_pylist(), run.steps["loss"].to_pylist()))

    callback = AttentionWatch(every=2, to=tmp_path / "run")
    trainer = _trainer(tmp_path, callback, Look(), save_strategy="steps", save_steps=2)
    trainer.train()
    losses = [pytest.approx(loss, rel=1e-4) for loss in _losses(trainer)]
    assert there == [(last, list(range(1, last + 1)), losses[:last]) for last in (2, 4, 6)]
    run = read_run(tmp_path / "run")
    assert run.steps["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert run.damaged == ()
