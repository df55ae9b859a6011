"""What is told of a run: against its own rows, one by one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from sqrtdk.audit.records import FAIL_ON as AUDIT_FAIL_ON
from sqrtdk.audit.records import SEVERITIES as AUDIT_SEVERITIES
from sqrtdk.monitor.columns import HEADS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report import watch_payload
from sqrtdk.report.watch_compare import APART, compare
from sqrtdk.report.watch_json import comparison_json, to_json
from sqrtdk.report.watch_summary import FAIL_ON, SEVERITIES, STATISTICS, Summary, summarise
from sqrtdk.report.watch_terminal import sparkline
from sqrtdk.report.watch_words import MISSING, STATISTICS_MEAN, missing_text
from watched_runs import EVERY, EVIL, LONG, STEPS


@pytest.fixture
def told(runs: dict[str, Path]) -> dict[str, Summary]:
    return {name: summarise(read_run(folder)) for name, folder in runs.items()}


def test_words_and_columns_belong_together() -> None:
    assert set(STATISTICS) <= {column.name for column in HEADS}
    assert set(STATISTICS) == set(STATISTICS_MEAN)
    assert SEVERITIES == AUDIT_SEVERITIES
    assert FAIL_ON == AUDIT_FAIL_ON


@pytest.mark.parametrize("name", ["healthy", "unscaled", "sick"])
@pytest.mark.parametrize("column", STATISTICS)
def test_the_worst_head_and_the_median_are_those_of_the_rows(
    name: str, column: str, runs: dict[str, Path], told: dict[str, Summary]
) -> None:
    rows = read_run(runs[name]).heads.to_pylist()
    badness = {"largest": lambda v: v, "least": lambda v: -v, "farthest": lambda v: abs(math.log(v))}
    worse = badness[STATISTICS[column].worst]
    for site in told[name].sites:
        own = [row for row in rows if (row["site"], row["index"]) == (site.site, site.index)]
        assert site.steps.tolist() == sorted({row["step"] for row in own})
        worst, at = site.worst(column)
        for place, step in enumerate(site.steps.tolist()):
            values = {row["head"]: row[column] for row in own if row["step"] == step and row[column] is not None}
            if not values:
                assert math.isnan(worst[place])
                assert math.isnan(site.median(column)[place])
                continue
            assert worse(worst[place]) == max(map(worse, values.values()))
            assert values[site.heads[at[place]]] == worst[place]
            some = sorted(values.values())
            middle = (some[(len(some) - 1) // 2] + some[len(some) // 2]) / 2
            assert site.median(column)[place] == pytest.approx(middle, rel=4e-16)  # one rounding of a sum


def test_a_healthy_run_is_whole_and_one_without_a_scale_is_warned_of(told: dict[str, Summary]) -> None:
    healthy, unscaled = told["healthy"], told["unscaled"]
    assert healthy.samples.tolist() == [1, *range(EVERY, STEPS + 1, EVERY)]
    assert healthy.missing == ()
    assert len(healthy.losses) == healthy.recorded == STEPS
    assert {alarm.severity for alarm in healthy.alarms} <= {"note"}
    assert healthy.exit_code("warn") == 0
    assert unscaled.counts["warn"] >= 1
    assert [unscaled.exit_code(bar) for bar in ("note", "warn", "never")] == [1, 1, 0]
    notes = tuple(alarm for alarm in unscaled.alarms if alarm.severity == "note")
    assert [dataclasses.replace(unscaled, alarms=notes).exit_code(bar) for bar in ("note", "warn", "fail")] == [1, 0, 0]
    ratios = [float(value) for site in unscaled.sites for value in site.worst("scale_ratio")[0]]
    assert ratios == [4.0] * len(ratios)  # 1 / (1 / sqrt(16)), exact in binary


def test_all_that_is_missing_is_named_and_counted(told: dict[str, Summary]) -> None:
    entries = {(entry.kind, entry.what): entry for entry in told["sick"].missing}
    (part,) = (entry for entry in told["sick"].missing if entry.kind == "damaged")
    assert (part.first_step, part.last_step) == (51, 60)
    assert "not what its name says" in part.reason
    gap = entries["gap", "2"]
    assert (gap.count, gap.first_step, gap.last_step) == (10, 31, 40)
    failed = entries["steps", ""]
    assert (failed.count, failed.first_step, failed.reason) == (1, 50, "no attention ran")
    # 4 calls ran at each of 7 samples; 3 sites have rows at 6 of them, 2 at step 45
    assert entries["calls", ""].count == 6 * 1 + 2
    assert (entries["absent", EVIL].count, entries["absent", EVIL].first_step) == (1, 45)
    assert entries["nan_rows", LONG].count == 3  # 45 // 40 in each of three heads
    assert entries["loss", ""].count == 1
    assert entries["statistic", "query_grad_max, key_grad_max"].count == 3
    assert {kind for kind, _ in entries} == set(MISSING) - {"nothing", "blind_rows", "inf_rows"}
    for entry in told["sick"].missing:
        assert str(entry.count) in missing_text(entry).zh or entry.kind == "damaged"


def test_exit_codes_follow_the_worst_alarm(told: dict[str, Summary]) -> None:
    assert [told["sick"].exit_code(bar) for bar in FAIL_ON] == [1, 1, 1, 1, 1, 0]
    assert told["healthy"].exit_code("unmeasured") == 0


def test_a_loss_of_nan_is_a_loss(told: dict[str, Summary]) -> None:
    sick = told["sick"]
    lost = sick.loss_steps[[math.isnan(value) for value in sick.losses.tolist()]]
    assert lost.tolist() == [45, 46, 47, 48, 49, 50]
    assert 5 not in sick.loss_steps


def test_a_run_without_a_step_is_told_too(tmp_path: Path) -> None:
    RunWriter(tmp_path, model={}, settings={}).close()
    empty = summarise(read_run(tmp_path))
    assert (empty.first_step, empty.sites, empty.recorded) == (None, (), 0)
    assert [entry.kind for entry in empty.missing] == ["nothing"]
    assert json.loads(to_json(empty))["sites"] == []


def test_the_document_has_the_trends(told: dict[str, Summary]) -> None:
    document = json.loads(to_json(told["unscaled"]))
    site = document["sites"][0]
    own = told["unscaled"].sites[0]
    assert site["statistics"]["max_logit"]["worst"] == own.worst("max_logit")[0].tolist()
    assert site["statistics"]["query_grad_p50"]["head"][0] is not None
    assert document["alarms"][0]["source"] == told["unscaled"].alarms[0].source
    assert document["missing"] == []
    assert json.loads(to_json(told["sick"]))["missing"]


def test_two_runs_are_held_against_each_other_at_the_last_step_of_both(told: dict[str, Summary]) -> None:
    a, b = told["healthy"], told["unscaled"]
    both = compare(a, b)
    assert both.step == STEPS
    logits = both.differences[0]
    assert logits.column == "max_logit"
    assert [pair.a for pair in logits.pairs] == [site.worst("max_logit")[0][-1] for site in a.sites]
    assert logits.count == len(logits.pairs) == 2
    same = compare(a, a)
    assert [one.count for one in same.differences] == [0] * len(STATISTICS)
    other = compare(a, told["sick"])
    assert (other.only_a, len(other.only_b)) == (("blocks.0.1", "blocks.1.1"), 3)
    assert json.loads(comparison_json(a, b, both))["differences"][0]["sites_that_differ"] == 2
    assert 0 < APART < 1


def test_columns_that_hold_several_samples_keep_the_worst(
    told: dict[str, Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_payload, "MOST_COLUMNS", 8)
    drawn = watch_payload.payload([told["unscaled"]])
    site, own = drawn["runs"][0]["sites"][0], told["unscaled"].sites[0]
    assert drawn["samples_a_column"] == 2
    assert len(site["steps"]) == 7
    assert site["steps"][-1] == own.steps[-1]
    for column in ("max_logit", "entropy_fraction"):
        most = (min if STATISTICS[column].worst == "least" else max)(own.worst(column)[0].tolist())
        drawn_values = [value for head in site["values"][column] for value in head]
        assert float(f"{most:.4g}") in drawn_values
        assert len(site["values"][column]) == len(own.heads)


def test_of_many_alarms_the_worst_are_drawn(told: dict[str, Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_payload, "MOST_ALARMS", 2)
    run = told["sick"]
    assert [run.alarms[at].severity for at in watch_payload.alarms_shown(run)] == ["fail", "critical"]


def test_small_bars() -> None:
    assert sparkline([], 10, 0, 1) == ""
    assert sparkline([math.inf, -math.inf, math.nan], 3, 0, 1) == "█▁·"
    assert sparkline([2, 2], 5, 2, 2) == "▁▁"
    assert len(sparkline(range(1000), 37, 0, 999)) == 37
