"""A loop of Accelerate that is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import sqrtdk

ROWS, LENGTH = 4, 5
pytestmark = pytest.mark.usefixtures("accelerate_anew")


def _losses(watched: bool, unwrapped: bool = False, precision: str = "no") -> tuple[list[float], Any]:
    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    data = torch.utils.data.DataLoader(torch.randn(6 * ROWS, LENGTH, 16), batch_size=ROWS)
    model, optimizer, data = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1), data)
    losses = []
    seen = accelerator.unwrap_model(model) if unwrapped else model
    health = sqrtdk.watch(seen, every=1 if watched else lambda step: False)
    with health:
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                health.step(loss)
    return losses, health


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unwrapped", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_is_one_of_the_optimizer(unwrapped: bool, precision: str) -> None:
    plain, _ = _losses(watched=False, precision=precision)
    losses, health = _losses(watched=True, unwrapped=unwrapped, precision=precision)
    assert losses == plain
    assert [sample.step for sample in health.samples] == [1, 2, 3]
    assert [sample.loss for sample in health.samples] == losses[1::2]
    for sample in health.samples:
        (call,) = sample.calls
        assert call.site == "self_attn"
        assert list(call.columns["rows"]) == [2 * ROWS * LENGTH] * 2
