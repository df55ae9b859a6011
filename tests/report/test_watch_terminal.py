"""A run in the terminal, at every width."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from sqrtdk.monitor.reading import read_run
from sqrtdk.report.plain import plain
from sqrtdk.report.watch.compare import compare_runs
from sqrtdk.report.watch.statistics import STATISTIC_BY_COLUMN
from sqrtdk.report.watch.summary import Summary, summarise
from sqrtdk.report.watch.terminal import MOST_ALARMS_PRINTED, comparison_text, live_text, to_text
from tests.support.optional import SnapshotAssertion

COLUMNS = ["max_logit", "entropy_fraction", "scale_ratio", "query_grad_max"]


@pytest.fixture(scope="module")
def sick(runs: dict[str, Path]) -> Summary:
    return dataclasses.replace(summarise(read_run(runs["sick"])), name="runs/sick")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_looks(width: int, sick: Summary, snapshot: SnapshotAssertion) -> None:
    assert to_text(sick, COLUMNS, width=width) == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_looks(width: int, sick: Summary, snapshot: SnapshotAssertion) -> None:
    twice = {"max_logit": 2, "entropy_fraction": 0.95}
    sites = [
        dataclasses.replace(one, values={name: twice.get(name, 1) * some for name, some in one.values.items()})
        for one in sick.sites[:2]
    ]
    other = dataclasses.replace(sick, name="runs/other", sites=tuple(sites), alarms=())
    assert comparison_text(sick, other, compare_runs(sick, other), width=width) == snapshot


@pytest.mark.parametrize("name", ["healthy", "unscaled", "sick"])
def test_fits_and_obeys_nobody(name: str, runs: dict[str, Path]) -> None:
    run = summarise(read_run(runs[name]))
    both = compare_runs(run, run)
    for width in (60, 80, 120, 200):
        for text in (
            to_text(run, list(STATISTIC_BY_COLUMN), width=width),
            comparison_text(run, run, both, width=width),
        ):
            assert max(cell_len(line) for line in text.splitlines()) <= width
            assert text.replace("\n", "").isprintable()
    assert all(plain(site.label) in to_text(run, ["max_logit"], width=120) for site in run.sites)


def test_colours_are_of_a_terminal_alone(sick: Summary) -> None:
    assert "\x1b[" in to_text(sick, COLUMNS, color=True)
    assert "\x1b[" not in to_text(sick, COLUMNS)


def test_of_many_alarms_the_worst_are_shown_and_the_rest_counted(sick: Summary) -> None:
    many = dataclasses.replace(sick, alarms=sick.alarms * 10)
    text = to_text(many, COLUMNS, width=120)
    assert (
        f"the worst {MOST_ALARMS_PRINTED}, and of these the newest; {len(many.alarms) - MOST_ALARMS_PRINTED} more"
        in text
    )
    severities = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and " step " in line]
    assert sorted(severities) == ["critical"] * 10 + ["fail"] * 2
    assert text.count("source: a report") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("lines", "width"), [(12, 80), (24, 80), (24, 40), (50, 200), (200, 100)])
def test_a_terminal_shows_what_fits(lines: int, width: int, sick: Summary) -> None:
    site = sick.sites[0]
    sites = tuple(
        dataclasses.replace(site, site=f"h.{at}", values={name: some + at for name, some in site.values.items()})
        for at in range(48)
    )
    many = dataclasses.replace(sick, sites=sites)
    text = live_text(many, COLUMNS[:2], lines, width=width)
    assert text.startswith("\x1b[H")
    assert text.endswith("\x1b[J")
    shown = text.removeprefix("\x1b[H").removesuffix("\x1b[J").splitlines()
    assert len(shown) < lines
    assert all(line.endswith("\x1b[K") and cell_len(line.removesuffix("\x1b[K")) <= width for line in shown)
    if lines == 24:
        assert "h.47 " in text  # the largest logit
        assert "attentions that are better" in text
    if lines == 200:
        assert all(f"\nh.{at} " in text for at in range(48))


ENGLISH = (
    "attention",
    "not measured",
    "alarm",
    "steps ",
    "worst",
    "newest",
    "site",
    "source:",
    "apart",
    "nowhere",
    "of A",
)


@pytest.mark.parametrize("name", ["healthy", "unscaled"])
def test_chinese_leaves_no_english_words(name: str, runs: dict[str, Path]) -> None:
    run = summarise(read_run(runs[name]))
    texts = (
        to_text(run, list(STATISTIC_BY_COLUMN), width=160, language="zh"),
        comparison_text(run, run, compare_runs(run, run), width=160, language="zh"),
    )
    for text in texts:
        assert max(cell_len(line) for line in text.splitlines()) <= 160
        lines = [line for line in text.splitlines() if "来源：" not in line]
        for site in run.sites:
            lines = [line.replace(plain(site.label), "") for line in lines]
        assert [line for line in lines if any(word in line for word in ENGLISH)] == []
        assert [
            line for line in lines if re.search(r"[\w)%][,;] |\d (?:提示|警告|错误|严重|按原样|以 eager)", line)
        ] == []
