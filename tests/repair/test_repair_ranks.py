"""Two gloo processes, each with its half of the batch, give the weights of one process on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.tracing.tape.stance import fast_path_off
from tests.repair import watch_ranks
from tests.repair.ranks import CASES, RANKS, build, clip, inputs
from tests.support.two_ranks import two_ranks as two_ranks


@pytest.fixture(scope="module")
def ranks(two_ranks: Path) -> list[dict[Any, Any]]:
    return [torch.load(two_ranks / "repair" / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "way"), CASES)
def test_two_ranks_give_the_weights_of_one_process(ranks: list[dict[Any, Any]], name: str, way: str) -> None:
    before = dict(build(name).named_parameters())
    with fast_path_off():
        (record,), expected = clip(name, build(name), inputs(name))
    assert len(record.clipped) > 0
    assert record.refused is None
    moved = {key for key, weight in expected.items() if not torch.equal(weight, before[key])}
    for rank in ranks:
        assert not isinstance(rank[name, way], str), rank[name, way]
        gamma, measured, refused, weights = rank[name, way]
        assert refused is None
        # a sequence's maximum may round differently beside another
        torch.testing.assert_close(measured, record.measured)
        torch.testing.assert_close(gamma, record.gamma)
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key])
            assert key in moved or torch.equal(weight, before[key])
    one, other = (rank[name, way][3] for rank in ranks)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.full
def test_sharded_copies_of_an_optimizer_agree_with_the_shards(ranks: list[dict[Any, Any]]) -> None:
    """Each rank has held its weights against the copies: here that it did, and that they are one another's."""
    results = [rank["separate", "masters"] for rank in ranks]
    assert not any(isinstance(result, str) for result in results), results
    assert (results[0][0] < 1).any()
    assert all(torch.equal(results[0][3][key], results[1][3][key]) for key in results[0][3])


@pytest.mark.full
def test_parts_of_a_weight_are_refused(ranks: list[dict[Any, Any]]) -> None:
    """Of tensor-parallel layers: each rank has the maxima of its own heads alone."""
    for rank in ranks:
        assert all("tensor parallel" in str(reason) for reason in rank["parts"]), rank["parts"]


@pytest.mark.full
def test_a_rank_without_a_call_at_first_is_waited_for(ranks: list[dict[Any, Any]]) -> None:
    """What it can't clip, no one clips; then all do, by the same maxima."""
    one, other = (rank["late"] for rank in ranks)
    assert [clipped for clipped, _ in one] == [clipped for clipped, _ in other] == [False, True]
    assert all(torch.equal(mine, yours) for (_, mine), (_, yours) in zip(one, other, strict=True))


def test_maxima_that_no_one_merged_are_refused(ranks: list[dict[Any, Any]]) -> None:
    assert {rank["no group"] for rank in ranks} == {
        "each of 2 processes saw maxima of its own: weights clipped by them would part"
    }


# -- by the maxima of a watch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", watch_ranks.SCENARIOS)
def test_ranks_have_the_weights_of_one_process(ranks: list[dict[Any, Any]], name: str) -> None:
    one, other = (rank["watch"][name] for rank in ranks)
    assert one["refused"] == other["refused"] == [None, None]
    assert one["clipped"] == other["clipped"]
    assert one["weights"] == other["weights"]
    assert all(one["clipped"])
    assert one["measured"] == other["measured"]


def test_ranks_with_halves_of_a_batch_clip_as_one_process_with_the_whole(ranks: list[dict[Any, Any]]) -> None:
    whole = watch_ranks.alone()
    for name in ("ddp", "fsdp"):
        assert ranks[0]["watch"][name]["clipped"] == whole["clipped"]
        for key, value in whole["weights"].items():
            torch.testing.assert_close(torch.tensor(ranks[0]["watch"][name]["weights"][key]), torch.tensor(value))


def test_a_rank_without_a_call_at_first_clips_when_it_knows(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        early, late = rank["watch"]["absent"]
        assert all("next sampled step" in text for text in early["refused"])
        assert not any(early["clipped"])
        assert late["refused"] == [None, None]
        assert all(late["clipped"])
    assert ranks[0]["watch"]["absent"][1]["weights"] == ranks[1]["watch"]["absent"][1]["weights"]


def test_ranks_that_are_watched_alone_or_share_heads_are_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        assert rank["watch"]["refusals"]["alone"].startswith("each of 2 processes watches alone")
        assert rank["watch"]["refusals"]["merged"] == ""
        assert rank["watch"]["refusals"]["heads"].endswith("these share heads")
