"""QK-clip by the maxima of a watch in two processes: what one process with all of the rows does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.monitor import ranks_at_work
from tests.repair import watch_ranks as ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = ranks_at_work.run(ranks.work, 2, tmp_path_factory.mktemp("ranks"))
    assert all(every), "a rank ended before its scenarios did"
    return every


@pytest.mark.parametrize("name", ranks.SCENARIOS)
def test_ranks_have_the_weights_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    one, other = (rank[name] for rank in found)
    assert one["refused"] == other["refused"] == [None, None]
    assert one["clipped"] == other["clipped"]
    assert one["weights"] == other["weights"]
    assert all(one["clipped"])
    assert one["measured"] == other["measured"]


def test_ranks_with_halves_of_a_batch_clip_as_one_process_with_the_whole(found: list[dict[str, Any]]) -> None:
    whole = ranks.alone()
    for name in ("ddp", "fsdp"):
        assert found[0][name]["clipped"] == [list(heads) for heads in whole["clipped"]]
        for key, value in whole["weights"].items():
            torch.testing.assert_close(torch.tensor(found[0][name]["weights"][key]), torch.tensor(value))


def test_a_rank_without_a_call_at_first_clips_when_it_knows(found: list[dict[str, Any]]) -> None:
    for rank in found:
        early, late = rank["absent"]
        assert all("next sampled step" in text for text in early["refused"])
        assert not any(early["clipped"])
        assert late["refused"] == [None, None]
        assert all(late["clipped"])
    assert found[0]["absent"][1]["weights"] == found[1]["absent"][1]["weights"]


def test_ranks_that_are_watched_alone_or_share_heads_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refusals"]["alone"].startswith("each of 2 processes watches alone")
        assert rank["refusals"]["merged"] == ""
        assert rank["refusals"]["heads"].endswith("these share heads")
