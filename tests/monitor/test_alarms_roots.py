"""Alarms from which others follow: updates, sampled or between two samples, and layers unlike their neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.messages import Message, mentions
from sqrtdk.monitor.alarms import fresh, holding
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample
from sqrtdk.monitor.watch import Watch
from sqrtdk.report.watch.fix import alarm_fix, root_alarms, update_before
from sqrtdk.report.watch.summary import summarise
from tests.monitor.test_alarms import brief, call, run
from tests.monitor.watched_models import Attend


@pytest.mark.parametrize(("ratio", "rate", "severity"), [(None, 10.0, ""), (2.9, 10.0, ""), (507.3, 10.0, "warn")])
def test_an_update_that_replaces_the_weights(ratio: float | None, rate: float, severity: str) -> None:
    now = StepSample(1, (call(),), relative_step=ratio, learning_rate=rate)
    alarms = fresh(holding((), now), ())
    assert brief(alarms) == ([("update", severity, 1)] if severity else [])
    if severity:
        assert "with a learning rate of 10, moved the weights that give q and k by 507 times" in alarms[0].text
        unknown = holding((), replace(now, learning_rate=None))
        assert "learning rate" not in unknown[0].text


# -- updates of steps that are not sampled -----------------------------------------------------------------------------


class Apart(nn.Module):
    """An attention whose q begins at zero, and k does not."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        nn.init.zeros_(self.q.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x), 4 * self.k(x), self.v(x))


def trained(
    rates: list[float], every: int | Callable[[int], bool], to: Path | None = None, zeros: bool = False
) -> Watch:
    """A run of Adam with these learning rates, by step."""
    model = Apart() if zeros else Attend()
    x = torch.randn(2, 5, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    with Watch(model, every=every, optimizer=optimizer, on_alarm=lambda _: None, to=to) as health:
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            (model(x) - x.sum()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step()
    return health


def test_an_update_between_two_samples_is_seen_at_the_second(tmp_path: Path) -> None:
    """Step 7 of 10 has a rate ten thousand times as high; steps 1, 5 and 10 are sampled."""
    health = trained([1e-3] * 6 + [10.0] + [1e-3] * 5, 5, tmp_path / "run")
    (alarm,) = (one for one in health.alarms if one.name == "update")
    assert isinstance(alarm.text, Message)
    assert alarm.text.id == "alarms.update.between"
    assert (alarm.step, alarm.text.values["before"], alarm.severity) == (10, 5, "warn")
    assert alarm.value is not None
    assert alarm.value > 10
    assert [sample.drift is None for sample in health.samples] == [True, False, False]
    summary = summarise(read_run(tmp_path / "run"))
    (read,) = (one for one in summary.alarms if one.name == "update")
    assert alarm_fix(summary, read) == Message("runs.fix.between", before=5, step=10)
    large = Alarm("max_logit", "warn", 10, "of the same sample", "")
    assert update_before(replace(summary, alarms=[read, large]), large) is read
    assert root_alarms(replace(summary, alarms=[read, large])) == (read,)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "rates",
    [
        [1e-2] * 40,
        [1e-2 * (step + 1) / 40 for step in range(40)],
        [1e-4] * 2 + [1e-2 * math.sin(math.pi * step / 40) ** 2 + 1e-5 for step in range(3, 41)],
    ],
    ids=["steady", "warm-up", "warm-up and decay"],
)
def test_schedules_are_no_updates_that_are_too_large(rates: list[float], zeros: bool) -> None:
    """Also of weights that begin at zero, which move by many times their size after the first sample."""
    health = trained(rates, lambda step: step in (1, 2, 39), zeros=zeros)
    assert len(health.samples) == 3
    between = [one for one in health.alarms if mentions(one.text, "alarms.update.between")]
    assert between == []


@pytest.mark.parametrize(
    ("drift", "steps", "expected"), [(9.0, (0.001, 0.0), False), (11.0, (0.001, 0.0), True), (11.0, (0.05, 0.0), False),
                                     (11.0, (0.0, 0.004), False), (11.0, (None, 0.0), False), (None, (0.0, 0.0), False)]
)  # fmt: skip
def test_the_bar_between_samples_is_what_sampled_steps_explain(
    drift: float | None, steps: tuple[float | None, float], expected: bool
) -> None:
    """99 steps of 0.05 times the size move a weight by 4.95 times its size at most, and the bar is 3 times that."""
    before = StepSample(1, (call(),), relative_step=steps[0])
    now = StepSample(101, (call(),), relative_step=steps[1], drift=drift)
    assert [one.name for one in holding((before,), now) if one.name == "update"] == ["update"] * expected


# -- layers unlike their neighbours ------------------------------------------------------------------------------------


def layers(*sizes: float) -> list[CallSample]:
    return [call(f"h.{at}", std_logit=size) for at, size in enumerate(sizes)]


def of_layers(*samples: list[CallSample]) -> list[tuple[str, str | None, int]]:
    alarms = [one for one in run(*samples) if one.name == "layer_logits"]
    return [(one.text.id.rpartition(".")[2], one.site, one.step) for one in alarms if isinstance(one.text, Message)]


def test_every_sample_is_judged() -> None:
    usual = layers(0.2, 0.3, 0.2)
    assert of_layers(layers(0.2, 60.0, 0.2), usual) == [("unlike", "h.1", 1)]
    assert of_layers(usual, usual, layers(0.2, 60.0, 0.2), layers(0.2, 90.0, 0.2)) == [("became", "h.1", 20)]
    assert of_layers(layers(0.0, 0.0, 0.0), layers(0.2, 60.0, 0.2)) == [("unlike", "h.1", 10)], "all weights were zero"
    assert of_layers(layers(0.0, 2.0, 0.0), layers(0.01, 2.0, 0.01)) == [("unlike", "h.1", 10)], (
        "first one with a measure"
    )


def test_a_layer_beside_neighbours_whose_logits_vanish_is_not_at_fault() -> None:
    assert of_layers(layers(0.2, 0.3, 0.2), layers(0.001, 0.4, 0.001)) == []


def test_a_layer_that_became_unlike_its_neighbours_is_not_said_to_be_made_so(tmp_path: Path) -> None:
    summary = summarise(read_run(trained_folder(tmp_path)))
    (alarm,) = (one for one in run(layers(0.2, 0.3, 0.2), layers(0.2, 60.0, 0.2)) if one.name == "layer_logits")
    assert mentions(alarm_fix(replace(summary, alarms=[alarm]), alarm), "runs.fix.layer_became")


def trained_folder(folder: Path) -> Path:
    trained([1e-3], 1, folder / "run")
    return folder / "run"


# -- a learning rate that is too high ----------------------------------------------------------------------------------


def stepped(*samples: tuple[float, float], ratio: float = 1.0, rate: float | None = 0.02) -> list[Alarm]:
    """The alarms `update` of a run, from (relative step, largest logit) of each sample."""
    before: list[StepSample] = []
    alarms: list[Alarm] = []
    for at, (step, logit) in enumerate(samples):
        one = replace(call(max_logit=logit), scale_ratio=ratio)
        now = StepSample(10 * at + 1, (one,), relative_step=step, learning_rate=rate)
        alarms += fresh(holding(before, now), alarms)
        before.append(now)
    return [one for one in alarms if one.name == "update"]


# measured on a decoder of 4 layers and width 128 under AdamW at a rate of 0.02
TOO_HIGH = ((0.23, 3.9), (0.035, 58.0), (0.016, 113.0), (0.02, 147.0))


def test_large_steps_that_go_on_until_logits_are_large() -> None:
    (alarm,) = stepped(*TOO_HIGH)
    assert (alarm.severity, alarm.step, alarm.value) == ("warn", 21, 0.016)
    assert str(alarm.text) == (
        "the learning rate of 0.02 is too high: each sampled step from step 1 to step 21 moved the weights that give q "
        "and k by 1.6% of their size or more, and the largest logit grew from 3.9 at step 1 to 113"
    )
    (unknown,) = stepped(*TOO_HIGH, rate=None)
    assert str(unknown.text).startswith("the learning rate is too high: each")


@pytest.mark.parametrize(
    ("samples", "ratio"),
    [
        (((0.05, 0.3), (0.019, 11.0), (0.022, 11.0), (0.024, 19.0)), 1.0),  # weights of 0.02 at a rate of 0.001
        (((0.01, 0.3), (0.049, 14.0), (0.034, 48.0), (0.035, 88.0)), 1.0),  # at 0.003 after a warm-up
        (((0.011, 21.0), (0.003, 60.0), (0.003, 160.0), (0.003, 220.0)), 5.657),  # no scale, at a healthy rate
        (((0.05, 2.0), (0.02, 62.0), (0.02, 110.0), (0.02, 200.0)), 5.657),  # the same with weights of 0.02
        (((0.05, 150.0), (0.02, 160.0), (0.02, 170.0), (0.02, 180.0)), 1.0),  # large from the start
        (((0.227, 3.9), (0.035, 113.0), (0.009, 120.0), (0.02, 130.0)), 1.0),  # steps that became small
        (((0.227, 3.9), (0.035, 113.0)), 1.0),  # too few samples
    ],
)
def test_what_is_no_sign_of_a_learning_rate_that_is_too_high(
    samples: tuple[tuple[float, float], ...], ratio: float
) -> None:
    assert stepped(*samples, ratio=ratio) == []


# -- a scale that is wrong from the first sample on --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "severity", "mistake"),
    [(None, "", ""), (1.0, "fail", "missing"), (1 / 8, "fail", "twice"), (0.5, "warn", "")],
)
def test_a_wrong_scale_is_an_alarm_of_the_first_sample_as_in_a_check(
    scale: float | None, severity: str, mistake: str
) -> None:
    model, x = Scaled(scale), torch.randn(2, 5, 8)
    with Watch(model, every=1, on_alarm=lambda _: None) as health:
        for _ in range(2):
            model(x).square().mean().backward()
            health.step()
    alarms = [one for one in health.alarms if one.name == "scale_ledger"]
    assert [(one.severity, one.step) for one in alarms] == ([(severity, 1)] if severity else [])
    if severity:
        found = [one for one in sqrtdk.check(model, x).findings if one.rule == "scale_ledger"]
        assert [one.severity for one in found] == [severity]
        assert str(found[0].message) in str(alarms[0].text)
        assert mistake in str(alarms[0].text)
        assert alarms[0].value == pytest.approx((scale or 0.0) * 8**0.5)


class Scaled(nn.Module):
    """One head of 8."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.factor = scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unsqueeze(1) for part in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=self.factor).squeeze(1)
