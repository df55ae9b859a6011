"""What holds for every attention, whichever reader reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.blocks import WAYS

B, L, H, E = 2, 12, 2, 16
ROOT = E**-0.5


class Attend(nn.Module):
    """Projections, and in the middle one of the ways to attend block by block."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, H * E) for _ in range(3))
        self.way = WAYS[way].way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.way(q, k, v, (ROOT,) * 3, (None, None)).transpose(1, 2).flatten(2)


def traced(way: str, device: str) -> Trace:
    """A run on the CPU, with a default device of the caller's: what ends with the trace is read under it."""
    torch.manual_seed(0)
    model, x = Attend(way), torch.randn(B, L, 32)
    with torch.no_grad(), torch.device(device), sqrtdk.trace(model) as run:
        model(x)
    return run


@pytest.mark.parametrize("way", ["by_blocks_of_queries", "divided_at_every_block", "in_pieces_of_buffers", "running"])
def test_the_callers_default_device_changes_no_record(way: str) -> None:
    plain, moved = traced(way, "cpu"), traced(way, "meta")
    assert len(plain.calls) == 1
    assert (moved.not_attention, moved.not_measured) == ((), ())
    assert moved.calls == plain.calls
