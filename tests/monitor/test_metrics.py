"""What loggers are given follows from the records of the heads, and docs/en/numbers.md lists it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.monitor.metrics import METRICS, Metric, metrics_of
from sqrtdk.monitor.samples import CallSample, StepSample
from sqrtdk.monitor.sinks import SINKS
from sqrtdk.monitor.watch import watch

PAGES = Path(__file__).parents[2] / "docs" / "en"


class Attention(nn.Module):
    """By hand, so that its logits are known."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 8)).transpose(1, 2)

    def logits(self, x: Tensor) -> Tensor:
        return self._heads(self.q(x)) @ self._heads(self.k(x)).mT / math.sqrt(8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.logits(x).softmax(-1) @ self._heads(self.v(x))).transpose(1, 2).flatten(2)


def test_they_are_those_of_the_logits() -> None:
    """Against the formulas in float64, over two batches of unlike size: no mean of means."""
    model = nn.Sequential(Attention(), nn.LayerNorm(16), Attention())
    batches = [torch.randn(3, 7, 16), 3 * torch.randn(1, 7, 16)]
    with watch(model, every=1) as health:
        for batch in batches:
            model(batch).square().mean().backward()
        health.step()
    found = metrics_of(health.samples[0])
    with torch.no_grad():
        model.double()
        first = torch.cat([model[0].logits(batch.double()) for batch in batches])
        inner = [model[1](model[0](batch.double())) for batch in batches]
        second = torch.cat([model[2].logits(batch) for batch in inner])
    worst: dict[str, list[float]] = {}
    for site, logits in (("0", first), ("2", second)):
        weights = logits.softmax(-1)
        entropy = -(weights * weights.log()).sum(-1)
        expected = {
            "max_attention_logit": logits.max(),
            "max_row_offset": logits.mean(-1).abs().max(),
            "max_std_logit": logits.var(-1, correction=0).mean((0, 2)).sqrt().max(),
            "min_entropy_nats": entropy.mean((0, 2)).min(),
            "min_entropy_fraction": entropy.mean((0, 2)).min() / math.log(7),
            "min_effective_keys": (1 / weights.square().sum(-1)).mean((0, 2)).min(),
            "max_saturated_fraction": (weights.amax(-1) > 0.99).double().mean((0, 2)).max(),
            "max_product": (logits * math.sqrt(8)).abs().max(),
            "nonfinite_rows": torch.tensor(0.0),
            "blind_rows": torch.tensor(0.0),
            "scale_ratio": torch.tensor(1.0),
        }
        for name, value in expected.items():
            # the model ran in float32, whose logits of some units carry some 1e-7 of their size, a few times over
            assert found[f"attention/{site}/{name}"] == pytest.approx(value.item(), rel=2e-5, abs=1e-6), name
            worst.setdefault(name, []).append(found[f"attention/{site}/{name}"])
    for metric in METRICS:
        if metric.worst is not None and metric.name in worst:
            reduced = {"max": max, "min": min, "sum": sum}[metric.worst](worst[metric.name])
            assert found[f"attention/worst/{metric.name}"] == reduced
    assert "attention/worst/scale_ratio" not in found
    assert (found["attention/calls"], found["attention/not_measured"]) == (2.0, 0.0)


def test_gradients_are_in_them() -> None:
    model = Attention()
    with watch(model, every=1) as health:
        for _ in range(2):  # the first shows where the projections are
            model(torch.randn(2, 5, 16)).square().mean().backward()
            health.step()
    columns = health.samples[1].calls[0].columns
    found = metrics_of(health.samples[1])
    for name in ("query", "key"):
        assert found[f"attention/model/max_{name}_grad"] == max(columns[f"{name}_grad_max"]) > 0


def _call(site: str, index: int = 0, reason: str | None = None, **columns: list[float]) -> CallSample:
    return CallSample(site, index, 2, columns, None, "", reason)


def test_what_was_not_measured_has_no_metric() -> None:
    nan = math.nan
    calls = (
        _call("a", max_logit=[nan, 3.0], entropy_nats=[nan, nan], nan_rows=[4.0, 1.0], inf_rows=[0.0, 2.0]),
        _call("b", reason="no statistics"),
        _call("", max_logit=[math.inf, 3.0]),
        _call("", 1, max_logit=[-5.0, -6.0]),
    )
    assert metrics_of(StepSample(1, calls, not_measured=("x: y",))) == {
        "attention/a/max_attention_logit": 3.0,
        "attention/a/nonfinite_rows": 7.0,
        "attention/model/max_attention_logit": math.inf,
        "attention/model.call1/max_attention_logit": -5.0,
        "attention/worst/max_attention_logit": math.inf,
        "attention/worst/nonfinite_rows": 7.0,
        "attention/calls": 3.0,
        "attention/not_measured": 2.0,
    }
    assert metrics_of(StepSample(1, ())) == {"attention/calls": 0.0, "attention/not_measured": 0.0}


def test_every_metric_is_made_of_columns_of_the_records() -> None:
    units = {column.name: column.unit for column in HEAD_COLUMNS}
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert all(units[column] == metric.unit for column in metric.columns or ("scale_ratio",))


def test_rank_zero_reports() -> None:
    """Every rank measures; one of them reports."""

    def steps(rank: int) -> list[int]:
        written: list[int] = []
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        try:
            with watch(layer, every=1, shards="alone", sinks=[lambda step, metrics: written.append(step)]) as health:
                layer(torch.randn(2, 5, 16))
                health.step()
        finally:
            distributed.destroy_process_group()
        assert len(health.samples) == 1
        return written

    assert (steps(0), steps(1)) == ([1], [])


def _row(metric: Metric) -> str:
    of_logits = ["-" if told is None else "yes" if told else "no" for told in (metric.scaled, metric.after_bias)]
    reductions = [metric.rows, metric.heads, metric.worst or "-"]
    cells = [f"`{metric.name}`", metric.meaning.replace("|", "\\|"), metric.unit, *reductions]
    return "| " + " | ".join([*cells, "yes" if metric.signed else "no", *of_logits]) + " |"


def test_the_pages_list_them() -> None:
    """Line by line, so a metric that is changed has to be changed there."""
    text = (PAGES / "numbers.md").read_text(encoding="utf-8")
    table = text[text.index("| metric | what |") :].split("\n\n")[0].splitlines()
    assert table[2:] == [_row(metric) for metric in METRICS]
    loggers = (PAGES / "watch-integrations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+):[^`]+` \|", loggers, re.MULTILINE)) == set(SINKS)
