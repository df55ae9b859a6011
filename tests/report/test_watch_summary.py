"""What is told of a run: against its own rows, one by one."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqrtdk.audit.records import FAIL_ON as AUDIT_FAIL_ON
from sqrtdk.audit.records import SEVERITIES as AUDIT_SEVERITIES
from sqrtdk.audit.rules import RULES
from sqrtdk.cli.options import Severity
from sqrtdk.messages import said
from sqrtdk.messages._catalogue import topic
from sqrtdk.monitor.alarms import ALARM_RULES
from sqrtdk.monitor.columns import HEAD_COLUMNS
from sqrtdk.monitor.folder import RunWriter
from sqrtdk.monitor.reading import read_run
from sqrtdk.report.watch import payload as watch_payload
from sqrtdk.report.watch.compare import NOTABLE_DIFFERENCE, SAMPLES_COMPARED, Pair, StatisticDifference, compare_runs
from sqrtdk.report.watch.html import to_html
from sqrtdk.report.watch.json import comparison_json, to_json
from sqrtdk.report.watch.missing import MISSING
from sqrtdk.report.watch.sparkline import sparkline
from sqrtdk.report.watch.statistics import NEWEST, STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import SEVERITY_ORDER, Summary, summarise, update_sentence
from sqrtdk.report.watch.terminal import to_text
from tests.monitor.watched_runs import EVERY, EVIL, LONG, STEPS


@pytest.fixture(scope="module")
def told(runs: dict[str, Path]) -> dict[str, Summary]:
    return {name: summarise(read_run(folder)) for name, folder in runs.items()}


def test_words_and_columns_belong_together() -> None:
    measured = {column.name for column in HEAD_COLUMNS if column.type == "float64"}
    assert set(STATISTIC_BY_COLUMN) == measured - {"keys"} | {"nan_rows"}
    assert set(NEWEST) < set(STATISTIC_BY_COLUMN)
    rules = set(ALARM_RULES)
    assert len(rules) > 10
    named = {key.removeprefix("alarm.") for key in topic("watch") if key.startswith("alarm.")}
    assert rules | {"idle", "sink", "records", "schedule", "checkpoint"} | set(RULES) == named
    assert SEVERITY_ORDER == AUDIT_SEVERITIES
    assert Severity.__args__ == AUDIT_FAIL_ON  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["healthy", "unscaled", "sick"])
def test_the_worst_head_and_the_median_are_those_of_the_rows(
    name: str, runs: dict[str, Path], told: dict[str, Summary]
) -> None:
    rows = read_run(runs[name]).heads.to_pylist()
    badness = {"largest": lambda v: v, "least": lambda v: -v, "farthest": lambda v: abs(math.log(v))}
    for column, site in itertools.product(STATISTIC_BY_COLUMN, told[name].sites):
        worse = badness[STATISTIC_BY_COLUMN[column].worst]
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
        assert str(entry.count) in said(entry.message, "zh") or entry.kind == "damaged"


def test_exit_codes_follow_the_worst_alarm(told: dict[str, Summary]) -> None:
    assert [told["sick"].exit_code(bar) for bar in AUDIT_FAIL_ON] == [1, 1, 1, 1, 1, 0]
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


def test_two_runs_are_held_against_each_other_over_the_last_steps_of_both(told: dict[str, Summary]) -> None:
    a, b = told["healthy"], told["unscaled"]
    both = compare_runs(a, b)
    assert both.steps_a == both.steps_b == tuple(a.samples.tolist()[-SAMPLES_COMPARED:])
    (logits,) = (one for one in both.differences if one.column == "max_logit")
    for pair, one, other in zip(logits.pairs, a.sites, b.sites, strict=True):
        assert pair.a == sorted(one.worst("max_logit")[0][-SAMPLES_COMPARED:])[SAMPLES_COMPARED // 2]
        assert pair.b == sorted(other.worst("max_logit")[0][-SAMPLES_COMPARED:])[SAMPLES_COMPARED // 2]
    assert logits.count == len(logits.pairs) == 2
    typical = [one.typical or 0.0 for one in both.differences]
    assert typical == sorted(typical, reverse=True)
    assert typical[0] > 0.5 > typical[-1]
    same = compare_runs(a, a)
    assert [one.count for one in same.differences] == [0] * len(STATISTIC_BY_COLUMN)
    document = json.loads(comparison_json(a, b, both))
    assert [one["statistic"] for one in document["differences"]] == [one.column for one in both.differences]
    assert document["steps_a"] == list(both.steps_a)
    assert 0 < NOTABLE_DIFFERENCE < 1


def test_runs_of_other_length_cadence_and_sites(told: dict[str, Summary]) -> None:
    a, sick = told["healthy"], told["sick"]
    other = compare_runs(a, sick)
    assert (other.by, other.only_a, len(other.only_b)) == ("name", ("blocks.0.1", "blocks.1.1"), 3)
    assert not other.measured
    same_number = dataclasses.replace(sick, sites=sick.sites[:2])
    both = compare_runs(a, same_number)
    assert (both.by, both.only_a, both.only_b) == ("order", (), ())
    assert both.differences[0].pairs[0].label == f"blocks.0.1 | {sick.sites[0].label}"
    # sampled at 5, 10, ... and at 1, 4, 8, ...: the nearest of the run with more samples stand beside the others
    assert (both.steps_a, both.steps_b) == ((16, 20, 24, 28, 44), (15, 20, 25, 30, 45))
    later = dataclasses.replace(a, sites=tuple(dataclasses.replace(one, steps=one.steps + 1000) for one in a.sites))
    apart = compare_runs(a, later)
    assert not apart.overlap
    assert apart.steps_b == tuple(step + 1000 for step in apart.steps_a)


def test_one_nan_or_infinity_does_not_lead_a_comparison(told: dict[str, Summary]) -> None:
    a = told["healthy"]
    values = {name: some.copy() for name, some in a.sites[0].values.items()}
    values["peak"][[-5, -4]] = math.nan
    values["std_logit"][-2] = math.inf
    odd = dataclasses.replace(a, sites=(dataclasses.replace(a.sites[0], values=values), *a.sites[1:]))
    differences = {one.column: one for one in compare_runs(a, odd).differences}
    assert differences["peak"].measured == 2
    three = a.sites[0].worst("peak")[0][-3:]
    assert differences["peak"].pairs[0].b == sorted(three.tolist())[1]
    assert max(differences[name].typical or 0.0 for name in ("peak", "std_logit")) < 0.2
    pairs = (Pair("a", 1.0, math.inf), Pair("b", None, 2.0), Pair("c", 1.0, 1.0), Pair("d", 2.0, 1.0))
    assert (StatisticDifference("peak", pairs).typical, StatisticDifference("peak", pairs).measured) == (0.5, 3)


def unpacked(drawn: dict[str, Any], series: list[int], count: int) -> list[float]:
    """A series of the page's block, read by the words of its writer."""
    planes = zlib.decompress(base64.b64decode(drawn["block"]))
    high, low = planes[: len(planes) // 2], planes[len(planes) // 2 :]
    start, length, *exponent = series
    bits = [(high[at] << 8) | low[at] for at in range(start, start + length)] * (count if length == 1 else 1)
    if not exponent:
        return [float(one) for one in bits]
    return [struct.unpack("<e", struct.pack("<H", one))[0] * 2.0 ** exponent[0] for one in bits]


def close(series: list[float], values: list[float]) -> None:
    """11 bits, and nothing below 2 ** -24 where the largest is between 2 ** 14 and 2 ** 15."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    assert series == pytest.approx(values, rel=2**-11, abs=largest * 2**-39, nan_ok=True)


@pytest.mark.parametrize("name", ["unscaled", "sick"])
def test_the_numbers_on_the_page_are_those_of_the_run(name: str, told: dict[str, Summary]) -> None:
    drawn = watch_payload.watch_page_data([told[name]])
    assert (drawn["samples_a_column"], drawn["samples_a_point"]) == (1, 1)
    for site, own in zip(drawn["runs"][0]["sites"], told[name].sites, strict=True):
        for column in STATISTIC_BY_COLUMN:
            count, size = len(own.steps), own.values[column].size
            worst, at = own.worst(column)
            nobody = [math.isnan(value) for value in worst.tolist()]
            wanted = [0xFFFF if none else place for none, place in zip(nobody, at.tolist(), strict=True)]
            assert unpacked(drawn, site["who"][column], count) == wanted
            for series, values in (
                (unpacked(drawn, site["worst"][column], count), worst),
                (unpacked(drawn, site["medians"][column], count), own.median(column)),
                (unpacked(drawn, site["values"][column], size), own.values[column].T.ravel()),
            ):
                close(series, values.tolist())


def test_numbers_of_any_size_fit() -> None:
    for some in ([1e-300, 3e-301], [1e300, -2e299], [0.0, 0.0], [math.inf, 1e5, -math.inf, math.nan], [3.5, 0.0]):
        block = watch_payload.NumberBlock()
        series = block.numbers(np.array(some))
        drawn = {"block": block.text()}
        close(unpacked(drawn, series, len(some)), some)


def test_columns_that_hold_several_samples_keep_the_worst(
    told: dict[str, Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = told["unscaled"].sites[0]
    monkeypatch.setattr(watch_payload, "MOST_COLUMNS", 8)
    monkeypatch.setattr(watch_payload, "MOST_NUMBERS_OF_PAGE", 4 * len(own.heads) * 2 * len(STATISTIC_BY_COLUMN))
    drawn = watch_payload.watch_page_data([told["unscaled"]])
    site = drawn["runs"][0]["sites"][0]
    assert (drawn["samples_a_column"], drawn["samples_a_point"]) == (2, 4)
    assert (len(site["steps"]), len(site["points"])) == (7, 4)
    assert site["steps"][-1] == site["points"][-1] == own.steps[-1]
    for column in ("max_logit", "entropy_fraction"):
        worse = min if STATISTIC_BY_COLUMN[column].worst == "least" else max
        most = worse(own.worst(column)[0].tolist())
        assert worse(unpacked(drawn, site["worst"][column], 7)) == pytest.approx(most, rel=2**-11)
        heads = unpacked(drawn, site["values"][column], 4 * len(own.heads))
        assert len(heads) == 4 * len(own.heads)
        assert worse(heads) == pytest.approx(most, rel=2**-11)


def test_a_loss_of_nan_is_drawn_however_many_there_are(
    told: dict[str, Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_payload, "MOST_LOSSES", 5)
    steps, losses = watch_payload.watch_page_data([told["sick"]])["runs"][0]["loss"]
    assert len(losses) == 5
    assert None in losses
    assert max(loss for loss in losses if loss is not None) == told["sick"].losses[0]
    assert steps == sorted(steps)


def test_of_many_alarms_the_worst_are_drawn(told: dict[str, Summary], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_payload, "MOST_ALARMS_OF_PAGE", 2)
    run = told["sick"]
    assert [run.alarms[at].severity for at in watch_payload.alarms_shown(run)] == ["fail", "critical"]


def test_small_bars() -> None:
    assert sparkline([], 10, 0, 1) == ""
    assert sparkline([math.inf, -math.inf, math.nan], 3, 0, 1) == "█▁·"
    assert sparkline([2, 2], 5, 2, 2) == "▁▁"
    assert len(sparkline(range(1000), 37, 0, 999)) == 37


def test_how_far_a_step_moves_the_weights_is_said_with_the_learning_rate(told: dict[str, Summary]) -> None:
    at, steps = np.array([1, 40]), np.array([0.227, 0.00068])
    moved = {"relative_step": (at, steps)}
    text = "the weights that give q and k: moved by 23% of their size in step 1, by 0.068% in step 40"
    for rates, said_rate in (
        (None, "learning rate not known: `sqrtdk.watch(optimizer=...)` records it"),
        ([0.02, 0.02], "learning rate 0.02"),
        ([0.0004, 0.01], "learning rate 0.0004 in step 1, 0.01 in step 40, at most 0.01"),
    ):
        updates = moved if rates is None else moved | {"learning_rate": (at, np.array(rates))}
        run = dataclasses.replace(told["healthy"], updates=updates)
        assert str(update_sentence(run)) == f"{text}; {said_rate}"
        assert f"{text}; {said_rate}" in " ".join(to_text(run, ["max_logit"], width=240).split())
        chinese = said(update_sentence(run) or "", "zh")
        assert chinese.partition("`")[0] in to_html([run])  # from there on it is marked as code
    assert update_sentence(dataclasses.replace(told["healthy"], updates={})) is None
