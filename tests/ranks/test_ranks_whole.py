"""The report of several ranks is that of one process: every statistic in float64, masks, formulas, and the findings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk.audit.records import CheckReport
from tests.monitor.ranks_at_work import run
from tests.ranks import split_models
from tests.ranks.split_models import CASES, FAULTS, FOUR, LENGTH, QUICK, Decoder, alone, whole, windowed
from tests.support.once import made_once
from tests.support.two_ranks import two_ranks as two_ranks
from tests.tolerances import allowed

Reports = Sequence[dict[str, CheckReport]]
WAYS = {
    "heads": ("heads",),
    "data": ("batch",),
    "stages": (),
    "ring_of_heads": ("rows", "heads"),
    "batches_of_heads": ("heads", "batch"),
}
ORDERS = {"zigzag": "zigzag", "halves": "zigzag", "window": "zigzag", "striped": "given", "gathered_zigzag": "given"}


def _read(folder: Path, size: int) -> Reports:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def quick(two_ranks: Path) -> Reports:
    return _read(two_ranks / "whole", 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    made = made_once(tmp_path_factory, "whole-of-two", lambda folder: run(split_models.all_cases, 2, folder))
    return _read(made, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    made = made_once(tmp_path_factory, "whole-of-four", lambda folder: run(split_models.all_cases, 4, folder))
    return _read(made, 4)


@functools.cache
def _alone(meet: str) -> CheckReport:
    with torch.no_grad():
        return sqrtdk.check(Decoder(windowed if meet == "window" else alone).eval(), whole(), laws="none")


def _judge(reports: Reports, name: str) -> None:
    """One report on all ranks, with the calls of one process."""
    first, *others = (report[name] for report in reports)
    for other in others:
        assert (other.exit_code, other.findings, other.ranks) == (first.exit_code, first.findings, first.ranks)
        assert [judged.call for judged in other.calls] == [judged.call for judged in first.calls]
    right = _alone("window" if name == "window" else "plain")
    assert first.ranks is not None
    assert first.ranks.count == len(reports)
    assert not first.findings
    assert len(first.calls) == len(right.calls)
    for mine, theirs, split in zip(first.calls, right.calls, first.ranks.attentions, strict=True):
        assert split.ways == WAYS.get(name, ("rows",))
        assert split.order == ORDERS.get(name, "" if name in WAYS and name != "ring_of_heads" else "plain")
        _judge_call(mine.call, theirs.call)
        assert (mine.verdict, mine.health) == (theirs.verdict, theirs.health)


def _judge_call(mine: sqrtdk.tracing.AttentionCall, theirs: sqrtdk.tracing.AttentionCall) -> None:
    for size in ("formula", "batch", "heads", "kv_heads", "query_len", "key_len", "head_dim", "part_of_row"):
        assert getattr(mine, size) == getattr(theirs, size), size
    assert mine.mask is not None
    assert theirs.mask is not None
    for part in ("kind", "least", "greatest", "band", "blind_rows", "uniform_rows", "ahead_by_one"):
        assert getattr(mine.mask, part) == getattr(theirs.mask, part), part
    limit = allowed(torch.float64, length=LENGTH, logit=40.0, magnitude=40.0, uses=2)
    # that of one process is taken in float32
    assert mine.output_rms == pytest.approx(
        theirs.output_rms, rel=allowed(torch.float32, length=LENGTH, logit=1.0, magnitude=1.0)
    )
    assert mine.stats is not None
    assert theirs.stats is not None
    for statistic in theirs.stats.__dataclass_fields__:
        left, right = getattr(mine.stats, statistic), getattr(theirs.stats, statistic)
        if statistic == "logit_histogram":  # of sampled rows, which are others
            assert [sum(one.counts) > 0 for one in left] == [True] * len(right)
        elif statistic == "entropy_histogram":
            assert [sum(one.counts) for one in left] == [sum(one.counts) for one in right]
        else:
            assert left == pytest.approx(right, abs=limit), statistic


RIGHT = [name for name in CASES if name not in FAULTS]


@pytest.mark.parametrize("name", [name for name in QUICK if name not in FAULTS])
def test_two_ranks_are_one(quick: Reports, name: str) -> None:
    _judge(quick, name)


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_every_split_over_two_ranks_is_the_whole(two: Reports, name: str) -> None:
    _judge(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FOUR if name not in FAULTS])
def test_every_split_over_four_ranks_is_the_whole(four: Reports, name: str) -> None:
    _judge(four, name)


def _judge_fault(reports: Reports, name: str) -> None:
    for report in reports:
        found = {(finding.site, finding.severity, finding.rule) for finding in report[name].findings}
        assert {("layers.0", "critical", "mask_audit"), ("layers.1", "critical", "mask_audit")} <= found
        assert report[name].exit_code == 1
        assert report[name].ranks is not None
        assert set(report[name].ranks.findings) == {tuple(range(len(reports)))}


def test_a_mask_by_the_places_in_the_shards_is_found(quick: Reports) -> None:
    _judge_fault(quick, "local")


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_masks_over_two_ranks_are_found(two: Reports, name: str) -> None:
    _judge_fault(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_masks_over_four_ranks_are_found(four: Reports, name: str) -> None:
    _judge_fault(four, name)


def test_the_weight_on_later_keys_is_that_of_all_ranks(quick: Reports) -> None:
    model = Decoder(alone, 1).eval()
    x = whole()
    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(**x)
    q, k = (getattr(run.tensors[0], name).values for name in ("query", "key"))
    half = LENGTH // 2
    visible = torch.ones(half, half, dtype=torch.bool).tril().repeat(2, 2)
    weights = (q @ k.mT * split_models.WIDTH**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    call = quick[0]["local"].calls[0].call
    assert call.future_weight == pytest.approx(float(weights.triu(1).sum(-1).mean()), abs=1e-12)
    assert call.mask is not None
    assert call.mask.least == -half


def test_stages_of_one_name_are_told_apart(quick: Reports) -> None:
    for report in quick:
        assert [judged.call.site for judged in report["stages"].calls] == ["layer@rank0", "layer@rank1"]
        assert report["stages"].ranks is not None
        assert [split.ranks for split in report["stages"].ranks.attentions] == [(0,), (1,)]
