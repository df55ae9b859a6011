"""What is said first of a run: NaN, then the worst alarm, with its step, its reason and what to do."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sqrtdk.audit.rules import RULES
from sqrtdk.audit.tolerance import SCALE_TOLERANCE
from sqrtdk.messages import Message, said
from sqrtdk.monitor.alarms import ALARM_RULES
from sqrtdk.monitor.reading import read_run
from sqrtdk.monitor.samples import Alarm
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.fix import OF_SCALES, RATIO_TOLERANCE, alarm_fix, root_alarms
from sqrtdk.report.watch.headline import compared_headline, run_headline
from sqrtdk.report.watch.html import shown_alarms, to_html
from sqrtdk.report.watch.json import comparison_json, to_json
from sqrtdk.report.watch.summary import Summary, summarise
from sqrtdk.report.watch.terminal import to_text
from tests.monitor.watched_runs import EVERY, STEPS

OTHER_ALARMS = ("idle", "sink", "records", "schedule", "checkpoint", "of a later version")


@pytest.fixture(scope="module")
def told(runs: dict[str, Path]) -> dict[str, Summary]:
    return {name: summarise(read_run(folder)) for name, folder in runs.items()}


def with_ratio(run: Summary, ratio: float) -> Summary:
    sites = [
        dataclasses.replace(one, values=dict(one.values) | {"scale_ratio": np.full_like(one.values["peak"], ratio)})
        for one in run.sites
    ]
    return dataclasses.replace(run, sites=tuple(sites))


def with_losses(run: Summary, bad: dict[int, float]) -> Summary:
    losses = run.losses.copy()
    for step, loss in bad.items():
        losses[run.loss_steps == step] = loss
    return dataclasses.replace(run, losses=losses)


def nonfinite(step: int, key: str, severity: str = "critical", **values: str | int) -> Alarm:
    text = Message(f"alarms.nonfinite.{key}", step=step, **values)
    return Alarm("nonfinite", severity, step, text, "IEEE 754")


def test_a_healthy_run_is_said_to_be_by_its_steps_and_attentions(told: dict[str, Summary]) -> None:
    run = dataclasses.replace(told["healthy"], alarms=())
    head = run_headline(run)
    samples = 1 + STEPS // EVERY
    assert head.text.en == f"Nothing is wrong in {STEPS} steps ({samples} sampled) and 2 attentions"
    assert (head.fix, head.wrong) == ("", False)
    small = run_headline(with_ratio(run, 0.25))
    assert small.text.en.startswith("The scale is 1/4 of 1/sqrt(head_dim) in 2 of 2 attentions; no alarm in ")
    assert "`sqrtdk check MODEL`" in small.fix
    assert not small.wrong, "a model may be meant to be so"


def without_scales(run: Summary) -> Summary:
    """As an older version recorded it: no alarm of a scale that is wrong from the start."""
    return dataclasses.replace(run, alarms=tuple(one for one in run.alarms if one.name not in OF_SCALES))


def test_a_scale_that_is_wrong_from_the_start_is_told_first(told: dict[str, Summary]) -> None:
    run = told["unscaled"]
    head = run_headline(run)
    wrong = "Blocks.0.1: scale 1 instead of 1/sqrt(16) = 0.25, 4 times too large: "
    assert head.text.en.lower().startswith(wrong.lower())
    assert "; logits pass 100 in 2 of 2 attentions since step " in head.text.en
    assert "because" not in head.text.en, "the scale is said once"
    assert head.fix == Message("runs.fix.scale") == run_headline(with_ratio(without_alarms(run), 4.0)).fix


def without_alarms(run: Summary) -> Summary:
    return dataclasses.replace(run, alarms=())


def sustained(step: int, before: int) -> Alarm:
    values = {"before": before, "least": "2%", "first": "4", "start": 1, "size": "160"}
    text = Message("alarms.update.sustained_at_rate", step=step, rate="0.02", **values)
    return Alarm("update", "warn", step, text, "", value=0.02, bar=0.01)


def test_of_a_wrong_scale_and_a_learning_rate_that_is_too_high_both_are_told_first(told: dict[str, Summary]) -> None:
    """Also where nothing else is wrong, and where logits became large in the sample that showed the rate."""
    run = told["unscaled"]
    first = min(alarm.step for alarm in run.alarms if alarm.name == "max_logit" and alarm.severity == "warn")
    rate, scale = sustained(first, first - 8), next(one for one in run.alarms if one.name in OF_SCALES)
    for alarms in ((*run.alarms, rate), (scale, rate)):
        both = dataclasses.replace(run, alarms=alarms)
        head = run_headline(both)
        assert root_alarms(both) == (scale, rate)
        text = head.text.en.lower()
        assert text.index("4 times too large") < text.index("the learning rate of 0.02 is too high")
        assert "nothing is wrong" not in text
        assert said(head.fix, "en").startswith(said(Message("runs.fix.scale"), "en"))
        assert "lower the learning rate first, from 0.02 to about 0.001; " in said(head.fix, "en")


def test_large_logits_are_told_with_their_step_and_the_scale_that_makes_them(told: dict[str, Summary]) -> None:
    run = without_scales(told["unscaled"])
    head = run_headline(run)
    first = next(alarm for alarm in run.alarms if alarm.name == "max_logit" and alarm.severity == "warn")
    assert head.text.en.startswith(f"Logits pass 100 in 2 of 2 attentions since step {first.step}, the largest is ")
    assert "because the scale is 4 times 1/sqrt(head_dim) in 2 of 2 attentions" in head.text.en
    assert "`sqrtdk check MODEL`" in head.fix
    right = run_headline(with_ratio(run, 1.0))
    assert "because q and k are large (the scale is 1/sqrt(head_dim))" in right.text.en
    assert "`sqrtdk.qk_clip_(model, watch, 100)`" in right.fix
    assert "because" not in run_headline(with_ratio(run, math.nan)).text.en
    assert RATIO_TOLERANCE == SCALE_TOLERANCE


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (dict.fromkeys(range(30, STEPS + 1), math.nan), "The loss is NaN from step 30 on"),
        ({30: math.inf}, "The loss is inf at step 30"),
        ({30: math.nan, 34: math.nan}, "The loss is NaN at step 30, and not finite at 2 steps in all"),
    ],
)
def test_a_loss_that_is_not_finite_comes_first_though_no_alarm_names_it(
    bad: dict[int, float], what: str, told: dict[str, Summary]
) -> None:
    run = with_losses(without_scales(told["unscaled"]), bad)
    head = run_headline(run)
    assert head.text.en == what
    assert "`sqrtdk.check(model, batch)` on the batch of step 30" in head.fix
    unsampled = run_headline(dataclasses.replace(run, samples=run.samples[run.samples < 30]))
    assert unsampled.text.en == f"{what}: no step was sampled since, so where it begins is not known"
    assert "`sqrtdk.watch(model, every=1)`" in unsampled.fix


def test_nan_is_told_in_the_order_of_its_steps_with_where_it_begins(told: dict[str, Summary]) -> None:
    run = without_scales(told["unscaled"])
    blame = Message("alarms.nonfinite.blame.product")
    logits = nonfinite(32, "logits", call="h.0", bad="3", rows="9", head=0, blame=blame)
    head = run_headline(dataclasses.replace(run, alarms=(*run.alarms, logits)))
    why = "q and k are finite, the logits are the first tensor that is not"
    assert head.text.en == f"Logits of h.0 hold NaN or infinity since step 32 (finite at step 28): {why}"
    assert "`sqrtdk.check(model, batch)` on the batch of step 32" in head.fix
    scaled = run_headline(dataclasses.replace(run, alarms=(*told["unscaled"].alarms, logits)))
    assert scaled.text.en.startswith(f"{head.text.en}; blocks.0.1: scale 1 instead of "), "no cause of NaN"
    later = run_headline(with_losses(dataclasses.replace(run, alarms=(logits,)), {31: math.nan}))
    assert later.text.en.startswith("The loss is NaN at step 31, logits of h.0 hold NaN")
    before = Message("alarms.nonfinite.blame.before", which="3 numbers of q")
    inherited = Message("joins.semicolon", first=before, second="h.0.norm is the first")
    from_norm = nonfinite(32, "logits", call="h.0", bad="3", rows="9", head=0, blame=inherited)
    assert run_headline(dataclasses.replace(run, alarms=(from_norm,))).text.en.endswith("28): h.0.norm is the first")
    inputs = nonfinite(32, "loss", loss="nan", where=Message("alarms.nonfinite.first.inputs"))
    assert "`torch.isfinite(batch).all()`" in run_headline(dataclasses.replace(run, alarms=(inputs,))).fix
    searching = nonfinite(32, "gradients", "note", call="h.0", which="3 rows", head=0, forward="it is finite")
    assert not run_headline(dataclasses.replace(told["healthy"], alarms=(searching,))).wrong


UPDATE = Message("alarms.update.large_at_rate", step=1, times="507", rate="10")


def test_an_update_that_is_too_large_is_why_logits_are_and_is_lowered_first(told: dict[str, Summary]) -> None:
    run = with_losses(with_ratio(without_scales(told["unscaled"]), 1.0), {2: 1224.0})
    update = Alarm("update", "warn", 1, UPDATE, "", value=507.0, bar=3.0)
    wrong = dataclasses.replace(run, alarms=(update, *run.alarms))
    head = run_headline(wrong)
    began = "Step 1, with a learning rate of 10, moved the weights that give q and k by 507 times their size; "
    assert head.text.en.startswith(f"{began}the loss is 1224 at step 2 and at most ")
    assert head.text.en.count("507") == 1
    assert head.fix.startswith("lower the learning rate first, from 10 to about 0.0002; if the logits still grow: `")
    assert {alarm_fix(wrong, one) for one in wrong.alarms if one.name in ("update", "max_logit")} == {head.fix}
    first = min(alarm.step for alarm in run.alarms if alarm.severity == "warn")
    for step in (first, STEPS):  # a step's logits are measured before its update
        late = dataclasses.replace(run, alarms=(*run.alarms, dataclasses.replace(update, step=step)))
        assert "because q and k are large" in run_headline(late).text.en
    unknown = dataclasses.replace(update, text=Message("alarms.update.large", step=1, times="507"))
    assert "by a factor of 50000 or more" in alarm_fix(run, unknown)
    scaled = dataclasses.replace(told["unscaled"], alarms=wrong.alarms)
    assert "because the scale is 4 times" in run_headline(scaled).text.en


def layer_alarm(run: Summary) -> Alarm:
    call = run.sites[0].label
    text = Message("alarms.layer_logits.unlike", call=call, value="60", step=1, times="200")
    return Alarm("layer_logits", "warn", 1, text, "", site=run.sites[0].site, index=0, value=200.0, bar=100.0)


def test_what_began_it_is_told_before_what_follows_in_headline_terminal_and_page(told: dict[str, Summary]) -> None:
    """A layer of step 1 before the update of step 1, both before logits that are worse and newer, and before NaN."""
    run = with_ratio(without_scales(told["unscaled"]), 1.0)
    layer, update = layer_alarm(run), Alarm("update", "warn", 1, UPDATE, "", value=507.0, bar=3.0)
    worse = tuple(dataclasses.replace(one, severity="critical") for one in run.alarms)
    unlike = f"The logits of {run.sites[0].label} are 200 times its neighbours' at step 1"
    alone = dataclasses.replace(run, alarms=(layer, *worse))
    assert run_headline(alone).text.en.startswith(f"{unlike} (standard deviation within a row: 60); logits pass 50 in")
    assert run_headline(alone).fix == alarm_fix(alone, layer) == Message("runs.fix.layer_logits")
    of_layer = next(one for one in worse if one.name == "max_logit" and one.site == layer.site)
    assert alarm_fix(alone, of_layer) == Message("runs.fix.layer_logits"), "a clip would hide it"
    nan = nonfinite(
        32, "logits", call="h.0", bad="3", rows="9", head=0, blame=Message("alarms.nonfinite.blame.product")
    )
    for alarms in ((update, layer, *worse), (update, layer, *worse, nan)):
        both = dataclasses.replace(run, alarms=alarms)
        said_first = run_headline(both).text.en
        assert said_first.startswith(unlike)
        assert said_first.index("200 times") < said_first.index("507 times") < said_first.lower().index("logits ", 90)
        assert root_alarms(both)[:2] == (layer, update)
        assert [one for _, one in shown_alarms(both)[0][1][:2]] == [layer, update]
        lines = to_text(both, ["max_logit"], width=200).split("\n")
        listed = [line for line in lines if line.lstrip().startswith(("note ", "warn ", "critical "))]
        assert "200 times" in listed[0]
        assert "507 times" in listed[1]
    inputs = nonfinite(32, "loss", loss="nan", where=Message("alarms.nonfinite.first.inputs"))
    batch = dataclasses.replace(run, alarms=(update, inputs))
    assert root_alarms(batch) == (inputs,), "an update changes no batch"
    assert "507" not in run_headline(batch).text.en
    scaled = dataclasses.replace(told["unscaled"], alarms=(layer, *worse))
    assert alarm_fix(scaled, layer) == Message("runs.fix.scale"), "weights are not what a wrong scale enlarges"


def test_where_no_loss_is_on_record_it_says_so_and_what_to_do(told: dict[str, Summary], runs: dict[str, Path]) -> None:
    run = told["unscaled"]
    none = dataclasses.replace(run, losses=run.losses[:0], loss_steps=run.loss_steps[:0])
    assert "; no loss is on record" in run_headline(none).text.en
    records = read_run(runs["unscaled"])
    steps = records.steps.set_column(2, "loss", [[None] * STEPS])
    (entry,) = (one for one in summarise(dataclasses.replace(records, steps=steps)).missing if one.kind == "loss")
    assert "`watch.step(loss)`; in a Trainer set `logging_steps=1`" in entry.message
    some = summarise(dataclasses.replace(records, steps=steps.set_column(2, "loss", [[None] * (STEPS - 1) + [1.0]])))
    assert [one.message for one in some.missing if one.kind == "loss"] == [f"steps without a loss: {STEPS - 1}"]


def test_one_nan_has_one_cure(told: dict[str, Summary]) -> None:
    """The loss of an unsampled step, and what the next sample inherits of it."""
    where = Message("alarms.nonfinite.where.unsampled")
    loss = nonfinite(31, "loss", "fail", loss="nan", where=where)
    later = nonfinite(
        32, "logits", call="h.0", bad="3", rows="9", head=0, blame=Message("alarms.nonfinite.blame.unknown")
    )
    run = dataclasses.replace(told["healthy"], alarms=(loss, later))
    assert {alarm_fix(run, one) for one in run.alarms} == {run_headline(run).fix}
    assert "every=1" in run_headline(run).fix


@pytest.mark.parametrize("key", ["product", "product_float16", "unknown"])
def test_no_checkpoint_is_named_where_there_can_be_none(key: str, told: dict[str, Summary]) -> None:
    blame = Message(f"alarms.nonfinite.blame.{key}")
    for step in (1, 2):
        alarm = nonfinite(step, "logits", call="h.0", bad="3", rows="9", head=0, blame=blame)
        fix = run_headline(dataclasses.replace(told["healthy"], alarms=(alarm,))).fix
        assert "checkpoint" not in fix
        assert not fix.startswith("begin again, ")
        assert "`sqrtdk.check(model, batch)`" in fix
        assert ("bfloat16" in fix) == (key == "product_float16")


def test_a_run_in_float32_gets_no_advice_on_half_precision(told: dict[str, Summary]) -> None:
    run = with_ratio(told["healthy"], 1.0)
    place: dict[str, str | int] = {"call": "h.0", "value": "7e4", "step": 5}
    product = Message("alarms.fp16_range.would_be", **place, dtype="float32")
    offset = Message("alarms.bf16_offset.not_stored", **place, head=0, spacing="0.25")
    for name, text in (("fp16_range", product), ("bf16_offset", offset)):
        fix = alarm_fix(run, Alarm(name, "warn", 5, text, ""))
        assert "float32" not in fix
        assert "train in" not in fix


@pytest.mark.parametrize("name", [*ALARM_RULES, *RULES, *OTHER_ALARMS])
def test_every_alarm_has_a_call_a_command_or_a_page_that_helps(name: str, told: dict[str, Summary]) -> None:
    alarm = Alarm(name, "warn", 5, "", "")
    for run in (with_ratio(told["healthy"], 4.0), with_ratio(told["healthy"], 1.0)):
        fix = alarm_fix(run, alarm)
        for language in ("en", "zh"):
            assert "`" in said(fix, language) or f"docs/{language}/" in said(fix, language)
    scale_first = alarm_fix(with_ratio(told["healthy"], 4.0), alarm) == Message("runs.fix.scale")
    of_large_logits = ("max_logit", "growth", "fp16_range", "saturation", "entropy", "entropy_trend", "collapsed")
    assert scale_first == (name in (*OF_SCALES, *of_large_logits))


def test_of_two_runs_it_says_which_goes_wrong_and_what_differs(told: dict[str, Summary]) -> None:
    good, bad, sick = told["healthy"], told["unscaled"], told["sick"]
    head = compared_headline(good, bad, compare_runs(good, bad))
    assert head.text.en.startswith("B goes wrong and A does not. B: logits pass 100")
    assert head.text.en.endswith("the scale ratio is 1 in A and 4 in B at blocks.0.1, and differs in 2 of 2 attentions")
    assert head.fix == run_headline(bad).fix
    both = compared_headline(bad, sick, compare_runs(bad, sick))
    assert both.text.en.startswith("Both runs go wrong. B: the loss is NaN from step 45 on. A: blocks.0.1: scale 1"), (
        "NaN first"
    )
    quiet = compared_headline(good, good, compare_runs(good, good))
    assert quiet.text.en == "Nothing is wrong in either run; no statistic differs by more than 10%"
    other = dataclasses.replace(good, sites=good.sites[:1])
    assert "farthest apart is" not in compared_headline(good, other, compare_runs(good, other)).text.en
    assert json.loads(comparison_json(good, bad, compare_runs(good, bad)))["headline"] == head.text.en


def test_the_page_has_the_headline_and_the_alarms_above_the_maps_nan_first(told: dict[str, Summary]) -> None:
    run = told["sick"]
    page = to_html([run])
    places = [page.index(text) for text in ("The loss is NaN from step 45 on", '<section id="alarms"', 'id="time"')]
    assert places == sorted(places)
    assert '<section class="outcome bad">' in page
    assert "<code>sqrtdk.check(model, batch)</code>" in page
    assert "clip_grad_norm_" not in run_headline(run).fix
    (_, first), _ = shown_alarms(run)
    severities = [alarm.severity for _, alarm in first]
    assert first[0][1].name == "nonfinite"
    assert severities == sorted(severities, key=("critical", "fail", "warn", "note").index)
    document = json.loads(to_json(run))
    assert document["headline"] == "The loss is NaN from step 45 on"
    assert document["fix"] == document["alarms"][-1]["fix"]
