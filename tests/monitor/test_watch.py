"""A watch changes nothing and counts what ran, once: laws of `watch` without a compiler."""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.monitor import forwards
from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.schedule import Every
from sqrtdk.monitor.sums import MAXIMUM_COLUMNS, SUM_COLUMNS
from sqrtdk.monitor.telling import LOUD, AttentionWarning
from sqrtdk.monitor.watch import Watch
from tests.monitor.watched_models import (
    Attend,
    alarming,
    called,
    global_hooks,
    module_state,
    one_step,
)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_no_watched_model(how: str) -> None:
    model = Attend()

    def copied() -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8))
        other = copied()
        other(torch.randn(1, 7, 8))
        with Watch(other):
            pass
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]
    assert module_state(other).keys() == module_state(model).keys()
    assert other.qkv.weight.data_ptr() != model.qkv.weight.data_ptr()


def test_samples_are_a_sequence_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.monitor.watch.HISTORY", 3)
    model = Attend()
    with Watch(model, every=1) as health:
        for _ in range(5):
            model(torch.randn(1, 3, 8))
            health.step()
    steps = [sample.step for sample in health.samples]
    assert steps == [3, 4, 5]
    assert [sample.step for sample in health.samples[1:]] == steps[1:]
    assert [sample.step for sample in health.samples[-2:][::-1]] == steps[:0:-1]


@pytest.mark.parametrize("several", [False, True])
def test_the_relative_step_of_the_weights_that_give_q_and_k(several: bool) -> None:
    """Whatever else moves; the rate is that of their group."""
    model, other = Attend(), nn.Linear(2, 2)
    rates = [{"params": [model.qkv.weight], "lr": 0.5}, {"params": other.parameters(), "lr": 7.0}]
    optimizer = torch.optim.SGD(rates)
    with Watch(model, every=2, optimizer=[optimizer] if several else optimizer) as health:
        for _ in range(2):
            before = model.qkv.weight.detach().clone()
            model(torch.randn(1, 3, 8)).mean().backward()
            optimizer.step()
            health.step()
    sample = health.samples[-1]
    moved = (model.qkv.weight.detach() - before).norm() / before.norm()
    assert (sample.learning_rate, sample.relative_step) == (0.5, pytest.approx(float(moved)))


def test_an_optimizer_without_groups_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"optimizer is a torch\.optim\.Optimizer or a list of them; got float"):
        Watch(Attend(), optimizer=0.1)


def test_the_forward_of_another_thread_is_not_counted() -> None:
    model = Attend()
    inside = threading.Event()

    def run() -> None:
        model(torch.randn(4, 9, 8)).sum().backward()
        inside.set()

    with Watch(model, every=1) as health:
        other = threading.Thread(target=run)
        model(torch.randn(1, 3, 8)).sum().backward()
        other.start()
        other.join()
        rows = {part.shape for parts in health._forwards._gradients.rows.values() for part in parts}
        health.step()
    assert inside.is_set()
    assert health.samples[0].calls[0].columns["rows"] == [3.0, 3.0]
    assert not any("grad" in reason for reason in health.samples[0].not_measured)
    assert rows == {(2, 3)}


def test_one_watch_a_model() -> None:
    model = Attend()
    with Watch(model), pytest.raises(InvalidValueError, match="one watch at a time"), Watch(model):
        pass
    with Watch(model):
        pass


def test_a_watch_is_for_one_block() -> None:
    health = Watch(model := Attend(), every=1)
    with health:
        model(torch.randn(1, 3, 8))
        health.step()
    with pytest.raises(InvalidValueError, match="for one block"), health:
        pass


def test_a_part_of_a_watched_model_may_be_watched_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Attend())
    with Watch(model, every=1) as whole, Watch(model[1], every=1) as part:
        model(torch.randn(1, 3, 8)).sum().backward()
        model[1](torch.randn(1, 4, 8))
        part.step()
        whole.step()
    (outer,), (inner,) = whole.samples[0].calls, part.samples[0].calls
    assert (outer.site, inner.site) == ("1", "")
    assert outer.columns["rows"] == [3.0, 3.0]
    assert inner.columns["rows"] == [7.0, 7.0]
    assert inner.columns["query_grad_max"] == outer.columns["query_grad_max"]


def test_a_model_that_calls_itself_is_one_forward_pass() -> None:
    class Twice(Attend):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return super().forward(x) + (self(x, again=False) if again else 0.0)

    model = Twice()
    with Watch(model, every=1) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert [(call.index, call.columns["rows"]) for call in health.samples[0].calls] == [
        (0, [3.0, 3.0]),
        (1, [3.0, 3.0]),
    ]


def test_what_q_is_made_of_before_a_module_is_seen_in_a_model_that_is_one_attention() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.norm(self.q(x) * 0.25)[:, None], self.k(x)[:, None]
            return F.scaled_dot_product_attention(q, k, k, scale=1.0)

    model = Normed()
    with Watch(model, every=1, on_alarm=lambda _: None) as health:
        model(torch.randn(1, 3, 8))
        health.step()
    assert health.samples[0].calls[0].scale_ratio == pytest.approx(0.25 * math.sqrt(8), rel=1e-5)


def test_several_forward_passes_of_a_step_are_one_attention() -> None:
    model = Attend()
    with Watch(model, every=2) as health:
        for length in (3, 4, 5):
            model(torch.randn(1, length, 8))
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [12.0, 12.0]
    assert len(health.samples[0].calls) == 1


def test_a_step_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MAX_PASSES_A_STEP", 3)
    model = Attend()
    with Watch(model, every=1) as health:
        for _ in range(5):
            model(torch.randn(1, 2, 8))
        health.step()
    assert health.samples[0].calls[0].columns["rows"] == [6.0, 6.0]
    assert [reason for reason in health.samples[0].not_measured if "step() called?" in reason]


def test_what_is_held_until_the_step_ends_is_bounded_by_rows() -> None:
    def held(rows: int | None, batches: int) -> int:
        model = Attend()
        with Watch(model, every=1, rows=rows) as health:
            for _ in range(batches):
                model(torch.randn(1, 64, 8)).sum().backward()
            found = health._forwards
            sums = [part for one in found._found.values() for part in one.parts]
            gradients = [part for parts in found._gradients.rows.values() for part in parts]
            tensors = [*gradients, *(x for part in sums for x in (part.sums, part.maxima, *part.ordered.values()))]
            health.step()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    heads, fixed = (
        2,
        2 * (len(SUM_COLUMNS) + len(MAXIMUM_COLUMNS)) * 8,
    )  # the sums and the maxima of each head in float64
    assert held(None, 3) == 3 * (4 * 64 * heads * 4 + fixed)  # two statistics and two gradients of a row in float32
    assert held(4, 3) == 3 * (4 * 4 * heads * 4 + fixed)


def test_a_model_that_is_never_called() -> None:
    model = Attend()
    health = Watch(model)
    with pytest.warns(AttentionWarning, match="no forward pass of the model was seen"):
        one_step(health, lambda: None)
    assert health.samples[0].how == "not measured: no forward pass of the model was seen"


def test_a_model_without_attention() -> None:
    with pytest.warns(
        AttentionWarning, match="no attention was seen at step 1 .*no attention ran in the model"
    ) as told:
        health = called(nn.Linear(8, 8), 3, every=1)
    assert len(told) == 1
    assert [sample.calls for sample in health.samples] == [(), (), ()]
    assert [alarm.name for alarm in health.alarms] == ["lost", "unmeasured"]


@pytest.mark.parametrize(("forwards", "steps", "names"), [(2, 0, ["idle"]), (0, 0, []), (1, 1, [])])
def test_step_is_never_called(forwards: int, steps: int, names: list[str]) -> None:
    model = Attend()
    text = r"step\(\) was never called, 2 forward passes"
    with pytest.warns(AttentionWarning, match=text) if names else nullcontext(), Watch(model, every=1) as health:
        for step in range(steps + forwards):
            model(torch.randn(1, 3, 8))
            if step < steps:
                health.step()
    assert [alarm.name for alarm in health.alarms] == names


def test_step_outside_the_block() -> None:
    health = Watch(Attend())
    with pytest.raises(InvalidValueError, match="inside the block"):
        health.step()


def test_an_evaluation_in_a_pause_does_not_count() -> None:
    model = Attend()
    with Watch(model, every=lambda step: step != 2) as health:
        model(torch.randn(1, 3, 8)).sum().backward()
        with health.paused(), health.paused():
            assert global_hooks() == {}
            model(torch.randn(1, 9, 8)).sum().backward()
        model(torch.randn(1, 2, 8)).sum().backward()
        health.step()
        with health.paused():
            health.step()
            assert global_hooks() == {}
        model(torch.randn(1, 4, 8))
        health.step()
    assert [call.columns["rows"][0] for sample in health.samples for call in sample.calls] == [5.0, 4.0]
    assert [len(parts) for parts in health._forwards._gradients.rows.values()] == []


def test_steps_that_are_not_sampled_run_without_a_hook() -> None:
    model = Attend()
    with Watch(model, every=3) as health:
        hooks = []
        for _ in range(6):
            hooks.append(bool(global_hooks()))
            model(torch.randn(1, 3, 8))
            health.step()
    assert hooks == [True, False, True, False, False, True]


def test_samples_are_frequent_only_while_a_trend_is_bad() -> None:
    model = alarming()
    told: list[Alarm] = []
    with Watch(model, every=Every(10, urgent=2), on_alarm=told.append) as health:
        for step in range(1, 22):
            if step == 5:
                with torch.no_grad():
                    model.qkv.weight /= 100.0
            model(torch.randn(1, 3, 8))
            health.step()
    assert [sample.step for sample in health.samples] == [1, 2, 4, 6, 10, 20]
    assert told[-1].severity in LOUD
