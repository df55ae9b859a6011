"""A watch over ranks that share a sequence: rows of all ranks are one figure a head, that of one process in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.monitor import context_parallel as work
from tests.monitor import ranks_at_work
from tests.monitor import ranks_models as models
from tests.monitor.test_ranks import complaints
from tests.support.once import made_once

Found = list[dict[str, Any]]
UNSTORED = ("stored_product",)  # eager attention stores its products, and kernels none
COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=COUNTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank was told of each way to share a sequence."""
    if request.param == 2:
        folder = request.getfixturevalue("two_ranks") / "context"
    else:
        folder = made_once(
            tmp_path_factory, "context-of-four", lambda folder: ranks_at_work.run(work.work_of, 4, folder)
        )
    ranks = ranks_at_work.written(folder, request.param)
    assert all(ranks), "a rank did not end"
    return ranks


def judge(found: Found, name: str) -> None:
    wholes = work.alone(name)
    for rank in found:
        for joined, whole in zip(rank[name], wholes, strict=True):
            for place, call in joined["calls"].items():
                ratio = whole["calls"][place]["ratio"]
                assert math.isclose(call["ratio"], ratio, rel_tol=1e-12)  # a slope of other rows
                call["ratio"] = ratio
            assert complaints(joined, whole, UNSTORED) == []
            assert joined["missed"] == []
    # `complaints` compares what is there: entropy, peak and the number of keys are
    columns = found[0][name][-1]["calls"]["layers.1 0"]["columns"]
    assert {"entropy_nats", "peak_max", "keys", "max_logit_p95"} <= set(columns)
    assert columns["rows"] == [8 * work.LENGTH] * models.HEADS


@pytest.mark.parametrize("name", ["ring", "lines", "powers", "online"])
def test_a_ring_of_ranks_gives_the_rows_of_the_whole_sequence(found: Found, name: str) -> None:
    judge(found, name)


def test_the_backward_pass_of_a_ring_is_no_fault_and_its_rows_are_measured(found: Found) -> None:
    for rank in found:
        (sample,) = rank["backward"]
        assert not [name for name, _ in sample["alarms"] if name == "gradient"]
        (missed,) = sample["missed"]
        assert "also serve other ranks" in missed
        assert all(call["reason"] is None for call in sample["calls"].values())


@pytest.mark.full
@pytest.mark.parametrize("name", [*work.WAYS, "trained"])
def test_every_way_to_share_a_sequence_gives_its_rows(found: Found, name: str) -> None:
    judge(found, name)
    if name == "trained":  # in the second step gradients are known, of all ranks
        assert "query_grad_p50" in found[0][name][-1]["calls"]["layers.1 0"]["columns"]


def test_some_rows_of_each_rank_count_alone(found: Found) -> None:
    columns = found[0]["cut"][0]["calls"]["layers.0 0"]["columns"]
    assert columns["rows"] == [8 * 2 * len(found)] * models.HEADS


def test_what_is_not_known_is_said(found: Found) -> None:
    """Heads for tokens without a word on them, sums of exponentials that ranks exchange, rows that meet other keys."""
    reasons = {
        "ulysses": "comes out of a collective",
        "shared": "sums of exponentials",
        "halves": "in another call",
    }
    for rank in found:
        for name, reason in reasons.items():
            for call in rank["unknown"][name][0]["calls"].values():
                assert reason in call["reason"]
                assert "entropy_nats" not in call["columns"]


def test_the_rank_is_named_where_a_nan_begins(found: Found) -> None:
    """In the input of rank 1, which spreads by its keys; and in the keys of the last rank, behind their projection."""
    last = len(found) - 1
    for rank in found:
        assert rank["nan_input"][0]["first"] == ["layers.0.q_proj", "inputs", 1]
        assert rank["nan_within"][0]["first"] == ["layers.0.o_proj", "between", last]
