"""What ranks send and hold, from sizes alone, is what real processes sent and held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sqrtdk
from sqrtdk import _json
from sqrtdk.monitor.wire import RingSizes, record_bytes, sample_bytes
from tests.monitor import context_parallel as work
from tests.monitor import ranks_at_work
from tests.monitor import ranks_models as models

SIZES = RingSizes(
    ranks=2,
    tokens=work.LONG,
    heads=models.HEADS,
    key_heads=models.HEADS,
    head_dim=models.WIDTH // models.HEADS,
    batch=2,
    itemsize=4,
)


@pytest.fixture(scope="module")
def measured(two_ranks: Path) -> list[dict[str, int]]:
    return [rank["measured"] for rank in ranks_at_work.written(two_ranks / "context", 2)]


def test_bytes_on_the_wire_are_those_that_were_sent(measured: list[dict[str, int]]) -> None:
    for rank in measured:
        assert rank["forward"] == SIZES.sent_forward()
        assert rank["statistics"] == SIZES.sent_forward(statistics=True)
        assert rank["backward"] == SIZES.sent_backward()


def test_a_row_of_a_sample_has_the_bytes_that_were_packed(measured: list[dict[str, int]]) -> None:
    rows = 2 * work.LONG // 2  # two sequences, half of each
    for rank in measured:
        assert rank["sample"] == sample_bytes(models.HEADS, rows, attentions=2)
        assert rank["sample_gradients"] == sample_bytes(models.HEADS, rows, attentions=2, gradients=True)


def test_tensors_at_once_are_as_many_as_were_held(measured: list[dict[str, int]]) -> None:
    """The bound is not passed, and no more than twice what was held; a matrix of logits would be."""
    for rank in measured:
        assert SIZES.held() / 2 <= rank["held"] <= SIZES.held()


@pytest.mark.parametrize("heads", [4, 32])
def test_a_record_has_about_the_bytes_that_are_said(heads: int) -> None:
    model, x = torch.nn.MultiheadAttention(4 * heads, heads, batch_first=True).train(), torch.randn(1, 16, 4 * heads)
    with sqrtdk.trace(model) as run:
        model(x, x, x)
    assert len(_json.exact_line(run.calls[0])) == pytest.approx(record_bytes(heads), rel=0.15)
