"""What a watch could not measure is counted, named in the folder, shown, and fails on request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from sqrtdk import cli
from sqrtdk.audit.records import FAIL_ON
from sqrtdk.messages import said
from sqrtdk.monitor import journal
from sqrtdk.monitor.forwards import StepTracer
from sqrtdk.monitor.reading import Run, read_run
from sqrtdk.monitor.telling import AttentionWarning
from sqrtdk.monitor.watch import Watch
from sqrtdk.report.watch.json import to_json
from sqrtdk.report.watch.summary import summarise
from sqrtdk.report.watch.terminal import to_text
from tests.monitor.watched_models import Attend

WRONG_AXIS = "the weights of a query do not sum to 1"


class Overturned(nn.Module):
    """A softmax over the wrong axis: no attention whose rows have statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 8**0.5).softmax(-2) @ v


class Model(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).sum() for part in self.parts]).sum()


def watched(folder: Path, model: nn.Module, work: Callable[[Watch], object], **options: object) -> Run:
    with Watch(model, every=1, to=folder, on_alarm=lambda alarm: None, **options) as health:  # type: ignore[arg-type]
        work(health)
    return read_run(folder)


def steps(model: nn.Module, count: int) -> Callable[[Watch], None]:
    def work(health: Watch) -> None:
        for _ in range(count):
            model(torch.randn(2, 5, 8)).backward()
            health.step(1.0)

    return work


@pytest.fixture
def mixed(tmp_path: Path) -> Run:
    """One attention with statistics and two without, in two attempts."""
    for _ in range(2):
        model = Model(Attend(), Overturned(), Overturned())
        watched(tmp_path / "run", model, steps(model, 3))
    return read_run(tmp_path / "run")


def test_attentions_without_statistics_are_counted_and_named_once_an_attempt(mixed: Run) -> None:
    assert mixed.steps["calls"].to_pylist() == [1] * 6
    assert mixed.steps["unmeasured"].to_pylist() == [4, 2, 2, 4, 2, 2]  # at first their gradients, too
    assert set(mixed.heads["site"].to_pylist()) == {"parts.0"}
    noted = [row for row in mixed.alarms.to_pylist() if row["name"] == "unmeasured" and row["site"] is not None]
    assert [(row["step"], row["site"], row["severity"]) for row in noted] == [
        (step, site, "note") for step in (1, 4) for site in ("parts.1", "parts.2")
    ]
    assert all(WRONG_AXIS in row["text"] for row in noted)


def test_they_are_shown_and_fail_on_request(mixed: Run) -> None:
    summary = summarise(mixed)
    entry, gradients = (entry for entry in summary.missing if entry.kind == "unmeasured")
    assert (gradients.what, gradients.count) == ("parts.1, parts.2", 2)
    assert "no gradients of query" in gradients.reason
    assert entry.what == "parts.1, parts.2"
    assert (entry.count, entry.first_step, entry.last_step) == (2, 1, 4)
    assert "一个查询的权重之和不为 1" in said(entry.message, "zh")
    (calls,) = [entry for entry in summary.missing if entry.kind == "calls"]
    assert (calls.count, calls.first_step, calls.last_step) == (16, 1, 6)
    flat = " ".join(to_text(summary, ["max_logit"]).split())
    assert "parts.1, parts.2: " + WRONG_AXIS in flat
    assert "unmeasured" not in {alarm.name for alarm in summary.alarms}
    document = json.loads(to_json(summary))
    assert any(WRONG_AXIS in entry["reason"] for entry in document["missing"])
    assert [summary.exit_code(bar) for bar in FAIL_ON] == [1, 0, 1, 0, 0, 0]
    show = ["watch", "show", str(mixed.folder)]
    strict = CliRunner().invoke(cli._app, [*show, "--fail-on", "unmeasured"], prog_name="sqrtdk")
    assert strict.exit_code == 1
    assert WRONG_AXIS in " ".join(strict.stdout.split())
    assert CliRunner().invoke(cli._app, show, prog_name="sqrtdk").exit_code == 0


def test_a_step_of_which_nothing_was_measured(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    run = watched(tmp_path / "run", model, lambda health: (model(torch.randn(2, 8)), health.step()))
    assert run.steps["calls"].to_pylist() == [0]
    assert run.steps["unmeasured"].to_pylist() == [1]
    assert ("unmeasured", "no attention ran in the model") in named(run)
    summary = summarise(run)
    assert [entry.kind for entry in summary.missing if entry.reason] == ["steps"]  # and is not told twice
    assert summary.exit_code("unmeasured") == 1


def test_a_step_that_is_never_ended_is_in_the_records(tmp_path: Path) -> None:
    model = Attend()
    run = watched(tmp_path / "run", model, lambda health: model(torch.randn(2, 5, 8)))
    assert [name for name, _ in named(run)] == ["idle"]
    (row,) = run.steps.to_pylist()
    assert (row["step"], row["sampled"], row["calls"], row["unmeasured"]) == (1, True, 0, 1)
    assert row["how"].startswith("not measured: step() was never called, 1 forward pass")
    summary = summarise(run)
    assert [summary.exit_code(bar) for bar in ("warn", "unmeasured", "fail")] == [1, 1, 0]


def test_a_run_without_a_forward_pass_records_nothing(tmp_path: Path) -> None:
    run = watched(tmp_path / "run", Attend(), lambda health: None)
    assert (run.steps.num_rows, run.alarms.num_rows) == (0, 0)


@pytest.mark.parametrize("samples", [1, 3, 100])
def test_each_part_holds_the_alarms_of_its_steps(samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SAMPLES_A_PART", samples)
    model = Model(Attend(), Overturned())
    run = watched(tmp_path / "run", model, steps(model, 7))
    assert run.steps["step"].to_pylist() == [*range(1, 8)]
    assert run.heads["step"].to_pylist() == [step for step in range(1, 8) for _ in range(2)]
    assert [(row["step"], row["name"]) for row in run.alarms.to_pylist()] == [(1, "unmeasured")] * 2


# -- forward passes without autograd -----------------------------------------------------------------------------------


def passes(model: nn.Module, kinds: str) -> None:
    """Forward passes of 3 rows with autograd ("g") or without ("n")."""
    for kind in kinds:
        with torch.set_grad_enabled(kind == "g"):
            model(torch.randn(1, 3, 8))


@pytest.mark.parametrize(
    ("kinds", "rows", "left_out"),
    [("g", 3.0, 0), ("nnn", 9.0, 0), ("nng", 3.0, 2), ("gnn", 3.0, 2), ("ngngn", 6.0, 3)],
)
def test_passes_without_autograd_count_where_no_other_does(kinds: str, rows: float, left_out: int) -> None:
    model = Attend()
    with Watch(model, every=1, on_alarm=lambda alarm: None) as health:
        passes(model, kinds)
        health.step()
    (sample,) = health.samples
    assert sample.calls[0].columns["rows"] == [rows, rows]
    told = [text for text in sample.not_measured if "without autograd" in text]
    assert [text.split()[0] for text in told] == ([str(left_out)] if left_out else [])


def test_text_that_a_policy_generates_is_not_traced_once_it_is_known_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traced, added = Attend(), [], StepTracer._add
    monkeypatch.setattr(
        "sqrtdk.monitor.forwards.StepTracer._add", lambda self, trace: traced.append(1) or added(self, trace)
    )
    with Watch(model, every=1, on_alarm=lambda alarm: None) as health:
        for _ in range(3):
            passes(model, "nnnnng")
            health.step()
    assert len(traced) == (5 + 1) + 1 + 1
    assert [sample.calls[0].columns["rows"] for sample in health.samples] == [[3.0, 3.0]] * 3
    assert len([alarm for alarm in health.alarms if "without autograd" in alarm.text]) == 1
    with Watch(model, every=1) as health:
        with health.paused():
            passes(model, "nn")
        passes(model, "g")
        health.step()
    assert health.samples[0].unmeasured == 0


def test_a_step_without_autograd_in_a_run_that_has_it_is_not_measured() -> None:
    model = Attend()
    with Watch(model, every=1) as health:
        passes(model, "g")
        health.step()
        passes(model, "nn")
        with pytest.warns(AttentionWarning, match="2 forward passes without autograd"):
            health.step()
    assert health.samples[1].calls == ()


# -- numbers that are not finite, on runs that have them ---------------------------------------------------------------


class Hurt(Attend):
    """Its gradients, or its loss, are not finite, and all that its attention meets is."""

    part = ""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.part == "loss":
            return out.sum() * math.inf
        if self.part == "gradient":
            return torch.where(out > 1e9, (-1 - out.abs()).sqrt(), 0.0 * out).sum()  # NaN has a gradient behind it
        return out.sum()


@pytest.mark.parametrize("part", ["loss", "gradient", ""])
@pytest.mark.parametrize(
    "scaler", [None, torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", enabled=False)]
)
def test_the_first_tensor_of_a_run_that_is_not_finite(part: str, scaler: torch.amp.GradScaler | None) -> None:
    model, told = Hurt(), []
    with Watch(model, every=1, on_alarm=told.append, scaler=scaler) as health:
        for step in range(3):
            model.part = part if step else ""
            loss = model(torch.randn(2, 5, 8))
            (loss if scaler is None else scaler.scale(loss)).backward()
            health.step(loss)
    alarms = [(alarm.severity, alarm.step, alarm.site) for alarm in told if alarm.name == "nonfinite"]
    gradient = ("note" if scaler is not None and scaler.is_enabled() else "critical", 2, "")
    assert alarms == {"loss": [("critical", 2, None)], "gradient": [gradient], "": []}[part]
    columns = health.samples[-1].calls[0].columns
    assert sum(columns["query_grad_nonfinite"]) == (20.0 if part else 0.0)  # 10 rows of 2 heads
    assert columns["query_nonfinite"] == [0.0, 0.0]


def test_they_are_in_the_records(tmp_path: Path) -> None:
    model = Hurt()
    model.part = "gradient"
    run = watched(tmp_path / "run", model, steps(model, 2))
    assert [row["query_grad_nonfinite"] for row in run.heads.to_pylist()] == [10.0] * 4
    assert {row["key_nonfinite"] for row in run.heads.to_pylist()} == {0.0}


def named(run: Run) -> list[tuple[str, str]]:
    return [(row["name"], row["text"]) for row in run.alarms.to_pylist()]
