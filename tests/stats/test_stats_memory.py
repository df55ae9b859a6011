"""No tile grows with L x S: the largest tensor of a long call, as a dispatch mode sees it."""

from __future__ import annotations

import pytest
import torch

from sqrtdk.stats import head_stats_from_logits, head_stats_from_qk
from tests.stats.largest import Largest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_a_long_call_stays_in_tiles(mask: str) -> None:
    query, key = torch.randn(2, 2, 4096, 8), torch.randn(2, 1, 4096, 8)
    visible = (torch.arange(4096) < 4000).expand(2, 1, 1, 4096) if mask == "padding" else None
    with Largest() as seen:
        head_stats_from_qk(query, key, scale=0.3, is_causal=mask == "causal", visible=visible, future=True)
    assert 2**16 < seen.elements <= 2**22


def test_logits_are_not_copied_whole() -> None:
    logits = torch.zeros(1, 1, dtype=torch.float16).expand(2048, 4096)
    with Largest() as seen:
        head_stats_from_logits(logits.view(1, 1, 2048, 4096))
    assert seen.elements <= 2**22
