"""Attentions that are parts of rows of several ranks: no hang, one report of them; a watch has no entropy of a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqrtdk.laws.table import names_of
from tests.monitor import parts_of_rows
from tests.monitor import ranks_at_work as work

Found = list[dict[str, Any]]
PART = "it is part of a row of several ranks"


@pytest.fixture(scope="module")
def found(two_ranks: Path) -> Found:
    """What each of two ranks was told of each model."""
    ranks = work.written(two_ranks / "rows", 2)
    assert all(ranks), "a rank did not end"
    return ranks


@pytest.mark.parametrize("name", parts_of_rows.SPLIT)
def test_check_puts_the_parts_of_a_row_together(found: Found, name: str) -> None:
    for rank in found:
        told = rank[name]
        assert told["verdicts"] == ["exact", "exact"]
        assert told["reasons"] == told["findings"] == []


@pytest.mark.parametrize("name", parts_of_rows.SPLIT)
def test_no_law_is_asked_of_several_ranks(found: Found, name: str) -> None:
    for rank in found:
        assert rank[name]["laws"] == dict.fromkeys(names_of("all"), "not asked")
        assert rank[name]["why"] == ["2 ranks run the model together, and each would have to run it equally often"]
        assert rank[name]["asked"] == ["not asked"]


def test_a_watch_has_no_entropy_of_heads_for_tokens_unless_it_is_told_of_them(found: Found) -> None:
    for rank in found:
        calls = rank["ulysses"]["watched"][0]["calls"].values()
        assert calls
        assert all(call["reason"].startswith(PART) for call in calls)
        assert not any("entropy_nats" in call["columns"] for call in calls)
        assert all(call["ratio"] == pytest.approx(1.0) for call in calls)


def test_data_parallel_models_are_measured_as_before(found: Found) -> None:
    for rank in found:
        for name in ("alone", "ddp", "fsdp"):
            assert rank[name]["reasons"] == []
            assert all("entropy_nats" in call["columns"] for call in rank[name]["watched"][0]["calls"].values())
        for name in ("alone", "ddp"):  # without a collective in the forward pass nothing can hang
            assert rank[name]["laws"]["causal"] == "kept"
        assert set(rank["fsdp"]["laws"].values()) == {"not asked"}
