"""QK-clip in a training loop: a step hook, a callback of the Trainer."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.repair import QKClip, plan_of, qk_clip_
from tests.repair.layouts import GROUPED, IDS
from tests.repair.modules import Attention, randomised, states


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _train(model: nn.Module, steps: int, clip: QKClip | None, optimizer: Any, x: torch.Tensor) -> list[float]:
    largest = []
    for _ in range(steps):
        with sqrtdk.trace(model) as run:
            loss = _loss(model.eval(), x)
        largest.append(max(run.calls[0].stats.max_logit))
        model.train()
        loss = _loss(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return largest


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_run_is_kept_under_the_threshold(kind: Any) -> None:
    """After a step without learning the maxima are at the threshold; with it, they come back to it."""
    model, x = randomised(Attention()).train(), states()
    optimizer = kind(model.parameters(), lr=0.0)
    clip = QKClip(model, threshold=10.0).attach(optimizer)
    first, second = _train(model, 2, clip, optimizer, x)
    assert first > 30
    assert second == pytest.approx(10.0)
    clip.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_hook_does_what_the_function_does_after_the_step() -> None:
    x = states()
    models = [randomised(Attention()).train()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    clip = QKClip(models[0], threshold=15.0, balance=0.3).attach(optimizers[0])
    with sqrtdk.trace(models[1], keep=True) as run:
        loss = _loss(models[1], x)
    _loss(models[0], x).backward()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = qk_clip_(models[1], run, 15.0, 0.3)
    assert torch.equal(clip.records[0].gamma, expected[0].gamma)
    assert expected[0].clipped
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_of_several_forwards_the_largest_counts_and_none_of_those_in_eval_mode() -> None:
    model, x = randomised(Attention()).train(), states()
    clip = QKClip(model, threshold=1e-6)
    model(x)
    (small,) = clip.step()
    model(1.5 * x)
    model(x)
    model.eval()(5 * x)
    model.train()
    (record,) = clip.step()
    assert (record.measured > small.predicted).all()
    assert record.measured.max() < 1e-5


def test_every_second_step_clips() -> None:
    model, x = randomised(Attention()).train(), states()
    clip = QKClip(model, threshold=10.0, every=2)
    model(x)
    assert clip.step() != ()
    model(x)
    assert clip.step() == ()
    assert clip.records != ()


def test_a_step_without_a_forward_keeps_the_records() -> None:
    model = randomised(Attention()).train()
    clip = QKClip(model, threshold=10.0)
    model(states())
    records = clip.step()
    assert clip.step() == ()
    assert clip.records is records


@pytest.mark.usefixtures("accelerate_anew")
def test_an_optimizer_of_accelerate_is_attached_by_the_one_in_it() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = randomised(Attention()).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    clip = QKClip(model, threshold=10.0).attach(optimizer)
    accelerator.backward(model(states()).square().mean())
    optimizer.step()
    assert clip.records[0].clipped


def test_of_several_optimizers_none_is_the_last() -> None:
    model = randomised(Attention()).train()
    one, other = (torch.optim.SGD([weight], lr=0.0) for weight in (model.q.weight, model.k.weight))
    clip = QKClip(model).attach(one)
    with pytest.raises(InvalidValueError, match="one optimizer is attached") as raised:
        clip.attach(other)
    assert "clip.step([one, other])" in str(raised.value.hint)
    clip.remove()
    clip.attach(other)


def test_a_first_forward_with_broken_numbers_is_planned_by_the_next() -> None:
    model, x = randomised(Attention()).train(), states()
    clip = QKClip(model, threshold=1.0)
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(x * math.nan)
    assert "holds a NaN or an infinity" in str(plan_of(model, run)[0].refused)
    model(x * math.nan)
    assert clip.step() == ()
    model(x)
    (record,) = clip.step()
    assert record.clipped


def test_a_forward_that_raises_leaves_no_trace_running() -> None:
    model = randomised(Attention()).train()
    clip = QKClip(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(2, 6, 31, dtype=torch.float64))
    assert _get_current_dispatch_mode() is None
    assert clip.step() == ()
    model(states())
    assert clip.step() != ()


@pytest.mark.full
def test_a_compiled_model_is_traced_from_outside() -> None:
    model, x = randomised(Attention()).train(), states()
    compiled = torch.compile(model, backend="eager")
    clip = QKClip(compiled, threshold=10.0)
    compiled(x)
    assert clip.step()[0].clipped
    clip.remove()
    torch._dynamo.reset()
    QKClip(model)
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings(action="ignore"), pytest.raises(UnsupportedError, match="inside a compiled region"):
        compiled(x)
    torch._dynamo.reset()


def test_calls_that_appear_later_are_planned_when_they_are_seen_again() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Attention(), Attention()

        def forward(self, x: torch.Tensor, which: str = "one") -> torch.Tensor:
            return self.get_submodule(which)(x)

    model, x = randomised(Two()).train(), states()
    clip = QKClip(model, threshold=10.0)
    model(x)
    assert [record.site for record in clip.step()] == ["one"]
    for _ in range(2):
        model(x, "two")
        records = clip.step()
    assert [record.site for record in records] == ["one", "two"]
    assert records[0].clipped == ()
    assert records[1].clipped


def test_a_monitor_serves_in_place_of_a_trace() -> None:
    model, x = randomised(Attention()).train(), states()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)

    class Monitor:
        plans = plan_of(model, run)
        maxima = (torch.full((4,), 40.0),)

    clip = QKClip(model, threshold=10.0, stats=Monitor())
    assert not model._forward_hooks
    assert clip.step()[0].gamma.tolist() == [0.25] * 4


def test_what_it_can_not_clip_it_says_once() -> None:
    model = randomised(Attention(after=lambda own, logits: logits + torch.arange(6.0))).train()
    clip = QKClip(model)
    with pytest.warns(UserWarning, match="1 of 1 attentions can't be clipped: the root: a bias"):
        model(states())
    model(states())
    assert clip.step()[0].refused is not None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, InvalidValueError, "every is a number of steps from 1; got 0"),
        ({"threshold": math.nan}, InvalidValueError, "threshold is a finite number above 0; got nan"),
        ({"balance": 2}, InvalidValueError, "balance is from 0 to 1; got 2"),
        ({"stats": 3}, InvalidTypeError, "stats is a watch, or has `plans` and `maxima`; got int"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QKClip(Attention(), **options)
    with pytest.raises(InvalidTypeError, match="register_step_post_hook is needed; got int"):
        QKClip(Attention()).attach(3)  # type: ignore[arg-type]


def _trainer(folder: Path, callbacks: list[Any], accumulated: int = 1) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    model = randomised(hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**GROUPED))).float().train()
    rows = [{"input_ids": row, "labels": row} for row in IDS] * 2
    arguments = hf.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=0.0, report_to=[], logging_steps=1,
        gradient_accumulation_steps=accumulated, save_strategy="no", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return hf.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)


def test_a_trainer_is_kept_under_the_threshold(tmp_path: Path) -> None:
    from sqrtdk.integrations import trainer as callbacks

    callback = callbacks.QKClip(threshold=8.0)
    trainer = _trainer(tmp_path, [callback], accumulated=2)
    largest = []
    for train in (lambda: None, trainer.train):
        train()
        with sqrtdk.trace(trainer.model) as run:
            trainer.model(IDS)
        assert run.calls[0].stats is not None
        largest.append(max(run.calls[0].stats.max_logit))
    assert largest[0] > 12
    assert largest[1] == pytest.approx(8.0, rel=1e-4)
    assert callback.records[0].clipped == ()
    assert not trainer.model._forward_hooks


@pytest.mark.full
@pytest.mark.parametrize("first", ["watch", "clip"])
def test_a_trainer_that_is_watched_clips_by_the_watch(tmp_path: Path, first: str) -> None:
    from sqrtdk.integrations import trainer as callbacks

    watch = callbacks.AttentionWatch(every=1, on_alarm=lambda alarm: None)
    clip = callbacks.QKClip(watch, threshold=8.0)
    _trainer(tmp_path, [watch, clip] if first == "watch" else [clip, watch]).train()
    assert watch.watch is not None
    largest = [max(max(call.columns["max_logit"]) for call in sample.calls) for sample in watch.watch.samples]
    assert largest[0] > 12
    assert largest[1:] == pytest.approx([8.0, 8.0], rel=1e-4)
    assert all(sample.loss is not None for sample in watch.watch.samples)
    assert clip.records[0].measured.max().item() == pytest.approx(8.0, rel=1e-4)


def test_a_watch_that_no_trainer_has(tmp_path: Path) -> None:
    from sqrtdk.integrations import trainer as callbacks

    with pytest.raises(InvalidTypeError, match="watch is an AttentionWatch; got int"):
        callbacks.QKClip(100)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="a watch has its own cadence; got every=2"):
        callbacks.QKClip(callbacks.AttentionWatch(), every=2)
    with pytest.raises(InvalidValueError, match="the watch is a callback of the same Trainer"):
        _trainer(tmp_path, [callbacks.QKClip(callbacks.AttentionWatch())]).train()
