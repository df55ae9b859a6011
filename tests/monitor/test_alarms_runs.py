"""The alarms of models that really run: what was planted is told at its step, and nothing else of warn or above."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.monitor.samples import Alarm
from sqrtdk.monitor.telling import LOUD
from sqrtdk.monitor.watch import watch


class Attention(nn.Module):
    """Causal attention, written out or fused."""

    def __init__(self, fused: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.fused, self.dtype, self.scale, self.cosine = fused, dtype, 8**-0.5, False
        self.before = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (2, 8)).transpose(1, 2) for one in (self.query, self.key, self.value))
        if self.cosine:
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            q = q.to(self.dtype) * self.before if self.before != 1.0 else q.to(self.dtype)
            logits = q @ k.to(self.dtype).mT * self.scale
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v
        return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, fused: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = Attention(fused, dtype), Attention(fused, dtype)
        self.skipped = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x if self.skipped else x + self.second(x)


def told(model: Model, *changes: Callable[[Model], None]) -> list[Alarm]:
    """Three plain sampled steps, then one after each change; no weight is trained."""
    alarms: list[Alarm] = []
    with watch(model, every=1, on_alarm=alarms.append) as health:
        for change in (lambda _: None,) * 3 + changes:
            with torch.no_grad():
                change(model)
            loss = model(torch.randn(2, 32, 16)).square().mean()
            loss.backward()
            health.step(loss)
    return alarms


def _set(module: str, attribute: str, value: float) -> Callable[[Model], None]:
    return lambda model: setattr(model.get_submodule(module), attribute, value)


def _fill(parameter: str, value: float) -> Callable[[Model], None]:
    return lambda model: model.get_parameter(parameter).view(-1)[:1].fill_(value)  # type: ignore[return-value]


def _times(parameter: str, factor: float) -> Callable[[Model], None]:
    return lambda model: model.get_parameter(parameter).mul_(factor)  # type: ignore[return-value]


@pytest.mark.parametrize("fused", [False, True])
def test_health_is_silent(fused: bool) -> None:
    assert [alarm for alarm in told(Model(fused), *[lambda _: None] * 3) if alarm.severity in LOUD] == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("side", ["query", "key"])
def test_which_tensor_is_not_finite(fused: bool, side: str) -> None:
    alarms = told(Model(fused), _fill(f"second.{side}.bias", math.nan))
    (alarm,) = [alarm for alarm in alarms if alarm.name == "nonfinite"]
    assert (alarm.site, alarm.step, alarm.head) == ("second", 4, 0)
    assert f"64 numbers of {side[0]}" in alarm.text  # one channel of 2 x 32 positions
    assert f"numbers of {'k' if side == 'query' else 'q'}" not in alarm.text


def test_a_product_that_overflows_float16() -> None:
    model = Model(dtype=torch.float16)
    alarms = told(model, *[_times("first.query.weight", 8.0)] * 4, _times("first.query.weight", 1e3))
    ranges = [alarm for alarm in alarms if alarm.name == "fp16_range"]
    (sick,) = [alarm for alarm in alarms if alarm.name == "nonfinite"]
    assert ranges[-1].severity == "fail"
    assert ranges[-1].value == math.inf
    assert sick.site == "first"
    assert "q and k are finite" in sick.text
    assert told(Model(dtype=torch.float16)) == []


def test_a_row_far_off_zero_in_bfloat16() -> None:
    def shift(model: Model) -> None:
        model.first.query.bias.fill_(20.0)
        model.first.key.bias.fill_(20.0)

    (alarm,) = [alarm for alarm in told(Model(dtype=torch.bfloat16), shift) if alarm.name == "bf16_offset"]
    assert (alarm.severity, alarm.site, alarm.step) == ("warn", "first", 4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_was_changed(fused: bool) -> None:
    alarms = told(Model(fused), _set("second", "scale", 0.36))  # 1.8%
    (alarm,) = [alarm for alarm in alarms if alarm.name == "ledger"]
    assert (alarm.severity, alarm.site, alarm.step) == ("warn", "second", 4)
    assert alarm.value == pytest.approx(0.36 * math.sqrt(8))


def test_another_kernel_of_the_same_scale_is_a_note() -> None:
    alarms = told(Model(), lambda model: setattr(model.first, "fused", True))
    assert [(alarm.name, alarm.severity, alarm.site) for alarm in alarms] == [("ledger", "note", "first")]


@pytest.mark.parametrize(("factor", "kind"), [(0.0, "flat"), (1e5, "one-hot")])
def test_heads_that_collapse(factor: float, kind: str) -> None:
    def spread(model: Model) -> None:
        for layer in (model.first, model.second):
            layer.query.weight.mul_(4.0)

    alarms = told(Model(), spread, _times("first.query.weight", factor), _times("first.query.bias", factor))
    collapsed = [alarm for alarm in alarms if alarm.name == "collapsed"]
    assert {(alarm.site, alarm.head) for alarm in collapsed} == {("first", 0), ("first", 1)}
    assert all(kind in alarm.text and alarm.step >= 5 for alarm in collapsed)


def test_frozen_and_saturated_heads() -> None:
    names = [f"{layer}.query.{part}" for layer in ("first", "second") for part in ("weight", "bias")]
    alarms = told(Model(), lambda model: [_times(name, 1e4)(model) for name in names])  # type: ignore[arg-type, return-value]
    assert {"entropy", "saturation"} <= {alarm.name for alarm in alarms if alarm.severity == "warn" and alarm.step == 4}


@pytest.mark.parametrize("cosine", [True, False])
def test_the_entropy_of_cosine_logits_is_held_against_their_scale(cosine: bool) -> None:
    """Cosines of 8 channels times 30 deviate by about 10: frozen by design, and as much as that without a norm."""
    model = Model()
    for layer in (model.first, model.second):
        layer.cosine, layer.scale = cosine, 30.0
        if not cosine:
            for one in (layer.query, layer.key):
                nn.init.normal_(one.weight, 0.0, 0.15)
    warned = {alarm.name for alarm in told(model) if alarm.severity == "warn"}
    assert ("entropy" in warned) is not cosine


def test_a_site_that_disappears() -> None:
    def skip(model: Model) -> None:
        model.skipped = True

    alarms = told(Model(), skip, skip, skip)
    assert [(alarm.name, alarm.site, alarm.step) for alarm in alarms] == [("lost", "second", 5)]


def test_growth_of_a_run() -> None:
    """The q projection grows by 10% a step: logits pass 50 between the steps that are told."""

    def start(model: Model) -> None:
        for name in ("query", "key"):
            model.get_parameter(f"first.{name}.weight").copy_(4.0 * torch.eye(16))

    alarms = told(Model(), start, *[_times("first.query.weight", 1.1)] * 26)
    forecast = next(alarm for alarm in alarms if alarm.name == "growth" and alarm.site == "first")
    reached = next(alarm for alarm in alarms if alarm.name == "max_logit" and alarm.bar == forecast.bar)
    assert forecast.step < reached.step


def alarms_at(product: float, before: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Alarm]:
    """One sampled step in which each q . k of a head is this number, times a factor on q; the scale is 1."""
    model, alarms = Attention(False, dtype), []
    model.scale, model.before = 1.0, before
    with torch.no_grad():
        for part in (model.query, model.key):
            part.weight.copy_(torch.eye(16))
            part.bias.zero_()
        model.query.weight.mul_(product)
    x = torch.zeros(1, 4, 16)
    x[..., 0] = 1.0
    with watch(model, every=1, on_alarm=alarms.append) as health, torch.no_grad():
        model(x)
        health.step()
    assert health.samples[0].calls[0].columns["max_product"] == pytest.approx([product] * 2, rel=1e-3)
    return alarms


@pytest.mark.parametrize(("bar", "severity"), [(50.0, "note"), (100.0, "warn"), (1e3, "fail"), (1e4, "critical")])
def test_each_bar_of_the_largest_logit(bar: float, severity: str) -> None:
    below = {alarm.severity for alarm in alarms_at(bar) if alarm.name == "max_logit"}
    assert severity not in below
    (alarm,) = [alarm for alarm in alarms_at(bar * (1 + 2**-22)) if alarm.name == "max_logit"]
    assert (alarm.severity, alarm.bar, alarm.head) == (severity, bar, 0)


@pytest.mark.parametrize(
    ("product", "before", "severity"),
    [(16000.0, 1.0, None), (16000.0, 2.5, "warn"), (16000.0, 4.0, "warn"), (40000.0, 0.5, None), (60000.0, 0.25, None)],
)
def test_the_range_of_float16_is_that_of_what_the_product_stores(
    product: float, before: float, severity: str | None
) -> None:
    told = [alarm for alarm in alarms_at(product, before, torch.float16) if alarm.name == "fp16_range"]
    assert [alarm.severity for alarm in told] == ([severity] if severity else [])
    assert all(alarm.value == product * before for alarm in told)


@pytest.mark.full
def test_falling_entropy_of_a_run_is_told_before_its_bar() -> None:
    def start(model: Model) -> None:
        for layer in ("first", "second"):
            for name in ("query", "key"):
                model.get_parameter(f"{layer}.{name}.weight").copy_(0.8 * torch.eye(16))
                model.get_parameter(f"{layer}.{name}.bias").zero_()

    def grow(model: Model) -> None:
        for layer in ("first", "second"):
            model.get_parameter(f"{layer}.query.weight").mul_(1.05)

    alarms = told(Model(), start, *[grow] * 40)
    trend = next(alarm for alarm in alarms if alarm.name == "entropy_trend")
    level = next(alarm for alarm in alarms if alarm.name == "entropy" and alarm.severity != "note")
    assert trend.step < level.step
    assert [alarm for alarm in told(Model(), start, *[lambda _: None] * 20) if alarm.severity in LOUD] == []
